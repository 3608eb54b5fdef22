"""Floats of a launch as float8_e4m3fn, with a scale for each group of them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # by Python, which has no PTX
LARGEST_CODE = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1e-12)


@triton.jit
def rounded_to_float8(x):
    """float32 rounded to what float8_e4m3fn holds, for the interpreter, whose conversion carries no
    bit into the exponent."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = bits.to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 2**-6, (x + 24576.0) - 24576.0, normal)


@triton.jit
def to_float8(x, AXIS: tl.constexpr):
    """(codes, scales along the other axis), as `quantize` makes them, but that a division by a
    scale is a product with its inverse.

    Divisions round as IEEE's do: `/` is off by up to two units in the last place on a GPU.
    """
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), AXIS)
    scale = tl.maximum(tl.div_rn(largest, LARGEST_CODE), SMALLEST_SCALE)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    codes = x * tl.expand_dims(tl.div_rn(1.0, scale), AXIS)
    codes = tl.maximum(codes, -LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.minimum(codes, LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:  # where a float8 cannot be NaN, either
        codes = rounded_to_float8(codes)
        scale = tl.where(tl.sum(x * 0, AXIS) == 0, scale, float("nan"))
    return codes.to(tl.float8e4nv), scale
