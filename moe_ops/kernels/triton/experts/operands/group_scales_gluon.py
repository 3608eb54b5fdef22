"""Tokens as codes of float8 with a scale for each step of columns, made where a product loads them,
in Gluon.

Every program that reads a token rounds it again, in registers and ahead of the weights that it
meets, where a launch that rounds it once for all of them is waited for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats.float8 import LARGEST_CODE, SMALLEST_SCALE


@gluon.jit
def factors_of(largest):
    """(scales, their inverses in two halves) of groups whose largest magnitudes are given. As
    `to_float8` of `group_scales.py` makes scales, to the bit, but where a group has a NaN: then the
    scale may be that of its other columns, and a code is NaN."""
    scale = gl.maximum(gl.div_rn(largest, gl.full_like(largest, LARGEST_CODE)), SMALLEST_SCALE)
    scale = gl.where(largest < float("inf"), scale, float("nan"))
    one = gl.full_like(scale, 1.0)
    inverse = gl.div_rn(one, scale)
    return scale, inverse, gl.fma(-scale, inverse, one) * inverse


@gluon.jit
def rounded(x):
    """(what the codes of tokens stand for, in float16; their scales)."""
    scale, inverse, rest = factors_of(gl.max(gl.abs(x.to(gl.float32)), 2))
    return values_of_rounded(x, inverse[:, :, None], rest[:, :, None]), scale


@gluon.jit
def rounded_words(x):
    """(codes of tokens, four in each int32; their scales)."""
    x = x.to(gl.float32)
    scale, inverse, rest = factors_of(gl.max(gl.abs(x), 2))
    codes = codes_of_rounded(x, inverse[:, :, None], rest[:, :, None])
    codes = codes.to(gl.int8, bitcast=True).to(gl.int32) & 0xFF
    even, odd = codes.reshape([x.shape[0], x.shape[1], x.shape[2] // 4, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first | second << 8 | third << 16 | fourth << 24, scale


@gluon.jit
def rounded_columns(h):
    """(codes, scales) of h [columns, N] of float32, whose columns share a scale."""
    scale, inverse, rest = factors_of(gl.max(gl.abs(h), 0))
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
