"""Linear layers of codes with one row, normed or not, against what the codes stand for.

The interpreter multiplies float16 and float32 alone, so bfloat16 is left to tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_linears import multiply_few, multiply_normed, supports_normed
from moe_ops.decode_ops import normed_quantized_linears, quantized_linears
from moe_ops.decode_ops.normed_quantized_linears import NormedQuantizedLinearsCall
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.kernels.triton.decode.coded import Coded
from moe_ops.kernels.triton.decode.norm import norm_of
from moe_ops.kernels.triton.decode.quantized_linears_plan import QuantizedRowPlan, row_plan_for
from moe_ops.kernels.triton.decode.quantized_row import run_normed_row, run_row
from moe_ops.testing import DEVICE, F16, F32, Tol, assert_close
from tests.chosen import in_turn
from tests.decode_ops import test_quantized_linears as of_the_op

FORMATS = ("float8_e4m3fn:row", "float8_e4m3fn:128x128", "float8_e4m3fn:tensor", "float8_e5m2:row",
           "int8:row", "uint8:1x32:bfloat16", "uint8:row", "uint4:1x32", "uint4:row", "int4:row",
           "int4:1x128:bfloat16", "mxfp4", "mxfp8", "nvfp4")  # fmt: skip
TOL = Tol(1e-3, "one rounding to 11 bits")
CODES = Tol(4e-3, "values of codes, too")
NORMED = Tol(2e-3, "rounded three times to 11 bits")


def call_of(*args: Any) -> tuple[QuantizedLinearsCall, list[Tensor]]:
    """Those of the op's tests, where kernels run."""

    def moved(given: Any) -> Any:
        if isinstance(given, list):
            return [moved(t) for t in given]
        return given.to(DEVICE) if isinstance(given, Tensor) else given

    call, values = of_the_op.call_of(*args)
    return QuantizedLinearsCall(*map(moved, quantized_linears.arguments.flat(call))), moved(values)


def coded(call: QuantizedLinearsCall) -> Coded:
    lists = (call.weights, call.scales, call.zeros, call.global_scales, call.biases)
    return Coded(*lists, weight_of(call.w_format, ""))


def check(got: list[Tensor], call: QuantizedLinearsCall, values: list[Tensor]) -> None:
    for y, w, b in zip(got, values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is F16 and y.is_contiguous()
        assert_close(y.float(), want.float(), TOL)


@in_turn(
    pytest.mark.parametrize("format", FORMATS),
    pytest.mark.parametrize("K", [320, 352]),
    pytest.mark.parametrize("sizes", [(33, 1, 20), (5, 16, 7, 31, 9, 1)], ids=str),
    pytest.mark.parametrize(
        "plan", [None, QuantizedRowPlan(4, 128, 4), QuantizedRowPlan(1, 64, 1)], ids=str
    ),
)
def test_codes_are_multiplied(
    plan: QuantizedRowPlan | None, sizes: tuple[int, ...], K: int, format: str
) -> None:
    call, values = call_of(1, K, sizes, format, F16)
    check(run_row(call.x_TK, coded(call), plan), call, values)


def test_a_backend_takes_one_row_so() -> None:
    call, values = call_of(1, 192, (9, 4), "uint4:1x32", F16)
    again = multiply_few(call)
    got = run_row(call.x_TK, coded(call))
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    sixes, values = call_of(1, 192, (9, 4), "mxfp6_e2m3", F16)
    for y, w, b in zip(multiply_few(sixes), values, sixes.biases, strict=True):
        want = sixes.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert_close(y.float(), want.float(), CODES)


def test_a_view_of_a_wider_input() -> None:
    call, values = call_of(1, 96, (24, 8), "int4:1x32", F16)
    wide = torch.full((1, 200), float("nan"), dtype=F16, device=DEVICE)
    wide[:, 50:146] = call.x_TK
    call.x_TK = wide[:, 50:146]
    check(run_row(call.x_TK, coded(call)), call, values)


def test_an_infinite_scale_and_a_code_of_zero_are_no_number() -> None:
    call, _ = call_of(1, 64, (4,), "int8:1x32", F16)
    call.weights[0][1, :32] = 0
    call.scales[0][1, 0] = float("inf")
    (y,) = run_row(call.x_TK, coded(call))
    assert y.isnan().tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("format", ["uint4:1x32", "uint8:row", "int4:1x32", "float8_e4m3fn:row"])
def test_an_infinite_input_gives_what_the_definition_does(format: str) -> None:
    """Also where codes have zero points, which are not multiplied apart."""
    call, _ = call_of(1, 64, (40,), format, F16)
    call.x_TK[0, 5] = float("inf")
    (got,), (want,) = run_row(call.x_TK, coded(call)), quantized_linears.body(call)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.sign()[~got.isnan()], want.sign()[~want.isnan()])


@in_turn(
    pytest.mark.parametrize("format", FORMATS),
    pytest.mark.parametrize("residual", [True, False]),
    pytest.mark.parametrize("shift", [None, 0.0, 1.0], ids=str),
    pytest.mark.parametrize("sizes", [(33, 1), (5, 16, 7, 31, 9)], ids=str),
    pytest.mark.parametrize("plan", [None, QuantizedRowPlan(2, 128, 4)], ids=str),
)
def test_a_norm_first(
    plan: QuantizedRowPlan | None,
    sizes: tuple[int, ...],
    shift: float | None,
    residual: bool,
    format: str,
) -> None:
    call, _ = call_of(1, 320, sizes, format, F16)
    added, gain = (
        (torch.randn_like(call.x_TK) if residual else None),
        torch.randn(320, device=DEVICE).to(F16),
    )
    norm, made = norm_of(call.x_TK, added, gain, 1e-5, shift)
    got = [*made, *run_normed_row(call.x_TK, norm, coded(call), plan)]
    want = normed_quantized_linears.body(normed_call(call, added, gain, shift))
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert_close(g.float(), w.float(), NORMED)
    if residual:
        assert torch.equal(got[0], want[0])


def normed_call(
    call: QuantizedLinearsCall, added: Tensor | None, gain: Tensor, shift: float | None = None
) -> NormedQuantizedLinearsCall:
    lists = (call.weights, call.scales, call.zeros, call.global_scales, call.biases)
    return NormedQuantizedLinearsCall(
        call.x_TK, added, gain, 1e-5, *lists, call.w_format, gain_shift=shift
    )


@pytest.mark.parametrize(
    ("T", "format"),
    [
        (1, "uint4:1x32"), (1, "mxfp6_e2m3"), (2, "int4:1x32"), (3, "mxfp6_e3m2"), (8, "int8:row"),
        (64, "mxfp4"), (17, "float8_e4m3fn:128x128"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("residual", [True, False])
def test_the_backend_of_a_norm(residual: bool, T: int, format: str) -> None:
    """Columns do not fill the blocks in which some codes are decoded."""
    call, _ = call_of(T, 352, (9, 40), format, F16)
    wide = torch.full((T, 400), float("nan"), dtype=F16, device=DEVICE)
    wide[:, 16:368] = call.x_TK
    added, call.x_TK = torch.randn_like(call.x_TK) if residual else None, wide[:, 16:368]
    normed = normed_call(call, added, torch.randn(352, device=DEVICE).to(F16), 1.0)
    assert supports_normed(normed) is None
    for g, w in zip(multiply_normed(normed), normed_quantized_linears.body(normed), strict=True):
        assert_close(g.float(), w.float(), CODES)


def test_rows_that_do_not_lie_side_by_side_are_refused() -> None:
    call, _ = call_of(2, 64, (4,), "int8:row", F16)
    normed = normed_call(call, None, torch.ones(64, device=DEVICE).to(F16))
    normed.x_TK = call.x_TK.t().contiguous().t()
    with pytest.raises(ValueError, match=r"the x_TK is \[2, 64\] with the strides \(1, 2\)"):
        normed_quantized_linears(*normed_quantized_linears.arguments.flat(normed))


def test_what_is_not_normed() -> None:
    wide, _ = call_of(1, 64, (9, 4), "int8:row", F32)
    said = supports_normed(normed_call(wide, None, torch.ones(64, device=DEVICE)))
    assert said == "needs bfloat16 or float16, got torch.float32"
    call, _ = call_of(1, 64, (9, 4), "int8:row", F16)
    gain = torch.ones(64, dtype=F16, device=DEVICE, requires_grad=True)
    said = supports_normed(normed_call(call, None, gain))
    assert said == "is not differentiable, and an argument requires grad"


def test_plans_hold_no_more_than_registers_do() -> None:
    """Of two tiles a thread holds up to 128 bytes each."""
    for N in (1, 128, 2048, 5120, 151936):
        for K in (64, 2048, 2880, 4096, 8192):
            plan = row_plan_for(N, K, 132)
            assert plan.rows >= 1 and plan.rows * plan.step / (32 * plan.warps) <= 128
            assert plan.step <= 2 * K and plan.warps == 4
    found = [row_plan_for(N, K, 132) for N, K in ((2048, 4096), (5120, 2048), (2880, 2880))]
    assert [(plan.rows, plan.step) for plan in found] == [(4, 2048), (8, 2048), (4, 1024)]
