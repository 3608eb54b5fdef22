"""Tokens as codes of float8 with a scale for each group of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Weight
from moe_ops.kernels.triton.experts.formats.float8 import LARGEST_CODE, SMALLEST_SCALE
from moe_ops.kernels.triton.experts.schedule.batches import Batches
from moe_ops.kernels.triton.experts.schedule.sort import count_of, row_of
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.quantize import (
    as_float8,
    codes_of,
    magnitude,
    most_of,
    saturated,
    scale_of_largest,
)
from moe_ops.kernels.triton.replay import launch

EACH = 4  # programs for each row that is expected: one after the other takes longer than to begin


@triton.jit
def to_float8(x):
    """(codes, scales) of float8 of rows of x, as `quantize` makes them."""
    x = x.to(tl.float32)
    scale = scale_of_largest(tl.max(magnitude(x), 1), most_of(False))
    return codes_of(x, scale, False), scale


@triton.jit
def by_inverse(x):
    """(codes, scales) as `grouped_blocks.py` makes them of h: products with the inverse of a scale,
    and divisions as the GPU does them quickest."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    scale = tl.maximum(largest / LARGEST_CODE, SMALLEST_SCALE)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    x = saturated(x * (1.0 / scale)[:, None], LARGEST_CODE)
    return as_float8(x), scale


@triton.jit
def quantize_groups(
    x_ptr, out_ptr, scale_ptr, stride_x, t, block,
    D: tl.constexpr, BG: tl.constexpr, GROUP: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """A block of BG groups of columns of token t."""
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    t = t.to(tl.int64)
    g = block * BG + tl.arange(0, BG)
    at_GC = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_GC = tl.load(x_ptr + t * stride_x + at_GC, mask=at_GC < D, other=0.0)
    if INVERSE:
        codes_GC, scale_G = by_inverse(x_GC)
    else:
        codes_GC, scale_G = to_float8(x_GC)
    tl.store(out_ptr + t * D + at_GC, codes_GC, mask=at_GC < D)
    tl.store(scale_ptr + t * GROUPS + g, scale_G, mask=g < GROUPS)


@triton.jit
def quantize_tokens_kernel(
    x_ptr, out_ptr, scale_ptr, stride_x,
    D: tl.constexpr, BG: tl.constexpr, GROUP: tl.constexpr, INVERSE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BG groups of columns of a token."""
    take_turn(PDL)
    quantize_groups(
        x_ptr, out_ptr, scale_ptr, stride_x, tl.program_id(0), tl.program_id(1), D, BG, GROUP,
        INVERSE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def quantize_batches_kernel(
    x_ptr, counts_ptr, out_ptr, scale_ptr, stride_x, M,
    D: tl.constexpr, BG: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BG groups of columns of every so many rows of an expert, in its first slots."""
    take_turn(PDL)
    e = tl.program_id(0)
    for m in range(tl.program_id(1), count_of(counts_ptr, e, True, M), tl.num_programs(1)):
        quantize_groups(
            x_ptr, out_ptr, scale_ptr, stride_x, e * M + m, tl.program_id(2), D, BG, GROUP, False
        )


def groups_at_once(columns: int, group: int) -> int:
    """How many groups of a token a program quantises."""
    return min(8, triton.next_power_of_2(triton.cdiv(columns, group)))


def quantize_tokens(
    x_TD: Tensor, weight: Weight, batches: Batches | None = None, *, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes of float8, and float32 scales [T, groups], of tokens for weights with inputs of 8
    bits; of the slots of batches, of those that are used. `inverse`: as `by_inverse` makes them."""
    (T, D), group = x_TD.shape, weight.across
    groups = triton.cdiv(D, group)
    codes_TD = x_TD.new_empty(T, D, dtype=torch.float8_e4m3fn)
    scale_TG = x_TD.new_empty(T, groups, dtype=torch.float32)
    BG = groups_at_once(D, group)
    if batches is not None:
        b, E = batches, batches.counts_E.shape[0]
        launch(
            quantize_batches_kernel, (E, min(b.slots, EACH * b.expected), triton.cdiv(groups, BG)),
            x_TD, b.counts_E, codes_TD, scale_TG, x_TD.stride(0), b.slots,
            D=D, BG=BG, GROUP=group, num_warps=4, **pdl_options(x_TD),
        )  # fmt: skip
        return codes_TD, scale_TG
    launch(
        quantize_tokens_kernel, (T, triton.cdiv(groups, BG)), x_TD, codes_TD, scale_TG,
        x_TD.stride(0), D=D, BG=BG, GROUP=group, INVERSE=inverse, num_warps=4,
        **pdl_options(x_TD),
    )  # fmt: skip
    return codes_TD, scale_TG


@triton.jit(do_not_specialize=["T", "M"])
def quantize_sorted_kernel(
    x_ptr, inverse_ptr, codes_ptr, scale_ptr, stride_x, stride_scale, T, M,
    K: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a group of columns of BT tokens, written to each of their rows."""
    take_turn(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    g = tl.program_id(1)
    d = g * GROUP + tl.arange(0, GROUP)
    here_T = t < T
    if M is not None:  # a slot is read if it is used
        here_T = row_of(inverse_ptr, t, t < T, M) >= 0
    inside_TC = here_T[:, None] & (d < D)[None, :]
    x_TC = tl.load(x_ptr + t.to(tl.int64)[:, None] * stride_x + d[None, :], inside_TC, other=0.0)
    codes_TC, scale_T = to_float8(x_TC)
    for k in range(K):
        row_T = row_of(inverse_ptr, t * K + k, t < T, M)
        at_TC = codes_ptr + row_T.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(at_TC, codes_TC, mask=(row_T >= 0)[:, None] & (d < D)[None, :])
        tl.store(scale_ptr + g * stride_scale + row_T, scale_T, mask=row_T >= 0)


def quantize_sorted(
    x_TD: Tensor, inverse_R: Tensor, top_k: int, group: int, slots: int | None = None
) -> tuple[Tensor, Tensor]:
    """Codes of float8 [R, D] of the token in each row, and float32 scales [groups, R or more]:
    those of 64 rows and a group of columns lie side by side. Rows of no pair stay unwritten.
    inverse_R and slots as `row_of` takes them."""
    (T, D), R = x_TD.shape, x_TD.shape[0] * top_k
    groups = triton.cdiv(D, group)
    codes_RD = x_TD.new_empty(R, D, dtype=torch.float8_e4m3fn)
    scale_GR = x_TD.new_empty(groups, triton.cdiv(R, 16) * 16, dtype=torch.float32)
    BT = 16
    launch(
        quantize_sorted_kernel, (triton.cdiv(T, BT), groups),
        x_TD, inverse_R, codes_RD, scale_GR, x_TD.stride(0), scale_GR.stride(0), T, slots,
        K=top_k, D=D, BT=BT, GROUP=group, num_warps=4, **pdl_options(x_TD),
    )  # fmt: skip
    return codes_RD, scale_GR
