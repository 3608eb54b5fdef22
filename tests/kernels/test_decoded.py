"""Weights decoded for many rows an expert, in Triton's interpreter without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import experts
from moe_ops.backends.triton import run_experts
from moe_ops.backends.triton_formats import weight_of
from moe_ops.kernels.triton.experts.decoded import decode
from moe_ops.kernels.triton.experts.quantized import as_stored
from moe_ops.testing import BF16, F16, TOL, assert_close
from tests.kernels.codes import Weights, any_codes
from tests.kernels.test_quantised_experts import FORMATS, ODD, call_of, definition

each_format = pytest.mark.parametrize("w_format", FORMATS)


def decoded(weights: Weights, dtype: torch.dtype) -> torch.Tensor:
    weight = weight_of(weights.format, "")
    w, columns = as_stored(weights.values, weight), weights.decoded().shape[-1]
    return decode(w, weights.scale, weights.zero, weight, columns, dtype)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (16, 320), (48, 96)])
@each_format
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


@pytest.mark.parametrize("w_format", ["int4:1x32", "uint4:1x32:float16", "mxfp4", "mxfp8"])
def test_a_layer_of_many_rows_is_decoded(w_format: str) -> None:
    call = call_of(replace(ODD, T=40), w_format, biases=True)
    assert experts.backends["triton.grouped"].refusal("cuda", 40, call) is None
    got = run_experts("grouped", call)
    assert_close(got, definition(call), TOL["experts", F16], w_format)
