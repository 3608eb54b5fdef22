"""Linear layers whose weights are codes: the definition, the blocks of a CPU, wrong arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.backends import dequantize
from moe_ops.conformance.decode_samples import LISTS
from moe_ops.decode_ops import quantized_linears
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, F16, F32, Tol, assert_close

TOL = Tol(1e-5, "float32 sums in another order")
ONCE = {F32: TOL, BF16: Tol(8e-3, "one rounding to 8 bits"), F16: Tol(1e-3, "one to 11 bits")}
FORMATS = ("float8_e4m3fn:row", "float8_e4m3fn:128x128", "int8:tensor", "uint4:1x32:bfloat16",
           "int4:row", "mxfp4", "mxfp6_e2m3", "mxfp8", "nvfp4")  # fmt: skip


def call_of(
    T: int, K: int, sizes: tuple[int, ...], format: str, dtype: torch.dtype = F32,
    device: str = "cpu",
) -> tuple[QuantizedLinearsCall, list[Tensor]]:  # fmt: skip
    """A call with a bias for every other weight, and what its codes stand for."""
    found, parts, values = Format.of(format), [], []
    for g, n in enumerate(sizes):
        w_NK = torch.randn(n, K, device=device) * K**-0.5
        common = packing.global_scale_of(w_NK, found) if found.has_global_scale else None
        done = packing.quantize(w_NK, found, global_scale=common)
        bias = None if g % 2 else torch.randn(n, device=device).to(dtype)
        parts.append((done.values, done.scale, done.zero, common, bias))
        values.append(packing.dequantize(done.values, done.scale, found, done.zero, common))
    lists = dict(zip(LISTS, map(list, zip(*parts, strict=True)), strict=True))
    x_TK = torch.randn(T, K, device=device).to(dtype)
    return QuantizedLinearsCall(x_TK=x_TK, w_format=format, **lists), values


def run(call: QuantizedLinearsCall) -> list[Tensor]:
    return quantized_linears(*quantized_linears.arguments.flat(call))


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_products_with_what_codes_stand_for(format: str, dtype: torch.dtype) -> None:
    call, values = call_of(3, 256, (20, 7), format, dtype)
    got = run(call)
    defined = quantized_linears.body(call)
    for y, same, w, b in zip(got, defined, values, call.biases, strict=True):
        want = call.x_TK.double() @ w.double().T + (0 if b is None else b.double())
        assert y.dtype is dtype and y.is_contiguous()
        assert_close(y.float(), want.float(), ONCE[dtype])
        assert_close(y.float(), same.float(), ONCE[dtype])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("most", [1, 3000])
def test_a_cpu_decodes_blocks_of_rows(
    format: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, _ = call_of(5, 256, (300, 17), format)
    monkeypatch.setattr(dequantize, "MOST_VALUES", most)
    down = Format.of(format).group[0]
    seen = [(rows.start, rows.stop) for rows, _ in dequantize.blocks(call, 0)]
    each = 1 if down < 0 else down
    assert all(start % each == 0 for start, _ in seen) and seen[-1][1] == 300
    assert all((stop - start) * 256 <= max(most, each * 256) for start, stop in seen)
    made = dequantize.linears_by_blocks(call)
    for got, want in zip(made, quantized_linears.body(call), strict=True):
        assert_close(got, want, TOL)


def test_no_rows() -> None:
    call, _ = call_of(0, 64, (4, 2), "mxfp4")
    assert [y.shape for y in run(call)] == [(0, 4), (0, 2)]


def test_gradients_reach_the_input_and_the_bias() -> None:
    call, (w, _) = call_of(2, 64, (4, 2), "int8:row")
    x, bias = call.x_TK.requires_grad_(), torch.randn(4, requires_grad=True)
    call.biases = [bias, None]
    run(call)[0].sum().backward()
    assert x.grad is not None and bias.grad is not None
    assert_close(x.grad, w.sum(0).expand(2, 64), TOL)
    assert torch.equal(bias.grad, torch.full((4,), 2.0))


def test_wrong_arguments_are_named() -> None:
    call, _ = call_of(2, 64, (4, 2), "uint4:1x32")
    coded, _ = call_of(2, 64, (4, 2), "nvfp4")

    def why(of: QuantizedLinearsCall = call, **changes: Any) -> str:
        with pytest.raises((ValueError, TypeError)) as raised:
            run(dataclasses.replace(of, **changes))
        return str(raised.value)

    w, scale, zero = call.weights[0], call.scales[0], call.zeros[0]
    assert zero is not None
    assert "x_TK is torch.float32 [64], not floats [T, K]" in why(x_TK=torch.zeros(64))
    assert "quantised weights take no float64" in why(x_TK=call.x_TK.double())
    assert "got 2 weights with 1, 2, 2, 2 scales, zeros" in why(scales=[scale])
    assert "got 0 weights" in why(weights=[])
    assert "weight 0 must have 2 axes, got shape (32,)" in why(weights=[w[0], w])
    assert "weight 0 must be uint8; got int8" in why(weights=[w.view(torch.int8), w])
    assert "weight 1 is [2, 16] of 'uint4:1x32', which are no rows of the 64 columns" in why(
        weights=[w, w[:2, :16]], scales=[scale, scale[:2, :1]], zeros=[zero, zero[:2, :1]]
    )
    assert "scale 0 must be float32 [4, 2]" in why(scales=[scale[:, :1], scale])
    assert "zero 0 is missing" in why(zeros=[None, None])
    assert "int7" in why(w_format="int7:row")
    assert "bias 1 is torch.float32 [3], not floats [2]" in why(biases=[None, torch.zeros(3)])
    assert "zero 0 was given, but 'nvfp4' has no" in why(coded, zeros=[zero, None])
    one = torch.ones(1)
    assert "global scale 0 is torch.float32 [1] of 'uint4:1x32'" in why(global_scales=[one, None])
    assert "global scale 1 is torch.float32 [2]" in why(coded, global_scales=[one, torch.ones(2)])
    meta = torch.ones(2, device="meta")
    assert "bias 1 is on meta, but the first argument is on cpu" in why(biases=[None, meta])
