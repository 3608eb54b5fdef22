"""Decoders of codes of eight bits that come as words of four, in Gluon: two values at once."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats.halves import and_or, pair_fma


@gluon.jit
def of_float8(words, DTYPE: gl.constexpr):
    """(the first, the last two values of each word) as pairs of halves."""
    if DTYPE == gl.float16:
        return gl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""", "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b;
        .reg .b32 pair;
        .reg .f32 f, g;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {a, b}, pair;
        cvt.f32.f16 f, a;
        cvt.f32.f16 g, b;
        cvt.rn.bf16x2.f32 $0, g, f;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {a, b}, pair;
        cvt.f32.f16 f, a;
        cvt.f32.f16 g, b;
        cvt.rn.bf16x2.f32 $1, g, f;
        }""", "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def of_int8(words):
    """(the first, the last two values of each word) as pairs of float16: 1024 and a code that is
    raised to 0 to 255 are these bits, less what was added."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 raised, less;
        xor.b32 raised, $2, 0x80808080;
        mov.b32 less, 0x64806480;
        prmt.b32 $0, raised, 0x64646464, 0x4140;
        prmt.b32 $1, raised, 0x64646464, 0x4342;
        sub.rn.f16x2 $0, $0, less;
        sub.rn.f16x2 $1, $1, less;
        }""", "=&r,=&r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pairs_of_bytes(words):
    """(the first, the last two bytes of each word) as pairs of 16 bits."""
    return gl.inline_asm_elementwise(
        """{
        prmt.b32 $0, $2, 0, 0x4140;
        prmt.b32 $1, $2, 0, 0x4342;
        }""", "=&r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def bytes_of(v, less, ELEMENT: gl.constexpr, DTYPE: gl.constexpr):
    """The values of pairs of bytes, less zero points. bfloat16 holds no more than 128 + the lower
    seven bits of one, so the eighth is subtracted by itself."""
    ONE: gl.constexpr = 0x3F803F80 if DTYPE == gl.bfloat16 else 0x3C003C00
    if ELEMENT == "uint8" and DTYPE == gl.bfloat16:
        v = v ^ 0x00800080  # less 128
    if DTYPE == gl.bfloat16:
        low = and_or(v, 0x007F007F, 0x43004300)
        high = and_or(v, 0x00800080, 0x43004300)
        v = pair_fma(high, -0x407F4080, low, DTYPE)  # the halves of which are -1
        if ELEMENT == "uint8":
            v = pair_fma(v, ONE, less, DTYPE)
    elif ELEMENT == "uint8":
        v = pair_fma(v | 0x64006400, ONE, less, DTYPE)  # 1024 + code
    else:
        # 1024 + 128 + code, less as much: the halves of it are -1152.
        v = pair_fma(v ^ 0x64806480, ONE, -0x1B7F1B80, DTYPE)
    return v
