"""The largest scale of each row of weights whose scales are powers of two, where all of the row are
near it: then they can be part of codes (`grouped_float8_tokens.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

BYTES = 16384  # that a program has at once


@triton.jit
def largest_of_rows(scale_ptr, m, rows, G: tl.constexpr, SPAN: tl.constexpr, BG: tl.constexpr):
    """One more than the largest exponent of each row, or zero: see `references`."""
    g = tl.arange(0, BG)
    here = (m < rows)[:, None] & (g < G)[None, :]
    code = tl.load(scale_ptr + m.to(tl.int64)[:, None] * G + g[None, :], mask=here, other=0)
    code = code.to(tl.int32)
    largest = tl.max(code, 1)
    least = tl.min(tl.where(here, code, 255), 1)
    near = (largest - least <= SPAN) & (largest < 255)
    return tl.where(near, largest + 1, 0).to(tl.uint8)


@triton.jit
def references_kernel(
    scale13_ptr, scale2_ptr, out13_ptr, out2_ptr, rows13, rows2, blocks13,
    G13: tl.constexpr, G2: tl.constexpr, SPAN: tl.constexpr, BM13: tl.constexpr,
    BG13: tl.constexpr, BM2: tl.constexpr, BG2: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: some rows of one of two weights, whose scales are older than the launches of the
    call ahead of this one: they are read while the last of these ends."""
    block = tl.program_id(0)
    if block < blocks13:
        m13 = block * BM13 + tl.arange(0, BM13)
        found13 = largest_of_rows(scale13_ptr, m13, rows13, G13, SPAN, BG13)
        take_turn(PDL)
        tl.store(out13_ptr + m13, found13, mask=m13 < rows13)
    else:
        m2 = (block - blocks13) * BM2 + tl.arange(0, BM2)
        found2 = largest_of_rows(scale2_ptr, m2, rows2, G2, SPAN, BG2)
        take_turn(PDL)
        tl.store(out2_ptr + m2, found2, mask=m2 < rows2)


def references(scale13_EFG: Tensor, scale2_EDG: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """[E, F] and [E, D] of uint8: one more than the largest exponent of a row's scales of e8m0, or
    zero where one of them is less by more than `span`, or NaN.

    They are read ahead of the end of the launch before: two launches or more come between them and
    what wrote them.
    """
    scales = scale13_EFG, scale2_EDG
    outs = scale13_EFG.new_empty(scale13_EFG.shape[:2]), scale2_EDG.new_empty(scale2_EDG.shape[:2])
    columns = [triton.next_power_of_2(scale.shape[2]) for scale in scales]
    rows = [max(1, BYTES // each) for each in columns]
    blocks = [triton.cdiv(out.numel(), each) for out, each in zip(outs, rows, strict=True)]
    launch(
        references_kernel, (sum(blocks),), *scales, *outs, *(out.numel() for out in outs),
        blocks[0], G13=scale13_EFG.shape[2], G2=scale2_EDG.shape[2], SPAN=span, BM13=rows[0],
        BG13=columns[0], BM2=rows[1], BG2=columns[1], num_warps=8, **pdl_options(scale13_EFG),
    )  # fmt: skip
    return outs
