"""One token as codes of 8 bits, made where a product loads it, in Gluon. Each program makes them
again, ahead of the weights that they meet; else it waits for a launch that makes them once.

A quotient by a scale is a product with both halves of its inverse, rounded once. Of every x of 16
bits the code is that of the division, which takes four times as many instructions.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.formats.float8 import SMALLEST_SCALE
from moe_ops.kernels.triton.quantize import TO_INTEGER, most_of


@gluon.jit
def factors_of(largest, INT8: gl.constexpr):
    """(scales, their inverses in two halves) by the largest magnitudes of what shares a scale: to
    the bit those of `scale_of_largest` in `quantize.py`."""
    most = gl.full_like(largest, most_of(INT8))
    scale = gl.maximum(gl.div_rn(largest, most), SMALLEST_SCALE)
    scale = gl.where(largest < float("inf"), scale, float("nan"))  # nothing is below NaN, nor it
    one = gl.full_like(scale, 1.0)
    inverse = gl.div_rn(one, scale)
    return scale, inverse, gl.fma(-scale, inverse, one) * inverse


@gluon.jit
def rounded_words(x):
    """(codes of float8 of x [S, 1, columns], four in each int32; scales). The largest magnitude is
    that of numbers: where there is a NaN, its code is one."""
    scale, inverse, rest = factors_of(gl.max(gl.abs(x.to(gl.float32)), 2), False)
    return words_by(x, inverse[:, :, None], rest[:, :, None], False), scale


@gluon.jit
def words_by(x, inverse, rest, INT8: gl.constexpr):
    """Codes of x [S, 1, columns], four in each int32, by both halves of the inverse of a scale. A
    thread has the four side by side. NaN is 0 as an int8."""
    x = x.to(gl.float32)
    quotient = gl.fma(x, inverse, x * rest)
    if INT8:
        codes = (quotient + TO_INTEGER).to(gl.int32, bitcast=True)
        codes = gl.where(quotient == quotient, codes, 0)
    else:
        codes = quotient.to(gl.float8e4nv).to(gl.int8, bitcast=True).to(gl.int32)
    S: gl.constexpr = codes.shape[0]
    WORDS: gl.constexpr = codes.shape[2] // 4
    even, odd = (codes & 0xFF).reshape([S, 1, WORDS, 2, 2]).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first | second << 8 | third << 16 | fourth << 24
