"""What kernels that make codes of float8_e4m3fn share."""

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
