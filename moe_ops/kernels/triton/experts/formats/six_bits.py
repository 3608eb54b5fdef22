"""Decoders of codes of six bits, which come as three words for sixteen of them, of which i and
i + 8 make a pair.

A thread has the six words of 32 columns side by side, and tokens are arranged as they are for four
bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.formats.float8 import INTERPRETED
from moe_ops.kernels.triton.experts.formats.halves import and_or, pair_fma


@triton.jit
def middle(a, b):
    """Words that hold, in each half, a's upper byte below b's lower byte."""
    if INTERPRETED:
        return ((a >> 8) & 0x00FF00FF) | ((b << 8) & -0x00FF0100)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6341;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def sixes_of(first, second, third, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """The codes i and i + 8 of the sixteen of three words as the halves of an int32, for i from 0
    to 7: eight of six bits fill three halves, so that both are at the same bits of theirs."""
    a = (first & 0xFFFF) | (second & -0x10000)
    b = ((first >> 16) & 0xFFFF) | (third << 16)
    c = (second & 0xFFFF) | (third & -0x10000)
    ab, bc = middle(a, b), middle(b, c)
    return (
        pair_at(a, 0, ELEMENT, DTYPE), pair_at(a, 6, ELEMENT, DTYPE),
        pair_at(ab, 4, ELEMENT, DTYPE), pair_at(b, 2, ELEMENT, DTYPE),
        pair_at(b, 8, ELEMENT, DTYPE), pair_at(bc, 6, ELEMENT, DTYPE),
        pair_at(c, 4, ELEMENT, DTYPE), pair_at(c, 10, ELEMENT, DTYPE),
    )  # fmt: skip


@triton.jit
def pair_at(words, BIT: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """The codes that begin at a bit of both halves of words: sign, exponent and mantissa at their
    places. So a value is times 2**-124 or 2**-126 in bfloat16, which `rescaled` makes up for; in
    float16, which has no room for that, it is the value."""
    tl.static_assert(ELEMENT == "float6_e3m2" or ELEMENT == "float6_e2m3")
    MANTISSA: tl.constexpr = 2 if ELEMENT == "float6_e3m2" else 3
    PLACE: tl.constexpr = (7 if DTYPE == tl.bfloat16 else 10) - MANTISSA
    signs = (words << (10 - BIT)) & -0x7FFF8000
    moved = words << (PLACE - BIT) if PLACE >= BIT else words >> (BIT - PLACE)
    pair = and_or(moved, 0x001F001F << PLACE, signs)
    if DTYPE == tl.float16:
        pair = pair_fma(pair, 0x6C006C00 if MANTISSA == 2 else 0x74007400, -0x7FFF8000, DTYPE)
    return pair


@triton.jit
def joined_8(pairs, scale_pair, DTYPE: tl.constexpr):
    """[..., 2, 2, 2]: the values of `sixes_of`, times scales [...]."""
    scaled = ()
    for i in tl.static_range(8):
        pair = pair_fma(pairs[i], scale_pair, -0x7FFF8000, DTYPE)  # the halves of which are -0
        scaled = scaled + (pair,)  # noqa: RUF005
    return in_order(scaled)


@triton.jit
def in_order(pairs):
    """[..., 2, 2, 2] of eight tensors [...]."""
    evens = tl.join(tl.join(pairs[0], pairs[4]), tl.join(pairs[2], pairs[6]))
    odds = tl.join(tl.join(pairs[1], pairs[5]), tl.join(pairs[3], pairs[7]))
    return tl.join(evens, odds)
