"""Decoders of codes of four bits, which come as words of eight.

A shift and a mask make a pair of halves of the nibbles j and j + 4 of a word; of float4 in bfloat16
a product and two masks do. Which column of the weights meets which of a matrix unit's is free, so
tokens are stored in the order of `column_of` (`order.py`), in which a thread multiplies words that
it loads side by side. So weights stay as checkpoints hold them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.formats.float8 import INTERPRETED
from moe_ops.kernels.triton.experts.formats.halves import and_or, half_of, pair_fma


@triton.jit
def signs_and_rest(v):
    """The signs of two halves, and the next three bits of each moved three places to the right: in
    three instructions, where the compiler would merge this shift with that before, and need more.
    """
    if INTERPRETED:
        return (v & -0x7FFF8000) | ((v >> 3) & 0x0E000E00)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 signs, rest;
        and.b32 signs, $1, 0x80008000;
        shr.u32 rest, $1, 3;
        lop3.b32 $0, rest, 0x0E000E00, signs, 0xEA;
        }""", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def float4_bits(w, LATER: tl.constexpr):
    """Nibbles 0 and 4 of words, or 1 and 5, as bits of two bfloat16: the sign at bit 15, the others
    at 8 to 6. A product with two powers of two copies a nibble to both places, so that only masks
    are left to the unit of masks and shifts, which takes twice as long for an instruction."""
    CODES: tl.constexpr = 0x00F000F0 if LATER else 0x000F000F
    COPIES: tl.constexpr = 0x0104 if LATER else 0x1040
    if INTERPRETED:
        return ((w & CODES) * COPIES) & -0x7E3F7E40
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 codes;
        and.b32 codes, $1, {CODES};
        mul.lo.u32 codes, codes, {COPIES};
        and.b32 $0, codes, 0x81C081C0;
        }}""", "=r,r", [w], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def less_zero(zero, STORED: tl.constexpr, DTYPE: tl.constexpr):
    """-128 or -1024, see `decoded`, and minus zero points, which for int4 are 8; twice."""
    NEGATIVE: tl.constexpr = -0x3CFF3D00 if DTYPE == tl.bfloat16 else -0x1BFF1C00
    if STORED:
        zero = zero.to(tl.int32)
        pair = (zero | (zero << 16)) | NEGATIVE
    else:
        pair = NEGATIVE | 0x00080008
    return pair


@triton.jit
def decoded(
    w_MW, j: tl.constexpr, less, scale_pair,
    FLOAT: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The values of nibbles j and j + 4 of each word, as the halves of an int32."""
    NEGATIVE_ZERO: tl.constexpr = -0x7FFF8000  # of both halves; as a mask, their signs
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    if FLOAT:
        # Sign, exponent and mantissa to their places: the value times 2**-126, which the scale
        # makes up for, or times 2**-14, which a scale in float16 has no room for.
        if BF16:
            v = float4_bits(w_MW >> 8 if j > 1 else w_MW, j % 2 == 1)
        else:
            v = w_MW << (12 - 4 * j) if j < 3 else w_MW
            v = pair_fma(signs_and_rest(v), 0x74007400, NEGATIVE_ZERO, DTYPE)
    else:
        # 128 + code of bfloat16, or 1024 + code of float16, is this and the bits of the code.
        MAGIC: tl.constexpr = 0x43004300 if BF16 else 0x64006400
        v = and_or(w_MW >> (4 * j) if j > 0 else w_MW, 0x000F000F, MAGIC)
        v = pair_fma(v, 0x3F803F80 if BF16 else 0x3C003C00, less, DTYPE)
    if SCALED:
        v = pair_fma(v, scale_pair, NEGATIVE_ZERO, DTYPE)
    return v


@triton.jit
def pairs_of(w, less, scale_pair, FLOAT: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """[..., 2, 2] of words [...]: `decoded` for j from 0 to 3."""
    p0 = decoded(w, 0, less, scale_pair, FLOAT, SCALED, DTYPE)
    p1 = decoded(w, 1, less, scale_pair, FLOAT, SCALED, DTYPE)
    p2 = decoded(w, 2, less, scale_pair, FLOAT, SCALED, DTYPE)
    p3 = decoded(w, 3, less, scale_pair, FLOAT, SCALED, DTYPE)
    return tl.join(tl.join(p0, p2), tl.join(p1, p3))


@triton.jit
def values_of(
    w_MW, less, scale_pair, FLOAT: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr
):
    """[M, 8 W] of DTYPE: the values of words in the order of `column_of`, in which what a thread of
    a matrix unit multiplies comes of words that it loads side by side."""
    M: tl.constexpr = w_MW.shape[0]
    BLOCKS: tl.constexpr = w_MW.shape[1] // 16
    pairs = pairs_of(w_MW, less, scale_pair, FLOAT, SCALED, DTYPE)
    pairs = tl.permute(tl.reshape(pairs, (M, BLOCKS, 4, 4, 4)), (0, 1, 3, 4, 2))
    pairs = tl.reshape(pairs, (M, BLOCKS * 64))
    halves = tl.join(half_of(pairs, False, DTYPE), half_of(pairs, True, DTYPE))
    return tl.reshape(halves, (M, BLOCKS * 128))


@triton.jit
def float4_of(code):
    """float4_e2m1 as float32: its bits as the exponent's last two and the mantissa's first are the
    value times 2**-126."""
    magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return tl.where(code < 8, magnitude, -magnitude)
