"""Tokens as codes of 8 bits, by a scale of each step of columns or of a row, made where a product
loads them, in Gluon.

Every program that reads a token rounds it again, in registers and ahead of the weights that it
meets, where a launch that rounds it once for all of them is waited for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats.float8 import SMALLEST_SCALE
from moe_ops.kernels.triton.quantize import TO_INTEGER, most_of


@gluon.jit
def factors_of(largest, INT8: gl.constexpr):
    """(scales, their inverses in two halves) of tokens by the largest magnitudes of what shares a
    scale, as `scale_of_largest` of `quantize.py` has scales, to the bit. Where the largest is found
    without regard to NaN, another code of float8 is NaN."""
    most = gl.full_like(largest, most_of(INT8))
    scale = gl.maximum(gl.div_rn(largest, most), SMALLEST_SCALE)
    scale = gl.where(largest < float("inf"), scale, float("nan"))  # no comparison with NaN is true
    one = gl.full_like(scale, 1.0)
    inverse = gl.div_rn(one, scale)
    return scale, inverse, gl.fma(-scale, inverse, one) * inverse


@gluon.jit
def rounded(x):
    """(what the codes of tokens stand for, in float16; their scales)."""
    scale, inverse, rest = factors_of(gl.max(gl.abs(x.to(gl.float32)), 2), False)
    return values_of_rounded(x, inverse[:, :, None], rest[:, :, None]), scale


@gluon.jit
def rounded_words(x):
    """(codes of tokens, four in each int32; their scales)."""
    x = x.to(gl.float32)
    scale, inverse, rest = factors_of(gl.max(gl.abs(x), 2), False)
    return words_of(codes_of_rounded(x, inverse[:, :, None], rest[:, :, None])), scale


@gluon.jit
def words_by(x, inverse, rest, INT8: gl.constexpr):
    """Codes of tokens by given scales, four in each int32; NaN is 0 as an int8."""
    x = x.to(gl.float32)
    if INT8:
        quotient = gl.fma(x, inverse, x * rest)
        codes = (quotient + TO_INTEGER).to(gl.int32, bitcast=True)
        return words_of(gl.where(quotient == quotient, codes, 0).to(gl.int8))
    else:
        return words_of(codes_of_rounded(x, inverse, rest))


@gluon.jit
def words_of(codes):
    """Four codes of 8 bits, side by side in a thread, in each int32."""
    codes = codes.to(gl.int8, bitcast=True).to(gl.int32) & 0xFF
    S: gl.constexpr = codes.shape[0]
    N: gl.constexpr = codes.shape[1]
    WORDS: gl.constexpr = codes.shape[2] // 4
    even, odd = codes.reshape([S, N, WORDS, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first | second << 8 | third << 16 | fourth << 24


@gluon.jit
def rounded_columns(h):
    """(codes, scales) of h [columns, N] of float32, whose columns share a scale."""
    scale, inverse, rest = factors_of(gl.max(gl.abs(h), 0), False)
    return codes_of_rounded(h, inverse[None, :], rest[None, :]), scale


# A quotient is a product with both halves of the scale's inverse, rounded once. Of every x of 16
# bits its code is that of the division, which takes four times as many instructions.


@gluon.jit
def values_of_rounded(x, inverse, rest):
    """What the codes of products with an inverse stand for."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b16 codes;
            .reg .f32 low, high, a, b;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xffff0000;
            mul.rn.f32 a, low, $4;
            mul.rn.f32 b, high, $5;
            fma.rn.f32 low, low, $2, a;
            fma.rn.f32 high, high, $3, b;
            cvt.rn.satfinite.e4m3x2.f32 codes, high, low;
            cvt.rn.f16x2.e4m3x2 $0, codes;
            }""", "=r,r,r,r,r,r", [x, inverse, rest], dtype=gl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 codes, c, d;
        .reg .f32 low, high, a, b;
        mov.b32 {c, d}, $1;
        cvt.f32.f16 low, c;
        cvt.f32.f16 high, d;
        mul.rn.f32 a, low, $4;
        mul.rn.f32 b, high, $5;
        fma.rn.f32 low, low, $2, a;
        fma.rn.f32 high, high, $3, b;
        cvt.rn.satfinite.e4m3x2.f32 codes, high, low;
        cvt.rn.f16x2.e4m3x2 $0, codes;
        }""", "=r,r,r,r,r,r", [x, inverse, rest], dtype=gl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def codes_of_rounded(x, inverse, rest):
    """The codes of products of float32 with an inverse."""
    return gl.fma(x, inverse, x * rest).to(gl.float8e4nv)
