"""Weights decoded for many rows an expert, in Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import expert_gemm, experts, quantize
from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_formats import weight_of
from moe_ops.kernels.triton.experts.formats.codes import as_stored, scales_as_stored
from moe_ops.kernels.triton.experts.operands.dequantized_weights import decode
from moe_ops.ops.expert_gemm import ExpertGemmCall
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE, F16, TOL, assert_close
from tests.chosen import in_turn, one_in, those_of
from tests.kernels.codes import Weights, any_codes
from tests.kernels.test_quantized_experts import FORMATS, ODD, call_of, definition

each_format = pytest.mark.parametrize("w_format", FORMATS)
MANY = ("int4:1x32", "uint4:1x32:float16", "mxfp4", "mxfp8", "nvfp4", "mxfp6_e3m2", "mxfp6_e2m3")


def decoded(weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    weight = weight_of(weights.format, "")
    w, columns = as_stored(weights.values, weight), weights.decoded().shape[-1]
    scale = scales_as_stored(weights.scale, weight)
    return decode(w, (scale, weights.zero, None), weight, columns, dtype)


@in_turn(
    pytest.mark.parametrize("dtype", [F16, BF16], ids=str),
    pytest.mark.parametrize(("rows", "columns"), [(32, 128), (16, 320), (48, 96)]),
    each_format,
)
def test_every_code(w_format: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    weights = any_codes(w_format, rows=rows, columns=columns)
    got, want = decoded(weights, dtype)[0], weights.decoded().to(dtype)
    assert got.shape == (rows, columns)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("w_format", ["int4:1x32", "float8_e4m3fn:16x32"])
def test_scales_that_are_no_numbers_come_through(w_format: str, bad: float) -> None:
    weights = any_codes(w_format, rows=32, columns=128)
    weights.scale[0, 1, 0] = bad
    got, want = decoded(weights, F16)[0], weights.decoded().to(F16)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert bool(want.isnan().any() or want.isinf().any())


@one_in(
    2,
    pytest.mark.parametrize("w_format", those_of(MANY[:-1], MANY)),  # six bits lie alike
)
def test_a_layer_of_many_rows_is_decoded(w_format: str) -> None:
    call = call_of(replace(ODD, T=40), w_format, biases=True)
    assert experts.backends["triton.grouped"].refusal("cuda", 40, call) is None
    got = run_experts("grouped", call)
    assert_close(got, definition(call), TOL["experts", F16], w_format)


def product_of(w_format: str, x_format: str, dtype: torch.dtype) -> ExpertGemmCall:
    """A call of `expert_gemm` in which a row belongs to no expert."""
    format = Format.of(w_format)
    w_EFD = torch.randn(3, 48, 256, device=DEVICE) / 16
    common = None
    if format.has_global_scale:
        common = torch.stack([packing.global_scale_of(w, format) for w in w_EFD])
    done = packing.quantize(w_EFD, format, global_scale=common)
    x_RD, scale = torch.randn(18, 256, device=DEVICE).to(dtype), None
    if x_format:
        x_RD, scale = quantize(x_RD, x_format)
    call = expert_gemm.call(
        x_RD, done.values, torch.tensor([5, 5, 17], dtype=torch.int32, device=DEVICE),
        torch.randn(3, 48, device=DEVICE).to(F16), x_scale_RG=scale, w_scale_EFG=done.scale,
        w_zero_EFG=done.zero, global_scale_E=common, w_format=w_format, x_format=x_format,
        out_dtype=str(dtype).removeprefix("torch.") if x_format else "",
    )  # fmt: skip
    expert_gemm.check(call)
    return call


@pytest.mark.parametrize(
    "formats",
    [
        ("nvfp4", ""), ("uint4:1x64", ""), ("mxfp6_e3m2", ""), ("int8:row", "int8:tensor"),
        ("nvfp4", "nvfp4"), ("mxfp6_e2m3", "mxfp6_e3m2"),
        ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"),
    ],
    ids=str,
)  # fmt: skip
def test_products_of_codes(formats: tuple[str, str]) -> None:
    # Inputs in codes are multiplied as bfloat16 or, as the interpreter does it, as float32.
    dtype = torch.float32 if formats[1] else F16
    call, triton = product_of(*formats, dtype), expert_gemm.backends["triton"]
    assert triton.refusal("cuda", 18, call) is None
    assert triton.emulates(call) == bool(formats[1])
    got, want = triton.run(call), expert_gemm.body(call)
    assert got.dtype == dtype
    assert_close(got[:17], want[:17], TOL["expert_gemm", dtype], str(formats))


def test_products_of_codes_that_are_refused() -> None:
    call, triton = product_of("mxfp4", "mxfp4", F16), expert_gemm.backends["triton"]
    assert triton.refusal("cuda", 18, call) == (
        "has no room in float16 for what codes of inputs may stand for; use bfloat16"
    )
    call = replace(call, out_dtype="bfloat16")
    assert triton.refusal("cuda", 18, call) is None
    strided = call.w_EFD.transpose(1, 2).contiguous().transpose(1, 2)
    refusal = triton.refusal("cuda", 18, replace(call, w_EFD=strided))
    assert refusal == "needs contiguous codes and scales"
    none = replace(call, x_RD=call.x_RD[:0], x_scale_RG=call.x_scale_RG[:0])
    assert triton.run(none).shape == (0, 48)
