"""torch's counter of operations counts our ops: by formulas, and with gradients by products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from moe_ops import OPS, using
from moe_ops.bench.overhead import calls, decode_calls
from moe_ops.registry.rules.flops import _grouped
from moe_ops.registry.spec import DECODE_OPS, Op
from moe_ops.testing import Case, make_layer
from tests.decode_ops.test_every_decode_op import CALLS

T, E, K, D, I = 6, 4, 2, 16, 8  # noqa: E741
LAYER = make_layer(Case(name="tiny", T=T, E=E, K=K, D=D, I=I))
GIVEN = (LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, LAYER.w13_EFD, LAYER.w2_EDI)
BOTH = 2 * T * K * (2 * I * D + D * I)  # products of a layer


def counted(function: Any, *args: Any, **kwargs: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def test_a_layer_is_counted_by_its_pairs() -> None:
    assert counted(moe_ops.experts, *GIVEN) == BOTH
    assert counted(torch.ops.moe_ops.experts, *GIVEN) == BOTH
    assert counted(torch.ops.moe_ops.experts.planned, *GIVEN, plan="reference") == BOTH
    w13, w2 = LAYER.w13_EFD, LAYER.w2_EDI
    assert counted(moe_ops.moe, LAYER.x_TD, LAYER.logits_TE, w13, w2, K) == BOTH
    turned = (*GIVEN[:3], w13.mT.contiguous(), w2.mT.contiguous())
    assert counted(moe_ops.experts, *turned, transposed=True) == BOTH
    ungated = (*GIVEN[:3], w13[:, :I].contiguous(), w2)
    assert counted(moe_ops.experts, *ungated, gated=False) == 2 * T * K * 2 * D * I


def test_codes_count_as_the_values_that_they_stand_for() -> None:
    x_RD, w_EFD = torch.randn(5, 64), torch.randn(3, 8, 64)
    packed = moe_ops.quant.packing.quantize(w_EFD, moe_ops.quant.formats.Format.of("mxfp4"))
    assert packed.values.shape[2] == 32
    ends = torch.tensor([2, 4, 5], dtype=torch.int32)
    encoded: dict[str, Any] = {"w_scale_EFG": packed.scale, "w_format": "mxfp4"}
    assert counted(moe_ops.expert_gemm, x_RD, packed.values, ends, **encoded) == 2 * 5 * 8 * 64
    codes, scales = moe_ops.quantize(x_RD, "mxfp4")
    encoded |= {"x_scale_RG": scales, "x_format": "mxfp4", "out_dtype": "float32"}
    assert counted(moe_ops.expert_gemm, codes, packed.values, ends, **encoded) == 2 * 5 * 8 * 64


@pytest.mark.parametrize("trained", ["all", "tokens"])
@pytest.mark.parametrize("width", [I, I - 1])  # of the grouped product, and of one per expert
def test_a_gradient_counts_the_products_that_are_run(width: int, trained: str) -> None:
    """Forward, and of the backward a product for the rows and one for the weights, if wanted."""
    x, weights, ids, w13, w2 = (t.clone() for t in GIVEN)
    w13, w2 = w13[:, : 2 * width].contiguous(), w2[:, :, :width].contiguous()
    for t in (x,) if trained == "tokens" else (x, w13, w2):
        t.requires_grad_()
    forward = 2 * T * K * 3 * D * width
    with FlopCounterMode(display=False) as counter:
        out = moe_ops.experts(x, weights, ids, w13, w2)
        assert counter.get_total_flops() == forward
        out.sum().backward()
    assert counter.get_total_flops() == forward * (2 if trained == "tokens" else 3)


def test_what_runs_with_gradients_counts_as_the_op_does() -> None:
    """The products of the layer's stages on ATen, which torch counts itself."""
    w13, w2 = LAYER.w13_EFD[:, : 2 * I - 2].contiguous(), LAYER.w2_EDI[:, :, : I - 1].contiguous()
    with using("aten"), torch.enable_grad():
        stages = counted(moe_ops.experts, GIVEN[0].clone().requires_grad_(), *GIVEN[1:3], w13, w2)
    assert stages == counted(moe_ops.experts, *GIVEN[:3], w13, w2)


def test_grouped_products_are_counted_whatever_is_grouped() -> None:
    rows, weights, stacked = torch.empty(6, 16), torch.empty(4, 16, 8), torch.empty(4, 3, 16)
    assert _grouped(rows, weights) == 2 * 6 * 16 * 8
    assert _grouped(rows.T, torch.empty(6, 8)) == 2 * 16 * 6 * 8
    assert _grouped(stacked, weights) == 4 * 2 * 3 * 16 * 8


# Ops whose definition torch counts; a convolution it is only by name.
SEEN = sorted(set(DECODE_OPS) - {"experts_onto", "convolution_step"})


def args_of(op: Op) -> tuple[Any, ...]:
    return copy.deepcopy(CALLS[op.name])


@pytest.mark.parametrize("name", SEEN)
def test_an_op_counts_as_its_definition(name: str) -> None:
    op = DECODE_OPS[name]
    with torch.no_grad():
        assert counted(op, *args_of(op)) == counted(op.reference, *args_of(op)) > 0


@pytest.mark.parametrize("length", [5, 16, 40, 130])
@pytest.mark.parametrize("gates", ["head", "channel"])
def test_a_prompt_counts_as_its_chunks(length: int, gates: str) -> None:
    B, H, N, width, V = 2, 4, 2, 16, 8
    q, v = torch.randn(B, length, N, width), torch.randn(B, length, H, V)
    one = torch.rand(B, length, H)
    g = -one if gates == "head" else -torch.rand(B, length, H, width)
    rule, scan = DECODE_OPS["delta_rule"], DECODE_OPS["state_space_scan"]
    args = (q, q, v, g, one, None, 0.25)
    assert counted(rule, *args) == counted(rule.reference, *args) > 0
    spaces = (v, one, -torch.ones(H), q, q, None, 0.0, 1.0)
    assert counted(scan, *spaces) == counted(scan.reference, *spaces) > 0


def test_others_count_by_hand() -> None:
    x, state, weight, *_ = args_of(DECODE_OPS["convolution_step"])
    assert counted(DECODE_OPS["convolution_step"], x, state, weight) == 2 * weight.numel() * len(x)
    onto = DECODE_OPS["experts_onto"]
    assert counted(onto, torch.zeros_like(LAYER.x_TD), *GIVEN) == BOTH
    tables = (torch.zeros(E, dtype=torch.int32), torch.arange(E, dtype=torch.int32))
    assert counted(moe_ops.experts_over_ranks, *GIVEN, *tables, T) == BOTH


def test_what_has_no_product_counts_nothing() -> None:
    for op, args in (calls() | decode_calls()).items():
        assert op.rules is not None
        none = isinstance(op.rules.flops, str)
        assert (counted(op, *args) == 0) == none, op.name


def test_a_mode_that_looks_on_leaves_gradients_as_they_are() -> None:
    def gradient() -> Tensor:
        x = GIVEN[0].clone().requires_grad_()
        moe_ops.experts(x, *GIVEN[1:]).square().sum().backward()
        assert x.grad is not None
        return x.grad

    want = gradient()
    with FlopCounterMode(display=False):
        torch.testing.assert_close(gradient(), want, rtol=1e-4, atol=1e-6)


def test_rules_are_given_once() -> None:
    op = OPS["experts"]
    assert op.rules is not None
    with pytest.raises(ValueError, match=r"moe_ops\.experts has rules already"):
        op.obeys(op.rules)
