"""Linear layers of codes by the Triton backends, against what the codes stand for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from moe_ops.backends.triton_linears import multiply_decoded, supports
from moe_ops.decode_ops.quantized_linears import quantized_linears
from moe_ops.testing import F16, F32, Tol, assert_close
from tests.decode_ops.test_quantized_linears import call_of

FORMATS = ("float8_e4m3fn:row", "float8_e4m3fn:128x128", "float8_e4m3fn:tensor", "int8:row",
           "uint8:1x32:bfloat16", "uint4:1x32", "int4:row", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2",
           "mxfp8", "nvfp4")  # fmt: skip
TOL = {F32: Tol(1e-5, "float32 sums in another order"),
       F16: Tol(4e-3, "values and results are rounded to 11 bits")}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_decoded_and_multiplied(format: str, dtype: torch.dtype) -> None:
    call, values = call_of(40, 256, (150, 7), format, dtype)
    for y, w, b in zip(multiply_decoded(call), values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is dtype and y.is_contiguous()
        assert_close(y.float(), want.float(), TOL[dtype])


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
