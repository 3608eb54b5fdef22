"""Under torch.autocast ops take what a linear gives them, and train in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import MoELayer
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, Case, Tol, assert_close, make_layer

TOL = Tol(4e-2, "products of bfloat16, against float32")
LAYER = make_layer(Case(name="tiny", T=6, E=4, K=2, D=16, I=8))
WEIGHTS = (LAYER.w13_EFD, LAYER.w2_EDI)


def gemm(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    ends = torch.tensor([2, 4, 5, 6], dtype=torch.int32)
    y = moe_ops.activate(moe_ops.expert_gemm(x, w13, ends))
    return moe_ops.expert_gemm(y, w2, ends)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "experts": lambda x, *w: moe_ops.experts(x, LAYER.weights_TK, LAYER.ids_TK, *w),
    "moe": lambda x, *w: moe_ops.moe(x, LAYER.logits_TE, *w, 2),
    "expert_gemm": gemm,
    "torch.ops": lambda x, *w: torch.ops.moe_ops.experts(x, LAYER.weights_TK, LAYER.ids_TK, *w),
    "by name": lambda x, *w: moe_ops.experts(
        x, weights_TK=LAYER.weights_TK, ids_TK=LAYER.ids_TK, w13_EFD=w[0], w2_EDI=w[1]
    ),
}


def cast(dtype: torch.dtype = BF16, enabled: bool = True) -> Any:
    return torch.autocast("cpu", dtype=dtype, enabled=enabled)


def trained(call: Callable[..., Tensor], enabled: bool) -> list[Tensor]:
    """A result and its gradients, behind a linear."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 16)
    leaves = [t.clone().requires_grad_() for t in (LAYER.x_TD, *WEIGHTS)]
    with cast(enabled=enabled):
        out = call(linear(leaves[0]), *leaves[1:])
    assert out.dtype is (BF16 if enabled else torch.float32)
    parameters = [*leaves, linear.weight]
    found = torch.autograd.grad(out.float().square().sum(), parameters)
    assert all(g.dtype is torch.float32 for g in found)
    return [out.float(), *found]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_behind_a_linear_trains_as_in_float32(name: str) -> None:
    got, want = (trained(CALLS[name], enabled) for enabled in (True, False))
    for g, w in zip(got, want, strict=True):
        assert_close(g.detach(), w.detach(), TOL, name)


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_compiled_call_is_cast_as_well(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(CALLS["experts"], backend=backend)
    for g, w in zip(trained(compiled, True), trained(CALLS["experts"], True), strict=True):
        assert_close(g, w, TOL, backend)


@pytest.mark.parametrize("gate", [False, True])
def test_a_layer_behind_a_linear_trains(gate: bool) -> None:
    torch.manual_seed(0)
    layer, linear = MoELayer(4, 2, 16, 8, internal_gate=gate), nn.Linear(16, 16)
    found = []
    for enabled in (True, False):
        layer.zero_grad()
        with cast(enabled=enabled):
            out = layer(linear(LAYER.x_TD), None if gate else LAYER.logits_TE)
        out.float().square().sum().backward()
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        assert len(grads) == 2 + gate and all(g.dtype is torch.float32 for g in grads)
        found.append([out.detach().float(), *grads[:2]])
    if not gate:  # whose rounding chooses other experts
        for g, w in zip(*found, strict=True):
            assert_close(g, w, TOL)


def test_a_router_stays_in_float32() -> None:
    want = moe_ops.route(LAYER.logits_TE, 2)
    with cast():
        got = moe_ops.route(LAYER.logits_TE, 2)
        assert moe_ops.activate(LAYER.x_TD).dtype is torch.float32
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w) and g.dtype is w.dtype


def test_codes_and_scales_stay_as_they_are() -> None:
    x, w = torch.randn(5, 64), torch.randn(3, 8, 64)
    ends = torch.tensor([2, 4, 5], dtype=torch.int32)
    packed = packing.quantize(w, Format.of("float8_e4m3fn:row"))
    named: dict[str, Any] = {"w_scale_EFG": packed.scale, "w_format": "float8_e4m3fn:row"}
    with cast():
        got = moe_ops.expert_gemm(x, packed.values, ends, **named)
        codes, scales = moe_ops.quantize(x, "float8_e4m3fn:row")
        named |= {"x_format": "float8_e4m3fn:row", "x_scale_RG": scales, "out_dtype": "float32"}
        of_codes = moe_ops.expert_gemm(codes, packed.values, ends, **named)
    assert got.dtype is BF16 and of_codes.dtype is torch.float32
    of_weight = {name: named[name] for name in ("w_scale_EFG", "w_format")}
    want = moe_ops.expert_gemm(x.to(BF16), packed.values, ends, **of_weight)
    assert torch.equal(got, want)


@pytest.mark.parametrize("times", [1, 4])  # 4: what runs is remembered
def test_what_is_remembered_of_a_call_is_not_of_one_under_autocast(times: int) -> None:
    given = (LAYER.x_TD, LAYER.weights_TK, LAYER.ids_TK, *WEIGHTS)
    for _ in range(times):
        assert moe_ops.experts(*given).dtype is torch.float32
    with cast():
        for _ in range(times):
            assert moe_ops.experts(*given).dtype is BF16
        with cast(enabled=False):
            assert moe_ops.experts(*given).dtype is torch.float32
    assert moe_ops.experts(*given).dtype is torch.float32


def test_a_half_is_a_half() -> None:
    with cast(torch.float16):
        assert CALLS["experts"](LAYER.x_TD, *WEIGHTS).dtype is torch.float16
    double = LAYER.x_TD.double()
    with (
        cast(),
        pytest.raises(TypeError, match="w13_EFD must be float64; got bfloat16"),
    ):
        CALLS["experts"](double, *WEIGHTS)
    routed, doubles = LAYER.weights_TK.double(), [w.double() for w in WEIGHTS]
    with cast():  # float64 stays, as torch has it
        assert moe_ops.experts(double, routed, LAYER.ids_TK, *doubles).dtype is torch.float64
