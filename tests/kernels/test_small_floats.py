"""Scales and codes of small floats, by the kernels' own product; in Triton's interpreter without a
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.testing import DEVICE, F16
from tests.kernels.codes import any_codes, product
from tests.kernels.test_quantised_experts import F8, each_dtype


def test_small_weights_of_large_codes() -> None:
    """Of which no scale is a float16."""
    weights = any_codes("mxfp8_e5m2", rows=32, columns=128)
    weights = replace(weights, scale=torch.full_like(weights.scale, 127 - 28))
    got = product(weights, torch.eye(128, dtype=F16, device=DEVICE))
    assert torch.equal(got, weights.decoded().to(F16).float())
    assert float(got.abs().max()) > 1e-4


@each_dtype
def test_every_scale_of_float8(dtype: torch.dtype) -> None:
    """Subnormals, both signs and NaN; products with values of four bits are exact in 16."""
    weights = any_codes("nvfp4", rows=32, columns=128)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(weights.scale.shape)
    weights = replace(weights, scale=codes.view(F8))
    for tokens in (16, 128):
        got = product(weights, torch.eye(128, dtype=dtype, device=DEVICE)[:tokens])
        want = weights.decoded() @ torch.eye(128, device=DEVICE)[:, :tokens]
        assert bool(want.isnan().any())
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
