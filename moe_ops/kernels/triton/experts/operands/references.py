"""The largest scale of each row of a weight whose scales are powers of two, where all of the row
are near it: then they can be part of codes (`grouped_float8_tokens.py`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

BYTES = 16384  # that a program has at once


@triton.jit
def references_kernel(
    scale_ptr, out_ptr, rows,
    G: tl.constexpr, SPAN: tl.constexpr, BM: tl.constexpr, BG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BM rows."""
    take_turn(PDL)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    g = tl.arange(0, BG)
    here = (m < rows)[:, None] & (g < G)[None, :]
    at = scale_ptr + m.to(tl.int64)[:, None] * G + g[None, :]
    code = tl.load(at, mask=here, other=0).to(tl.int32)
    largest = tl.max(code, 1)
    least = tl.min(tl.where(here, code, 255), 1)
    near = (largest - least <= SPAN) & (largest < 255)
    tl.store(out_ptr + m, tl.where(near, largest + 1, 0).to(tl.uint8), mask=m < rows)


def references(scale_ENG: Tensor, span: int = 26) -> Tensor:
    """[E, N] of uint8: one more than the largest exponent of a row's scales of e8m0, or zero where
    one is less by more than `span`, or NaN."""
    E, N, G = scale_ENG.shape
    out = scale_ENG.new_empty(E, N)
    BG = triton.next_power_of_2(G)
    BM = max(1, BYTES // BG)
    launch(
        references_kernel, (triton.cdiv(E * N, BM),), scale_ENG, out, E * N,
        G=G, SPAN=span, BM=BM, BG=BG, num_warps=8, **pdl_options(scale_ENG),
    )  # fmt: skip
    return out
