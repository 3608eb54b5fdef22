"""The decoders of ggml's K quants: half of a block of 256 columns at a time, of which
`moe_ops/quant/elements/k_quants.py` says where its codes and scales are.

W is the format of a weight, a `BlockWeight` of `moe_ops.kernels.triton`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.formats.scales import spread

HALF = tl.constexpr(128)  # columns that are decoded at once
HEADER = tl.constexpr(16)  # bytes of scales and minima, in front of codes


@triton.jit
def halves_of_blocks(w_M1, start, inside_M, W: tl.constexpr, POLICY: tl.constexpr):
    """[M, HALF] in float32: the values of columns from `start` on, a multiple of HALF, of rows of
    blocks that begin at w_M1; zeros outside."""
    ELEMENT: tl.constexpr = W.element
    block_M1 = w_M1 + start // 256 * W.units
    half = start // 128 % 2
    if ELEMENT == "q6_k":
        code = codes_of(block_M1, 0, half, inside_M, 2, POLICY) - 32
        pair_MG = words_at(block_M1 + 192 + 8 * half, 4, inside_M, "")  # of int8, with their signs
        scale_MG = tl.join((pair_MG << 24) >> 24, (pair_MG << 16) >> 24)
        scale_MG = tl.reshape(scale_MG, (w_M1.shape[0], 8)).to(tl.float32)
        scale_MG = half_at(block_M1 + 208, inside_M) * scale_MG
        values = code.to(tl.float32) * spread(scale_MG, 16)
    else:
        tl.static_assert(ELEMENT == "q4_k" or ELEMENT == "q5_k")
        above: tl.constexpr = 0 if ELEMENT == "q4_k" else 1
        code = codes_of(block_M1, HEADER, half, inside_M, above, POLICY)
        scale_MG, least_MG = sixes_of(block_M1 + 4, half, inside_M)
        scale_MG = half_at(block_M1, inside_M) * scale_MG
        least_MG = half_at(block_M1 + 2, inside_M) * least_MG
        values = code.to(tl.float32) * spread(scale_MG, 32) - spread(least_MG, 32)
    return values


@triton.jit
def codes_of(
    block_M1, FIRST: tl.constexpr, half, inside_M, ABOVE: tl.constexpr, POLICY: tl.constexpr
):
    """[M, HALF]: the codes of half a block, of four bits and ABOVE more that lie behind these."""
    code = parts_of(words_at(block_M1 + FIRST + 64 * half, 32, inside_M, POLICY), 4)
    if ABOVE > 0:
        WORDS: tl.constexpr = 8 * ABOVE
        at_M1 = block_M1 + FIRST + 128 + 2 * WORDS * half
        code = code | (parts_of(words_at(at_M1, WORDS, inside_M, POLICY), ABOVE) << 4)
    return code


@triton.jit
def parts_of(word_MN, BITS: tl.constexpr):
    """[M, HALF]: numbers of so many bits of words of 16, the first in the lowest bits."""
    M: tl.constexpr = word_MN.shape[0]
    shift = BITS * tl.arange(0, 16 // BITS)
    parts = (word_MN[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(parts, (M, 128))


@triton.jit
def words_at(at_M1, COUNT: tl.constexpr, inside_M, POLICY: tl.constexpr):
    """[M, COUNT]: words of 16 bits as int32, their signs above them."""
    i = tl.arange(0, COUNT)
    at_MW = at_M1.to(tl.pointer_type(tl.int16), bitcast=True) + i[None, :]
    inside_MW = inside_M[:, None] & (i >= 0)[None, :]
    return tl.load(at_MW, mask=inside_MW, other=0, eviction_policy=POLICY).to(tl.int32)


@triton.jit
def half_at(at_M1, inside_M):
    """[M, 1] in float32: a float16 of two bytes."""
    at_M1 = at_M1.to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(at_M1, mask=inside_M[:, None], other=0.0).to(tl.float32)


@triton.jit
def sixes_of(at_M1, half, inside_M):
    """([M, 4], [M, 4]): the scales and the minima of half a block, of the 12 bytes there. Those of
    the first half have a byte each; of the second half four bits, and the upper two of these."""
    a, b, c = (
        fours_at(at_M1, inside_M),
        fours_at(at_M1 + 4, inside_M),
        fours_at(at_M1 + 8, inside_M),
    )
    scale = tl.where(half == 0, a & 63, (c & 15) | (a >> 6 << 4))
    least = tl.where(half == 0, b & 63, (c >> 4) | (b >> 6 << 4))
    return scale.to(tl.float32), least.to(tl.float32)


@triton.jit
def fours_at(at_M1, inside_M):
    """[M, 4]: bytes as int32."""
    i = tl.arange(0, 4)
    inside_MB = inside_M[:, None] & (i >= 0)[None, :]
    return tl.load(at_M1 + i[None, :], mask=inside_MB, other=0).to(tl.int32)
