"""Linear layers of codes by the Triton backends, against what the codes stand for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")
from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_linears import (
    multiply_decoded,
    multiply_few,
    supports,
    supports_few,
)
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, quantized_linears
from moe_ops.kernels.triton.decode.coded import Coded
from moe_ops.kernels.triton.decode.quantized_linears import run
from moe_ops.kernels.triton.decode.quantized_linears_plan import QuantizedLinearsPlan, plan_for
from moe_ops.testing import F16, F32, Tol, assert_close
from tests.chosen import in_turn
from tests.decode_ops import test_quantized_linears as of_the_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
call_of = partial(of_the_op.call_of, device=DEVICE)

FORMATS = ("float8_e4m3fn:row", "float8_e4m3fn:128x128", "float8_e4m3fn:tensor", "int8:row",
           "uint8:1x32:bfloat16", "uint4:1x32", "int4:row", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2",
           "mxfp8", "nvfp4")  # fmt: skip
TOL = {F32: Tol(1e-5, "float32 sums in another order"),
       F16: Tol(4e-3, "values and results are rounded to 11 bits")}  # fmt: skip


def coded(call: QuantizedLinearsCall) -> Coded:
    lists = (call.weights, call.scales, call.zeros, call.global_scales, call.biases)
    return Coded(*lists, weight_of(call.w_format, ""))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_decoded_and_multiplied(format: str, dtype: torch.dtype) -> None:
    call, values = call_of(40, 256, (150, 7), format, dtype)
    for y, w, b in zip(multiply_decoded(call), values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is dtype and y.is_contiguous()
        assert_close(y.float(), want.float(), TOL[dtype])


@pytest.mark.parametrize("format", FORMATS)
@in_turn(
    pytest.mark.parametrize("T", [1, 2, 17, 64]),
    pytest.mark.parametrize("K", [128, 320]),
    pytest.mark.parametrize("sizes", [(7,), (33, 1, 20), (5, 16, 7, 31, 9, 1)], ids=str),
)
def test_few_rows_decode_in_registers(T: int, K: int, sizes: tuple[int, ...], format: str) -> None:
    call, values = call_of(T, K, sizes, format, F16)
    assert supports_few(call) is None
    for y, w, b in zip(multiply_few(call), values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is F16 and y.is_contiguous()
        assert_close(y.float(), want.float(), TOL[F16])


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_tiles_of_other_sizes(rows: int) -> None:
    call, values = call_of(3, 256, (150, 7), "uint4:1x32", F16)
    plan = QuantizedLinearsPlan(rows, 128, 4, 2)
    for y, w, b in zip(run(call.x_TK, coded(call), plan), values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert_close(y.float(), want.float(), TOL[F16])


def test_a_view_of_a_wider_input_and_no_rows() -> None:
    call, _ = call_of(3, 128, (20,), "mxfp4", F16)
    wide = torch.full((3, 200), float("nan"), dtype=F16, device=DEVICE)
    wide[:, 16:144] = call.x_TK
    want = multiply_few(call)[0]
    call.x_TK = wide[:, 16:144]
    assert torch.equal(multiply_few(call)[0], want)
    call.x_TK = call.x_TK[:0]
    assert multiply_few(call)[0].shape == (0, 20)


def test_plans_fit_what_a_processor_has() -> None:
    for T in (1, 8, 64):
        for N in (1, 2048, 5120, 17000, 151936):
            for bits in (4, 6, 8):
                for processors, memory in ((132, 232448), (108, 166912), (128, 101376)):
                    plan = plan_for(T, N, bits, processors, memory)
                    stage = 128 * (plan.rows * bits // 8 + 2 * max(16, T))
                    assert plan.stages >= 2 and plan.stages * stage <= memory
    assert [plan_for(1, N, 4, 132, 232448).rows for N in (2048, 20000, 151936)] == [16, 32, 64]


def test_what_few_rows_are_not_decoded_for() -> None:
    call, _ = call_of(2, 64, (4, 2), "nvfp4", F32)
    assert supports_few(call) == "needs bfloat16 or float16, got torch.float32"
    call, _ = call_of(2, 64, (4, 2), "nvfp4", F16)
    call.global_scales = [call.global_scales[0], None]
    assert supports_few(call) == "needs global scales of all weights, or of none"
    most = quantized_linears.backends["triton"].rows.possible
    assert most is not None and most(call) == 64


def test_what_is_not_decoded() -> None:
    call, _ = call_of(2, 64, (4, 2), "uint4:1x32")
    assert supports(call) is None
    call.x_TK.requires_grad_()
    assert supports(call) == "is not differentiable, and an argument requires grad"
    call, _ = call_of(2, 64, (4, 2), "uint4:1x8")
    assert supports(call) == "needs groups of 16, 32, 64, 128 or more columns, got 8"
    call, _ = call_of(2, 64, (4, 2), "uint4:1x32")
    assert call.zeros[0] is not None
    call.zeros = [call.zeros[0].T.contiguous().T, call.zeros[1]]
    assert supports(call) == "needs contiguous zero points"
    call.scales = [call.scales[0].T.contiguous().T, call.scales[1]]
    assert supports(call) == "needs contiguous codes and scales"
    assert quantized_linears.backends["triton.decoded"].devices == {"cuda"}
