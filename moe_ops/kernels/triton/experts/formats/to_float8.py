"""Codes of four bits as codes of float8_e4m3fn, which hold all of them exactly: four at a time, in
integers of 32 bits.

    float4_e2m1  looked up by its three bits of magnitude, and its sign put above them
    int4, uint4  less the zero point, as sign and magnitude: a byte of e4m3 below 17 is that many
                 times 2**-9, subnormal or not. `of_one` makes up for that
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats.halves import and_or


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
def _of_float4(w, more):
    """(magnitudes, signs) of the first four and of the last four codes of words, whose exponents
    are more by `more` - 5, from 0 to 11, if they are."""
    if more is None:
        low, high = w * 0 + 0x3C383000, w * 0 + 0x4C484440  # 0, 0.5, 1, 1.5 and 2, 3, 4, 6
    else:
        low, high = more * 0x08080800 + 0x14100800, more * 0x08080808 + 0x24201C18
    named = w & 0x77777777
    odd, even = w, w << 4
    return (
        (looked_up(low, high, named), permuted(even, odd, 0x5140)),
        (looked_up(low, high, named >> 16), permuted(even, odd, 0x7362)),
    )  # fmt: skip


@gluon.jit
def _less(n, zero):
    """(magnitudes or one less, whether negative) of bytes less zero points of 0 to 16; without
    those less 8, of which only the lowest four bits are looked at."""
    if zero is None:
        negative = (~n >> 3) & 0x01010101
        magnitude = (n & 0x07070707) ^ (negative * 7)
    else:
        n = (n & 0x0F0F0F0F) + zero
        negative = (~n >> 4) & 0x01010101
        magnitude = (n & 0x0F0F0F0F) ^ (negative * 15)
    return magnitude, negative


@gluon.jit
def less_of(zero):
    """16 less zero points, in each byte, as `_less` takes them."""
    return (16 - zero.to(gl.int32)) * 0x01010101


@gluon.jit
def parted(w, less, W: gl.constexpr):
    """Two integers each of the first four and of the last four codes of words, of which `joined`
    makes bytes by one instruction. less: of integers what `less_of` gave, of floats how much
    exponents are more; or None."""
    if W.element == "float4_e2m1":
        return _of_float4(w, less)
    else:
        odd = w >> 4
        return _less(permuted(w, odd, 0x5140), less), _less(permuted(w, odd, 0x7362), less)


@gluon.jit
def joined(parts, W: gl.constexpr):
    """Bytes of e4m3 of what `parted` gave, four in each int32."""
    magnitude, sign = parts
    if W.element == "float4_e2m1":
        return and_or(sign, -0x7F7F7F80, magnitude)
    else:
        return sign * 129 + magnitude


@gluon.constexpr_function
def of_one(W):
    """What a value of one is, times a byte's."""
    return 1.0 if W.element == "float4_e2m1" else 512.0
