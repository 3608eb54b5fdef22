"""Linear layers of codes that stream through registers, by torch: see `gluon_in_torch.py`."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends import triton_linears
from moe_ops.backends.triton_linears import multiply_few, multiply_normed, refuse_stream
from moe_ops.decode_ops import normed_quantized_linears
from moe_ops.kernels.triton.decode import quantized_stream
from moe_ops.kernels.triton.decode.norm import norm_of
from moe_ops.kernels.triton.decode.quantized_linears_plan import (
    row_stream_plan_for,
    stream_plan_for,
)
from moe_ops.kernels.triton.decode.quantized_stream import (
    MOST_STREAMED,
    run_normed_row_stream,
    run_row_stream,
    run_stream,
)
from moe_ops.kernels.triton.experts.products.register_stream import Stream
from moe_ops.testing import BF16, DEVICE, F16, Tol, assert_close
from tests.chosen import in_turn
from tests.decode_ops.test_quantized_linears import call_of
from tests.kernels import gluon_in_torch
from tests.kernels.test_quantized_row import coded, normed_call

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")

FORMATS = ("float8_e4m3fn:row", "float8_e4m3fn:128x128", "float8_e4m3fn:tensor", "int8:row",
           "uint4:1x32", "uint4:row", "int4:row", "int4:1x128:bfloat16", "mxfp4", "nvfp4",
           "mxfp6_e2m3", "mxfp6_e3m2")  # fmt: skip
NORMED = Tol(4e-3, "rounded three times to 11 bits, and values of codes")
ROUNDED = Tol(1.6e-2, "results are rounded to 8 bits")
TOL = Tol(4e-3, "values and results are rounded to 11 bits")
STREAMS = (None, Stream(S=2, C=2, MW=2, ahead=3), Stream(S=4, C=4, MT=2, NT=4, ahead=1))


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched."""
    monkeypatch.setattr(triton_linears, "refuse_hopper", lambda _: None)
    return gluon_in_torch.take_over(quantized_stream, monkeypatch)


@pytest.mark.parametrize("format", FORMATS)
@in_turn(
    pytest.mark.parametrize("T", [1, 3, 8, 9, 32]),
    pytest.mark.parametrize("K", [256, 352, 32]),
    pytest.mark.parametrize("sizes", [(40,), (33, 1, 20), (5, 16, 7, 31, 9, 1)], ids=str),
    pytest.mark.parametrize("plan", STREAMS, ids=str),
)
def test_codes_are_multiplied(
    plan: Stream | None, sizes: tuple[int, ...], K: int, T: int, format: str
) -> None:
    if plan is not None and plan.tokens < T:
        T = plan.tokens
    call, values = call_of(T, K, sizes, format, F16)
    for y, w, b in zip(run_stream(call.x_TK, coded(call), plan), values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is F16 and y.is_contiguous()
        assert_close(y.float(), want.float(), TOL)


ROW_FORMATS = ("float8_e4m3fn:row", "float8_e4m3fn:128x128", "float8_e4m3fn:tensor", "int8:row")
ROW_STREAMS = (None, Stream(S=2, C=2, MW=2, ahead=2), Stream(S=4, C=4, MT=2, ahead=1))


@pytest.mark.parametrize("format", ROW_FORMATS)
@in_turn(
    pytest.mark.parametrize("size", [1.0, 2.0**100, 2.0**-100], ids=str),
    pytest.mark.parametrize("K", [256, 352, 32]),
    pytest.mark.parametrize("sizes", [(40,), (33, 1, 20), (5, 16, 7, 31, 9, 1)], ids=str),
    pytest.mark.parametrize("plan", ROW_STREAMS, ids=str),
)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_codes_are_multiplied_with_one_row(
    dtype: torch.dtype,
    plan: Stream | None,
    sizes: tuple[int, ...],
    K: int,
    size: float,
    format: str,
) -> None:
    """Of whatever size: float16 holds its numbers next to the largest one."""
    call, values = call_of(1, K, sizes, format, dtype)
    size = 1.0 if dtype is F16 else size
    call.x_TK = call.x_TK * size
    call.biases = [None if b is None else b * size for b in call.biases]
    given = call.x_TK, coded(call)
    for y, w, b in zip(run_row_stream(*given, plan), values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is dtype and y.is_contiguous()
        assert_close(y.double() / size, want / size, TOL if dtype is F16 else ROUNDED)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("format", ["float8_e4m3fn:row", "int8:row"])
def test_what_is_no_number_of_a_row_stays_so(format: str, odd: float) -> None:
    call, (w,) = call_of(1, 256, (40,), format, BF16)
    call.x_TK[0, 77] = odd
    call.biases = [None]
    (y,) = run_row_stream(call.x_TK, coded(call))
    want = call.x_TK.float() @ w.float().T
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.isinf(), want.isinf())
    assert torch.equal(y.sign()[~y.isnan()], want.sign().to(BF16)[~want.isnan()])


@pytest.mark.parametrize("format", ROW_FORMATS)
@in_turn(
    pytest.mark.parametrize("residual", [True, False]),
    pytest.mark.parametrize("shift", [None, 0.0, 1.0], ids=str),
    pytest.mark.parametrize("sizes", [(33, 1), (5, 16, 7, 31, 9)], ids=str),
    pytest.mark.parametrize("plan", ROW_STREAMS, ids=str),
)
def test_one_row_is_normed_in_the_launch(
    plan: Stream | None, sizes: tuple[int, ...], shift: float | None, residual: bool, format: str
) -> None:
    call, _ = call_of(1, 352, sizes, format, F16)
    added = torch.randn_like(call.x_TK) if residual else None
    gain = torch.randn(352).to(F16)
    norm, made = norm_of(call.x_TK, added, gain, 1e-5, shift)
    got = [*made, *run_normed_row_stream(call.x_TK, norm, coded(call), plan)]
    want = normed_quantized_linears.body(normed_call(call, added, gain, shift))
    for g, w in zip(got, want, strict=True):
        assert_close(g.float(), w.float(), NORMED)
    if residual:
        assert torch.equal(got[0], want[0])


def test_a_row_of_zeros() -> None:
    call, _ = call_of(1, 256, (40,), "int8:row", BF16)
    call.x_TK = torch.zeros_like(call.x_TK)
    call.biases = [None]
    assert not run_row_stream(call.x_TK, coded(call))[0].any()


def test_rows_of_a_wider_input_stay_apart() -> None:
    call, _ = call_of(3, 96, (24, 8), "int4:1x32", F16)
    want = run_stream(call.x_TK, coded(call))
    wide = torch.full((3, 208), float("nan"), dtype=F16)
    wide[:, 48:144] = call.x_TK
    wide[1, 60] = float("nan")
    for y, w in zip(run_stream(wide[:, 48:144], coded(call)), want, strict=True):
        assert torch.equal(y[[0, 2]], w[[0, 2]]) and bool(y[1].isnan().all())


def test_which_rows_stream(by_torch: list[str]) -> None:
    """One row of 4 and 8 bits has a launch of its own: without matrix units, but of 8 bits with
    scales of many columns."""
    for T, format, streams in (
        (1, "int4:1x32", False),
        (2, "int4:1x32", True),
        (1, "int4:1x128", False),
        (1, "int8:row", "row"),
        (1, "float8_e4m3fn:row", "row"),
        (1, "mxfp6_e2m3", True),
        (2, "mxfp8", False),
        (33, "int4:1x32", False),
    ):
        by_torch.clear()
        call, values = call_of(T, 128, (24, 8), format, F16)
        for y, w, b in zip(multiply_few(call), values, call.biases, strict=True):
            want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
            assert_close(y.float(), want.float(), TOL)
        kernel = "quantized_row_stream" if streams == "row" else "quantized_linears_stream"
        assert by_torch == ([kernel] if streams else [])


def test_a_norm_before(by_torch: list[str]) -> None:
    call, _ = call_of(5, 160, (9, 40), "uint4:1x32", F16)
    normed = normed_call(call, torch.randn_like(call.x_TK), torch.randn(160).to(F16))
    for g, w in zip(multiply_normed(normed), normed_quantized_linears.body(normed), strict=True):
        assert_close(g.float(), w.float(), TOL)
    assert by_torch == ["quantized_linears_stream"]


def test_what_does_not_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(format: str, K: int = 128) -> str | None:
        return refuse_stream(call_of(2, K, (4, 2), format, F16)[0])

    assert why("int4:1x64") is None and why("float8_e4m3fn:row", 144) is None
    assert why("mxfp8") == "has no decoder of mxfp8"
    assert why("int4:row", 144) == "needs widths that 32 divides, got 144"
    call, _ = call_of(2, 128, (4, 2), "int4:1x64", F16)
    wide = torch.zeros(2, 132, dtype=F16)
    call.x_TK = wide[:, :128]
    said = "needs rows of inputs that begin at a multiple of 8 elements, got every 132"
    assert refuse_stream(call) == said
    call.x_TK = torch.zeros(2, 136, dtype=F16)[:, 1:129]
    assert refuse_stream(call) == "needs tensors that begin at a multiple of 16 bytes"
    monkeypatch.undo()
    call, _ = call_of(2, 128, (4, 2), "int4:1x64", F16)
    assert refuse_stream(call) is not None


def test_plans_hold_all_rows_and_share_columns() -> None:
    for T in range(1, MOST_STREAMED + 1):
        for K in (32, 2048, 2880, 8192):
            plan = stream_plan_for(T, K, 128)
            assert plan.tokens >= T and plan.S == plan.C and plan.warps <= 8
    for K in (32, 2048, 2880, 8192, 53248):
        plan = row_stream_plan_for(K)
        steps = -(-K // (128 * plan.S))
        assert plan.S == plan.C and plan.warps <= 16 and 1 <= plan.ahead <= steps
    found = [stream_plan_for(T, K, -1) for T, K in ((8, 2048), (8, 4096), (32, 2048), (32, 4096))]
    assert [(plan.S, plan.ahead) for plan in found] == [(4, 4), (8, 4), (4, 4), (8, 1)]
