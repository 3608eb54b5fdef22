"""Scales and codes of small floats, by the kernels' own product; in Triton's interpreter without a
GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.testing import BF16, DEVICE, F16
from tests.kernels.codes import any_codes, nibbles_as_bfloat16, product
from tests.kernels.test_quantized_experts import F8, each_dtype


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


def test_every_code_of_float4_beside_every_other() -> None:
    """Each nibble has all sixteen codes, with neighbours of zeros, of ones, and any."""
    nibble, code = torch.meshgrid(torch.arange(8), torch.arange(16), indexing="ij")
    shift, code = 4 * nibble.flatten().int(), code.flatten().int()
    any_NW = torch.randint(-(2**31), 2**31, (2, 128), dtype=torch.int32)
    words = [rest & ~(15 << shift) | code << shift for rest in (0, -1, any_NW[0])]
    w_N = torch.cat([*words, any_NW[1]])
    out_JN = nibbles_as_bfloat16(w_N.to(DEVICE))
    halves = out_JN.cpu().view(BF16).view(4, 512, 2).permute(2, 0, 1).reshape(8, 512).double()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.double)
    want = torch.cat([values, -values])[w_N >> 4 * torch.arange(8)[:, None] & 15]
    assert torch.equal(halves * 2.0**126, want)
    assert torch.equal(halves.signbit(), want.signbit())
