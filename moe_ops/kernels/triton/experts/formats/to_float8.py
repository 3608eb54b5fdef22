"""Codes of four bits as codes of float8, which hold all of them exactly: four at a time, in
integers of 32 bits. Of a word of eight the even ones are made first, then the odd ones.

    float4_e2m1  the sign stays, the other three bits are moved below it: 2**-6 of the value in
                 float8_e4m3fn. With an exponent of their own in float8_e5m2: see `folded`
    int4, uint4  less the zero point, as sign and magnitude: a byte of e4m3 below 17 is that many
                 times 2**-9, subnormal or not

`of_one` makes up for these factors.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats.halves import and_or


@gluon.jit
def distance(a, b):
    """How far each byte of a is from that of b: |a - b|, as numbers without a sign."""
    return gl.inline_asm_elementwise(
        "vabsdiff4.u32.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, a * 0],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def not_and_or(a, mask, b):
    """(~a & mask) | b."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xAE;", "=r,r,r,r", [a, mask, b],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def less_of(zero):
    """Zero points of 0 to 16 in each byte, and 128, as `parted` takes them."""
    return (zero.to(gl.int32) + 128) * 0x01010101


@gluon.jit
def parted(w, less, W: gl.constexpr):
    """Two integers each of the even and of the odd codes of words, of which `joined` makes bytes by
    one instruction. less: of integers with zero points what `less_of` gave, else None."""
    if W.element == "float4_e2m1":
        even, odd = (w << 2, (w << 4) & -0x7F7F7F80), (w >> 2, w & -0x7F7F7F80)
    elif less is None:
        even = distance(w & 0x0F0F0F0F, 0x08080808), w << 4
        odd = distance((w >> 4) & 0x0F0F0F0F, 0x08080808), w
    else:
        n, m = (w & 0x0F0F0F0F) | -0x7F7F7F80, ((w >> 4) & 0x0F0F0F0F) | -0x7F7F7F80
        even, odd = (
            (distance(n, less), n - (less & 0x7F7F7F7F)),
            (distance(m, less), m - (less & 0x7F7F7F7F)),
        )
    return even, odd


@gluon.jit
def joined(parts, W: gl.constexpr):
    """Bytes of e4m3 of what `parted` gave, four in each int32."""
    first, second = parts
    if W.element == "float4_e2m1":
        return and_or(first, 0x1C1C1C1C, second)
    else:
        return not_and_or(second, -0x7F7F7F80, first)


@gluon.jit
def permuted(a, b, SELECTOR: gl.constexpr):
    """Four of the bytes of a (0 to 3) and b (4 to 7), the last one named first."""
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, $2, {SELECTOR};", "=r,r,r", [a, b],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def looked_up(low, high, nibbles):
    """The bytes of low and high, 0 to 7, that the four lowest nibbles of each word name."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, nibbles],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def folded(w, more):
    """The magnitudes of the even and of the odd codes of words of float4_e2m1, times
    2**(more - 13), for `more` from 0 to 26: as float8_e5m2, which holds them exactly."""
    low = more * 0x04040400 + 0x0A080400  # 0, 0.5, 1, 1.5, times 2**-13
    high = more * 0x04040404 + 0x12100E0C  # 2, 3, 4, 6
    named = w & 0x77777777
    first, last = looked_up(low, high, named), looked_up(low, high, named >> 16)
    return permuted(first, last, 0x6420), permuted(first, last, 0x7531)


@gluon.jit
def signed(w, magnitudes):
    """The even and the odd codes of words of which `folded` gave the magnitudes."""
    even, odd = magnitudes
    return and_or(w << 4, -0x7F7F7F80, even), and_or(w, -0x7F7F7F80, odd)


@gluon.constexpr_function
def of_one(W):
    """What a value of one is, times a byte's."""
    return 64.0 if W.element == "float4_e2m1" else 512.0
