"""Tokens and h become the codes of `quantize`, in the order in which weights of four bits meet them
that are decoded to float8; which rows of weights have scales that are near each other. In Triton's
interpreter without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_inputs import inputs_of
from moe_ops.kernels.triton.experts.formats.codes import Codes, with_float8
from moe_ops.kernels.triton.experts.operands.prequantized import in_rows
from moe_ops.kernels.triton.experts.operands.references import references
from moe_ops.kernels.triton.experts.operands.row_scales import quantize_h, quantize_x
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, DEVICE
from tests.kernels.test_grouped_float8 import arranged

W = "int4:1x128"
E, T, K, D = 5, 19, 3, 288


def tokens() -> Tensor:
    """Rows of very different sizes, one of zeros, one with NaN in one group, one with infinity."""
    torch.manual_seed(0)
    x = torch.randn(T, D, device=DEVICE) * torch.logspace(-6, 6, T, device=DEVICE)[:, None]
    x[3] = 0
    x[5, 40] = torch.nan
    x[7, 200] = torch.inf
    return x.to(BF16)


def codes_of(x_format: str, **given: Any) -> Codes:
    none = torch.empty(0, device=DEVICE)
    codes = Codes(
        w13_scale_EFG=none, w2_scale_EDG=none, w13_zero_EFG=None, w2_zero_EDG=None,
        weight=weight_of(W, x_format), inputs=inputs_of(W, x_format), **given,
    )  # fmt: skip
    return with_float8(codes)


def routed() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids_TK = torch.rand(T, E, device=DEVICE).argsort(1)[:, :K].to(torch.int32)
    ids_TK[2, 1] = -1
    return ids_TK, sort_pairs(ids_TK, E, None)[1]


def check(got: tuple[Tensor, Tensor], want: Tensor, scale_R: Tensor, rows: Tensor) -> None:
    """Codes, but those whose scale is NaN, and scales of rows."""
    codes, scale = got
    torch.testing.assert_close(scale.view(-1)[rows], scale_R, rtol=0, atol=0, equal_nan=True)
    known = scale_R.isfinite()
    got_codes, want_codes = codes[rows].float()[known], arranged(want.float())[known]
    torch.testing.assert_close(got_codes, want_codes, rtol=0, atol=0, equal_nan=True)
    assert known.float().mean() > 0.5


def wanted(x: Tensor, x_format: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of `quantize`, and float32 scales of rows."""
    format = Format.of(x_format)
    done = packing.quantize(x, format, scale=scale)
    scale = packing.decode_scale(done.scale, format.scale)
    return done.values, scale.expand(len(x), -1)[:, 0]


@pytest.mark.parametrize(
    ("x_format", "given"),
    [("float8_e4m3fn:row", False), ("float8_e4m3fn:row", True), ("float8_e4m3fn:tensor", False)],
)
def test_tokens_in_the_rows_of_their_pairs(x_format: str, given: bool) -> None:
    x_TD, (ids_TK, inverse_R) = tokens(), routed()
    static = torch.tensor([0.37], device=DEVICE) if x_format.endswith("tensor") else None
    values, scale_T = wanted(x_TD, x_format, static)
    if given:
        done = packing.quantize(x_TD, Format.of(x_format))
        got = in_rows(done.values, done.scale, inverse_R, K, arranged=True)
    else:
        codes = codes_of(x_format, x_scale=static)
        got = quantize_x(x_TD, codes, ids_TK, None, inverse_R, arranged=True)
    pairs = (inverse_R >= 0).nonzero()[:, 0]
    check(got, values[pairs // K], scale_T[pairs // K], inverse_R[pairs])


def test_rows_of_h_that_are_arranged() -> None:
    x_format, h_RI = "float8_e4m3fn:row", tokens()
    values, scale_R = wanted(h_RI, x_format)
    ends_E = torch.tensor([T], dtype=torch.int32, device=DEVICE)
    got = quantize_h(arranged(h_RI), codes_of(x_format), ends_E)
    check(got, values, scale_R, torch.arange(T, device=DEVICE))


@pytest.mark.parametrize("groups", [(9, 128), (448, 9)])
def test_rows_whose_scales_are_near(groups: tuple[int, int]) -> None:
    torch.manual_seed(0)
    scales = [
        torch.randint(100, 127, (3, rows, G), dtype=torch.uint8, device=DEVICE)
        for rows, G in zip((70, 90), groups, strict=True)
    ]
    for scale_ENG, got in zip(scales, references(*near(scales), span=26), strict=True):
        want = [
            [max(row) + 1 if max(row) - min(row) <= 26 and max(row) < 255 else 0 for row in rows]
            for rows in scale_ENG.tolist()
        ]
        assert got.tolist() == want
        assert (got == 0).sum() == 3
        assert got[2, 7] == 1


def near(scales: list[Tensor]) -> list[Tensor]:
    """Some too far from each other, one NaN, and a row of the smallest."""
    for scale_ENG in scales:
        scale_ENG[0, 3, 4], scale_ENG[1, 5, 8], scale_ENG[2, 69, 0] = 99, 255, 0
        scale_ENG[0, 3, 5], scale_ENG[2, 7] = 126, 0  # by 27 apart; of zeros
    return scales
