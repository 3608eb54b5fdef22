"""Codes, weights in a layout, narrow sums: gradients that are right, or refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import quantize
from moe_ops.testing import TOL, Case, assert_close, make_layer

CASE = Case(name="small", T=6, E=3, K=2, D=128, I=64)
LAYER = make_layer(CASE)
BF16 = make_layer(CASE, torch.bfloat16)
LAYOUTS = tuple(moe_ops.experts.layouts)


def in_codes(format: str) -> dict[str, Any]:
    w13, w2 = (quantize(w, Format.of(format)) for w in (LAYER.w13_EFD, LAYER.w2_EDI))
    return {
        "x_TD": LAYER.x_TD, "weights_TK": LAYER.weights_TK, "ids_TK": LAYER.ids_TK,
        "w13_EFD": w13.values, "w2_EDI": w2.values, "w13_scale_EFG": w13.scale,
        "w2_scale_EDG": w2.scale, "w_format": format,
    }  # fmt: skip


def gradients(call: dict[str, Any], names: tuple[str, ...], backend: str = "") -> list[Tensor]:
    leaves = {n: call[n].detach().clone().requires_grad_() for n in names}
    with moe_ops.using(backend) if backend else nullcontext():
        loss = moe_ops.experts(**{**call, **leaves}).square().sum()
        return list(torch.autograd.grad(loss, list(leaves.values())))


@pytest.mark.parametrize("format", ["float8_e4m3fn:1x32", "int4:1x32"])
@pytest.mark.parametrize("names", [("x_TD",), ("w13_scale_EFG", "x_TD"), ("w2_scale_EDG",)])
def test_scales_of_codes(format: str, names: tuple[str, ...]) -> None:
    call = in_codes(format)
    right = gradients(call, names, "reference")
    for name, g, w in zip(names, gradients(call, names), right, strict=True):
        assert_close(g, w, TOL["experts", torch.float32], name)


@pytest.mark.parametrize("name", ["w13_EFD", "w2_EDI"])
def test_codes_that_are_floats_refuse_a_backward(name: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name} holds codes of .* moe_ops.fake_quantize"):
        gradients(in_codes("float8_e4m3fn:1x32"), ("x_TD", name))


def test_codes_of_one_product_refuse_a_backward() -> None:
    call = in_codes("float8_e4m3fn:1x32")
    w_EFD = call["w13_EFD"].requires_grad_()
    ends_E = torch.tensor([2, 4, 6], dtype=torch.int32)
    y_RF = moe_ops.expert_gemm(
        LAYER.x_TD, w_EFD, ends_E, w_scale_EFG=call["w13_scale_EFG"], w_format=call["w_format"]
    )
    with pytest.raises(RuntimeError, match="w_EFD holds codes of"):
        y_RF.sum().backward()


def in_layout(layout: str) -> dict[str, Any]:
    plain = {"w13_EFD": BF16.w13_EFD, "w2_EDI": BF16.w2_EDI}
    prepared = {**plain, **moe_ops.experts.layouts[layout].prepare(dict(plain))}
    given = {"x_TD": BF16.x_TD, "weights_TK": BF16.weights_TK, "ids_TK": BF16.ids_TK}
    return {**given, **prepared, "layout": layout}


@pytest.mark.parametrize("backend", ["", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_in_a_layout_refuse_a_backward(layout: str, backend: str) -> None:
    """And let tokens and routing weights have theirs, and a forward go."""
    call = in_layout(layout)
    plain = {**call, "w13_EFD": BF16.w13_EFD, "w2_EDI": BF16.w2_EDI, "layout": ""}
    names = ("x_TD", "weights_TK")
    got = gradients(call, names, backend)
    for name, g, w in zip(names, got, gradients(plain, names, backend), strict=True):
        assert_close(g, w, TOL["experts", torch.bfloat16], name)
    with pytest.raises(RuntimeError, match=r"w13_EFD is stored in the layout .* moe_ops.prepare"):
        gradients(call, ("x_TD", "w13_EFD"), backend)


@pytest.mark.parametrize("layout", ["flashinfer.up_gate", "flashinfer.chunks"])
def test_a_weight_that_a_layout_leaves_has_its_gradient(layout: str) -> None:
    call = in_layout(layout)
    (got,) = gradients(call, ("w2_EDI",))
    (want,) = gradients({**call, "w13_EFD": BF16.w13_EFD, "layout": ""}, ("w2_EDI",))
    assert_close(got, want, TOL["experts", torch.bfloat16])


@pytest.mark.parametrize("layout", LAYOUTS[:1])
def test_a_compiled_layout_refuses_no_earlier_than_its_backward(layout: str) -> None:
    torch._dynamo.reset()
    call = in_layout(layout)
    w13_EFD = call["w13_EFD"].clone().requires_grad_()
    fast = torch.compile(
        lambda w: moe_ops.experts(**{**call, "w13_EFD": w}), backend="aot_eager", fullgraph=True
    )
    out_TD = fast(w13_EFD)
    with pytest.raises(RuntimeError, match="w13_EFD is stored in the layout"):
        out_TD.sum().backward()


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_is_rounded_and_not_its_terms(out_dtype: str, dtype: torch.dtype) -> None:
    """Rows that cancel but for a little, of which no term fits float16."""
    big_RM = torch.full((8, 4), 3e4, dtype=dtype)
    a_RM = torch.cat((big_RM, -big_RM, torch.ones(8, 4, dtype=dtype)))
    b_RN = torch.full((24, 2), 4.0, dtype=dtype)
    got = moe_ops.expert_wgrad(
        a_RM, b_RN, torch.tensor([24], dtype=torch.int32), out_dtype=out_dtype
    )
    assert got.dtype is getattr(torch, out_dtype)
    assert (got == 32).all(), got
