"""Tokens as products with quantised weights read them: in another order of columns, or as float8.

Words of codes of four or six bits are multiplied a pair of codes at a time (`quantized.py`), so
what they meet is stored pair by pair: 16 bytes are read at once. h is stored so where it is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import STEP, Weight
from moe_ops.kernels.triton.experts.quantized import Codes
from moe_ops.kernels.triton.launch import pdl_options
from moe_ops.kernels.triton.quantize import codes_of, magnitude, most_of, scale_of_largest
from moe_ops.kernels.triton.replay import launch


@triton.jit
def column_of(i, W: tl.constexpr):
    """Where column i of the tokens of a product is stored, once arranged."""
    if W is not None and W.bits < 8:
        i = place_of(i, W.bits)
    return i


@triton.jit
def place_of(column, BITS: tl.constexpr):
    """Where a column of tokens is stored, once arranged: the inverse of `column_at`."""
    if BITS == 4:
        word, code = column // 8 % 16, column % 8
        place = column // 128 * 128 + word % 4 * 32 + code % 4 * 8 + word // 4 * 2 + code // 4
    elif BITS == 6:
        thread, pair = column // 32 % 4, column // 16 % 2 * 8 + column % 8
        place = column // 128 * 128 + pair * 8 + thread * 2 + column // 8 % 2
    else:
        thread, pair = column // 16 % 4, column // 2 % 8
        place = column // 64 * 64 + pair * 8 + thread * 2 + column % 2
    return place


@triton.jit
def column_at(place, BITS: tl.constexpr):
    """The column of tokens that is stored in a place, once arranged: for codes of four bits in the
    order in which words are decoded. For six a thread has 32 columns side by side, of which those
    that are eight apart are a pair. For eight, which `grouped_codes.py` alone multiplies so, a
    thread has the bytes of four words side by side of each 64 columns, two of them a pair."""
    if BITS == 4:
        low, j, high = place // 32 % 4, place // 8 % 4, place // 2 % 4
        column = place // 128 * 128 + (high * 4 + low) * 8 + j + place % 2 * 4
    elif BITS == 6:
        thread, pair = place // 2 % 4, place // 8 % 16
        column = place // 128 * 128 + thread * 32 + pair // 8 * 16 + place % 2 * 8 + pair % 8
    else:
        thread, pair = place // 2 % 4, place // 8 % 8
        column = place // 64 * 64 + thread * 16 + pair * 2 + place % 2
    return column


def arranged(columns: int, weight: Weight) -> int:
    """The columns of arranged tokens: whole blocks, the rest of which are zeros."""
    block = STEP // 2 if weight.bits == 8 else STEP
    return triton.cdiv(columns, block) * block


def stored(columns: int, weight: Weight | None) -> int:
    """As many columns as tokens are stored with: arranged ones fill whole blocks, with zeros."""
    return columns if weight is None or weight.bits == 8 else arranged(columns, weight)


@triton.jit
def arrange_kernel(
    x_ptr, inverse_ptr, out_ptr, stride_x,
    K: tl.constexpr, D: tl.constexpr, OUT: tl.constexpr, BITS: tl.constexpr, BD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BD places of a token, in its row or in each of its K rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BD + tl.arange(0, BD)
    column = column_at(place, BITS)  # reads scatter within a token, which stays in the L1 cache
    x = tl.load(x_ptr + t * stride_x + column, mask=column < D, other=0.0)
    if inverse_ptr is None:
        tl.store(out_ptr + t * OUT + place, x, mask=place < OUT)
    else:
        for k in range(K):
            row = tl.load(inverse_ptr + t * K + k).to(tl.int64)
            tl.store(out_ptr + row * OUT + place, x, mask=place < tl.where(row >= 0, OUT, 0))


def arrange(
    x_TD: Tensor, weight: Weight, inverse_R: Tensor | None = None, top_k: int = 1
) -> Tensor:
    """Tokens whose columns are in the order in which weights are multiplied; with the rows of their
    pairs (`sort_pairs`) one in each row. Rows of no pair stay unwritten."""
    T, D = x_TD.shape
    out = x_TD.new_empty(T if inverse_R is None else inverse_R.numel(), arranged(D, weight))
    BD = min(1024, triton.next_power_of_2(out.shape[1]))
    pdl, options = pdl_options(x_TD)
    launch(
        arrange_kernel, (T, triton.cdiv(D, BD)), x_TD, inverse_R, out, x_TD.stride(0),
        K=top_k, D=D, OUT=out.shape[1], BITS=weight.bits, BD=BD, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit
def to_float8(x):
    """(codes, scales) of float8 of rows of x, as `quantize` makes them."""
    x = x.to(tl.float32)
    scale = scale_of_largest(tl.max(magnitude(x), 1), most_of(False))
    return codes_of(x, scale, False), scale


@triton.jit
def quantise_kernel(
    x_ptr, out_ptr, scale_ptr, stride_x,
    D: tl.constexpr, BG: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BG groups of columns of a token."""
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    at_GC = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_GC = tl.load(x_ptr + t * stride_x + at_GC, mask=at_GC < D, other=0.0)
    codes_GC, scale_G = to_float8(x_GC)
    tl.store(out_ptr + t * D + at_GC, codes_GC, mask=at_GC < D)
    tl.store(scale_ptr + t * GROUPS + g, scale_G, mask=g < GROUPS)


def quantise(x_TD: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """Codes of float8, and float32 scales [T, groups], of tokens for weights with inputs of 8
    bits."""
    (T, D), group = x_TD.shape, weight.across
    groups = triton.cdiv(D, group)
    codes_TD = x_TD.new_empty(T, D, dtype=torch.float8_e4m3fn)
    scale_TG = x_TD.new_empty(T, groups, dtype=torch.float32)
    BG = min(8, triton.next_power_of_2(groups))
    pdl, options = pdl_options(x_TD)
    launch(
        quantise_kernel, (T, triton.cdiv(groups, BG)), x_TD, codes_TD, scale_TG, x_TD.stride(0),
        D=D, BG=BG, GROUP=group, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
    return codes_TD, scale_TG


@triton.jit(do_not_specialize=["T"])
def quantise_sorted_kernel(
    x_ptr, inverse_ptr, codes_ptr, scale_ptr, stride_x, stride_scale, T,
    K: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a group of columns of BT tokens, written to each of their rows."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    g = tl.program_id(1)
    d = g * GROUP + tl.arange(0, GROUP)
    inside_TC = (t < T)[:, None] & (d < D)[None, :]
    x_TC = tl.load(x_ptr + t.to(tl.int64)[:, None] * stride_x + d[None, :], inside_TC, other=0.0)
    codes_TC, scale_T = to_float8(x_TC)
    for k in range(K):
        row_T = tl.load(inverse_ptr + t * K + k, mask=t < T, other=-1)
        at_TC = codes_ptr + row_T.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(at_TC, codes_TC, mask=(row_T >= 0)[:, None] & (d < D)[None, :])
        tl.store(scale_ptr + g * stride_scale + row_T, scale_T, mask=row_T >= 0)


def quantise_sorted(
    x_TD: Tensor, inverse_R: Tensor, top_k: int, group: int
) -> tuple[Tensor, Tensor]:
    """Codes of float8 [R, D] of the token in each row, and float32 scales [groups, R or more]:
    those of 64 rows and a group of columns lie side by side. Rows of no pair stay unwritten."""
    (T, D), R = x_TD.shape, inverse_R.numel()
    groups = triton.cdiv(D, group)
    codes_RD = x_TD.new_empty(R, D, dtype=torch.float8_e4m3fn)
    scale_GR = x_TD.new_empty(groups, triton.cdiv(R, 16) * 16, dtype=torch.float32)
    BT = 16
    pdl, options = pdl_options(x_TD)
    launch(
        quantise_sorted_kernel, (triton.cdiv(T, BT), groups),
        x_TD, inverse_R, codes_RD, scale_GR, x_TD.stride(0), scale_GR.stride(0), T,
        K=top_k, D=D, BT=BT, GROUP=group, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
    return codes_RD, scale_GR


def tokens_for(x_TD: Tensor, codes: Codes | None) -> tuple[Tensor, Tensor | None]:
    """Tokens, and scales if they have any, as the product with the first weight reads them."""
    if codes is None:
        return x_TD, None
    if codes.in_words:
        return arrange(x_TD, codes.weight), None
    if not codes.quantises:
        return x_TD, None
    if codes.x_scale_TG is not None:
        return x_TD, codes.x_scale_TG
    return quantise(x_TD, codes.weight)
