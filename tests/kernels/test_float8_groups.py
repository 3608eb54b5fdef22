"""Rows as codes of float8 with a scale for groups of columns: those of `quantize`, in the rows and
in the order of columns of `grouped_float8_tokens.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton.experts.formats.codes import POWERS
from moe_ops.kernels.triton.experts.operands.float8_groups import quantize_in_order
from moe_ops.kernels.triton.experts.operands.prequantized import in_rows
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import DEVICE

FORMATS = {"float8_e4m3fn:1x128": ("group", 128), "mxfp8": (POWERS, 32)}
each_format = pytest.mark.parametrize("format", FORMATS)
ROWS = [4, -1, 0, 5, 2, 1]  # of the pairs of three tokens; one has no expert here


def codes_of(format: str) -> Any:
    scaled, group = FORMATS[format]
    return SimpleNamespace(scaled=scaled, weight=SimpleNamespace(across=group))


def tokens(*shape: int) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
    x[0, :32] = 0
    x[1, 40] = 3e38
    x[-1, 33] = torch.nan
    return x


def in_order(codes: Tensor) -> Tensor:
    """Columns as `in_float8_order` has them."""
    pairs = codes.view(torch.uint8).reshape(len(codes), -1, 16, 2)
    return pairs.transpose(2, 3).reshape(codes.shape)


def wanted(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Codes in order as bytes, and scales as numbers."""
    done = packing.quantize(x, Format.of(format))
    scale = done.scale
    if format == "mxfp8":
        code = scale.view(torch.uint8).double()
        scale = torch.where(code == 255, torch.nan, torch.exp2(code - 127)).float()
    return in_order(done.values), scale


def scales_of(scale_RP: Tensor, D: int, format: str) -> Tensor:
    """The scales of the groups of each row, that lie in eight places for 256 columns."""
    group = FORMATS[format][1]
    staged = scale_RP.reshape(len(scale_RP), -1, 8)[:, :, : 256 // group].flatten(1)
    assert bool((staged[:, -(-D // group) :] < 1e-3).all())
    return staged[:, : -(-D // group)]


def same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], format: str) -> None:
    """Codes of a group whose scale is NaN are whatever they are."""
    codes, scale = got
    torch.testing.assert_close(scale, want[1], rtol=0, atol=0, equal_nan=True)
    group_D = torch.arange(codes.shape[1], device=codes.device) // FORMATS[format][1]
    number = ~scale.isnan()[:, group_D]
    assert torch.equal(codes.view(torch.uint8)[number], want[0][number])


@each_format
@pytest.mark.parametrize("D", [256, 416])
def test_tokens_go_to_their_rows(D: int, format: str) -> None:
    x = tokens(3, D)
    inverse_R = torch.tensor(ROWS, dtype=torch.int32, device=DEVICE)
    codes, scale_RP = quantize_in_order(x, codes_of(format), inverse_R, 2)
    values, scale = wanted(x, format)
    there = inverse_R >= 0
    rows = inverse_R[there].long()
    want = values.repeat_interleave(2, 0)[there], scale.repeat_interleave(2, 0)[there]
    same((codes[rows], scales_of(scale_RP[rows], D, format)), want, format)


@each_format
def test_rows_that_have_the_order_stay(format: str) -> None:
    x = tokens(21, 160)
    codes, scale_RP = quantize_in_order(x, codes_of(format))
    values, scale = wanted(x, format)
    backwards = values.reshape(21, -1, 2, 16).transpose(2, 3).reshape(values.shape)
    same((codes, scales_of(scale_RP, 160, format)), (backwards, scale), format)


@each_format
@pytest.mark.parametrize("D", [512, 544])
def test_codes_that_come_as_such(D: int, format: str) -> None:
    x = tokens(3, D)
    inverse_R = torch.tensor(ROWS, dtype=torch.int32, device=DEVICE)
    done = packing.quantize(x, Format.of(format))
    given = done.scale if format != "mxfp8" else done.scale.view(torch.uint8)
    how = {"arranged": True, "group": FORMATS[format][1]}
    codes, scale_RP = in_rows(done.values, given, inverse_R, 2, **how)
    want_codes, want_RP = quantize_in_order(x, codes_of(format), inverse_R, 2)
    rows = inverse_R[inverse_R >= 0].long()
    want = want_codes.view(torch.uint8)[rows], scales_of(want_RP[rows], D, format)
    same((codes[rows], scales_of(scale_RP[rows], D, format)), want, format)
