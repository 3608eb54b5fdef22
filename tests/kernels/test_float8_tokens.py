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
from moe_ops.kernels.triton.experts.operands.float8_groups import quantize_groups
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
GROUPS = {9: 32, 3: 128}  # columns, by how many groups there are


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


def check(got: tuple[Tensor, Tensor], want: Tensor, scale_GR: Tensor, rows: Tensor) -> None:
    """Codes, but those whose scale is NaN, and scales [groups, rows]."""
    codes, scale = got
    if len(scale_GR) == 1:
        taken, each = scale.view(-1)[rows][None], D
    else:
        taken, each = scale[rows, : D // 32].T, 32
        scale_GR = scale_GR.repeat_interleave(GROUPS[len(scale_GR)] // 32, 0)[: D // 32]
    torch.testing.assert_close(taken, scale_GR, rtol=0, atol=0, equal_nan=True)
    known = arranged(scale_GR.T.isfinite().repeat_interleave(each, 1))
    got_codes, want_codes = codes[rows].float(), arranged(want.float())
    torch.testing.assert_close(got_codes[known], want_codes[known], rtol=0, atol=0, equal_nan=True)
    assert known.float().mean() > 0.5


def wanted(x: Tensor, x_format: str, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of `quantize`, and float32 scales [groups, rows]."""
    format = Format.of(x_format)
    done = packing.quantize(x, format, scale=scale)
    scale = packing.decode_scale(done.scale, format.scale)
    return done.values, scale.expand(len(x), -1).T


GIVEN = [
    ("float8_e4m3fn:row", False), ("float8_e4m3fn:row", True), ("float8_e4m3fn:tensor", False),
    ("mxfp8", False), ("mxfp8", True), ("float8_e4m3fn:1x128", False),
    ("float8_e4m3fn:1x128", True),
]  # fmt: skip


@pytest.mark.parametrize(("x_format", "given"), GIVEN)
def test_tokens_in_the_rows_of_their_pairs(x_format: str, given: bool) -> None:
    x_TD, (ids_TK, inverse_R) = tokens(), routed()
    static = torch.tensor([0.37], device=DEVICE) if x_format.endswith("tensor") else None
    values, scale_GT = wanted(x_TD, x_format, static)
    codes = codes_of(x_format, x_scale=static)
    if given:
        done = packing.quantize(x_TD, Format.of(x_format))
        group = 0 if codes.float8 is None else codes.float8.group
        got = in_rows(done.values, done.scale, inverse_R, K, arranged=True, group=group)
    elif codes.float8 is not None:
        got = quantize_groups(x_TD, codes.float8, inverse_R, K)
    else:
        got = quantize_x(x_TD, codes, ids_TK, None, inverse_R, arranged=True)
    pairs = (inverse_R >= 0).nonzero()[:, 0]
    check(got, values[pairs // K], scale_GT[:, pairs // K], inverse_R[pairs])


@pytest.mark.parametrize("x_format", ["float8_e4m3fn:row", "float8_e4m3fn:1x128", "mxfp8"])
def test_rows_of_h_that_are_arranged(x_format: str) -> None:
    h_RI, codes = tokens(), codes_of(x_format)
    values, scale_GR = wanted(h_RI, x_format)
    stored = arranged(h_RI)
    if codes.float8 is not None:
        got = quantize_groups(stored, codes.float8, None, 1)
    else:
        got = quantize_h(stored, codes, torch.tensor([T], dtype=torch.int32, device=DEVICE))
    check(got, values, scale_GR, torch.arange(T, device=DEVICE))


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
