"""The order of columns in which tokens are stored for weights of codes, so that 16 bytes that a
thread reads at once meet the codes that it decodes at once. h is stored so where it is made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton import STEP, Weight
from moe_ops.kernels.triton.experts.formats.codes import are_words
from moe_ops.kernels.triton.experts.products import float8_tile

STAGE_COLUMNS = tl.constexpr(float8_tile.COLUMNS)
STAGE_SCALES = tl.constexpr(float8_tile.SCALES)


@triton.jit
def column_of(i, W: tl.constexpr):
    """Where column i of the tokens of a product is stored, once arranged."""
    if are_words(W):
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
def in_float8_order(codes):
    """Codes of tokens [M, N] in the order in which weights of four bits meet them that are decoded
    to float8: of each 32 columns the even ones, then the odd ones."""
    M: tl.constexpr = codes.shape[0]
    N: tl.constexpr = codes.shape[1]
    pairs = tl.reshape(codes, (M, N // 32, 16, 2))
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (M, N))


@triton.jit
def place_in_stages(g, GROUP: tl.constexpr):
    """Where a row has the scale of group g of its columns, for the stages of
    `grouped_float8_tokens.py`: so many places for each of them, the first ones of which are
    taken."""
    EACH: tl.constexpr = STAGE_COLUMNS // GROUP
    return g // EACH * STAGE_SCALES + g % EACH


@triton.jit
def column_at(place, BITS: tl.constexpr):
    """The column of tokens that is stored in a place, once arranged: for codes of four bits in the
    order in which words are decoded. For six a thread has 32 columns side by side, of which those
    that are eight apart are a pair. For eight, which `grouped_registers.py` alone multiplies so, a
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
