"""Inputs in formats that a GPU does not multiply: rounded to the values that their codes stand for.

Codes of up to eight bits have few bits of mantissa, and so have scales of e8m0 and float8: their
products are exact in 16 bits, and so are inputs that kernels of 16 bits multiply. Of float16 they
stay within its range, and of its smallest step whole multiples, as the inputs are. A float32 scale
has more bits: products with it are rounded once, to the inputs' dtype. So has the global scale of a
row above scales of float8. A static one is not among them, as the global scales of weights contain
it.

Codes are those of `quantize`, bit for bit: of the same divisions, rounded half to even.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Inputs, quantize
from moe_ops.kernels.triton.experts.formats.float8 import SMALLEST_SCALE
from moe_ops.kernels.triton.experts.formats.order import place_of
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.quantize import NOT_FINITE
from moe_ops.kernels.triton.replay import launch

PROGRAMS = 256  # that look for the largest of all inputs
COLUMNS = 1024  # of a program


@triton.jit
def rounded(x, LOWEST: tl.constexpr, MANTISSA: tl.constexpr, LARGEST: tl.constexpr):
    """float32 rounded half to even to the values of an element; the largest one of those beyond."""
    a = tl.minimum(tl.abs(x), LARGEST)
    exponent = tl.maximum(a.to(tl.int32, bitcast=True) >> 23, LOWEST + 127)
    # A power of two whose last bit is the step of values beside x.
    power = ((exponent + (23 - MANTISSA)) << 23).to(tl.float32, bitcast=True)
    a = (a + power) - power
    return tl.where(x < 0, -a, a)


@triton.jit
def global_scale(largest, LARGEST: tl.constexpr):
    """The scale of float8 scales by which the largest of them becomes the largest float8."""
    amax = largest.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, LARGEST * 448.0), SMALLEST_SCALE)
    return tl.where(largest <= NOT_FINITE, scale, float("nan"))


@triton.jit
def scales_of_groups(x_GC, common, LARGEST: tl.constexpr, TOP: tl.constexpr, SCALE: tl.constexpr):
    """(scales that decode, factors or divisors that make ratios) of groups, as `quantize` has them;
    e8m0 ones multiply."""
    largest_G = tl.max(quantize.magnitude(x_GC), 1)
    finite_G = largest_G < NOT_FINITE
    if SCALE == "e8m0":
        code_G = tl.maximum((largest_G >> 23) - TOP, 0)
        # 2**-127 is subnormal; its inverse is not.
        scale_G = tl.where(code_G == 0, 1 << 22, code_G << 23).to(tl.float32, bitcast=True)
        ratio_G = ((254 - code_G) << 23).to(tl.float32, bitcast=True)
    elif SCALE == "float32":
        scale_G = quantize.scale_of_largest(largest_G, LARGEST)
        ratio_G = scale_G
    else:
        amax_G = largest_G.to(tl.float32, bitcast=True)
        scale_G = tl.div_rn(tl.div_rn(amax_G, LARGEST), common)
        scale_G = rounded(tl.where(scale_G == scale_G, scale_G, 0.0), -6, 3, 448.0)
        ratio_G = scale_G * common
    return tl.where(finite_G, scale_G, float("nan")), ratio_G


@triton.jit
def emulate_groups(
    x_ptr, largest_ptr, static_ptr, out_ptr, stride_x, row, block,
    D: tl.constexpr, OUT: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, TOP: tl.constexpr, HAS_NAN: tl.constexpr, SCALE: tl.constexpr,
    GROUP: tl.constexpr, ARRANGED: tl.constexpr, IN_PLACE: tl.constexpr, BG: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """A block of BG groups of columns of a row, which are arranged for codes of ARRANGED bits if
    that is not 0; IN_PLACE: and were so before. largest: of each row, or BP of all rows."""
    row = row.to(tl.int64)
    g = block * BG + tl.arange(0, BG)
    d_GC = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    place_GC = place_of(d_GC, ARRANGED) if ARRANGED > 0 else d_GC
    x_at = x_ptr + row * stride_x + (place_GC if IN_PLACE else d_GC)
    x_GC = tl.load(x_at, mask=d_GC < D, other=0.0).to(tl.float32)
    if static_ptr is not None:
        common = tl.load(static_ptr)
    elif SCALE == "row":
        common = quantize.scale_of_largest(tl.load(largest_ptr + row), LARGEST)
    elif SCALE == "float8_e4m3fn":
        common = global_scale(tl.load(largest_ptr + row), LARGEST)
    elif SCALE == "tensor":
        bits = tl.max(tl.load(largest_ptr + tl.arange(0, BP)), 0)
        common = quantize.scale_of_largest(bits, LARGEST)
    else:
        common = 1.0
    if SCALE == "e8m0" or SCALE == "float8_e4m3fn" or SCALE == "float32":
        scale_G, ratio_G = scales_of_groups(x_GC, common, LARGEST, TOP, SCALE)
        if SCALE == "e8m0":
            ratio_GC = x_GC * ratio_G[:, None]
        else:
            ratio_GC = quantize.divided_or_zero(x_GC, ratio_G)
            ratio_GC = tl.where(ratio_G[:, None] == 0, 0.0, ratio_GC)
        value_GC = rounded(ratio_GC, LOWEST, MANTISSA, LARGEST)
        # The scale of a group with a NaN is one; a global scale that is one leaves codes of zero.
        value_GC = tl.where(ratio_GC == ratio_GC, value_GC, 0.0) * scale_G[:, None]
        if static_ptr is None and SCALE == "float8_e4m3fn":
            value_GC *= common  # from left to right, as codes are decoded
    else:
        ratio_GC = quantize.divided_or_zero(x_GC, tl.zeros((BG,), tl.float32) + common)
        value_GC = rounded(ratio_GC, LOWEST, MANTISSA, LARGEST)
        value_GC = tl.where(ratio_GC == ratio_GC, value_GC, float("nan") if HAS_NAN else 0.0)
        value_GC *= common
    at_GC = out_ptr + row * OUT + place_GC
    tl.store(at_GC, value_GC.to(out_ptr.dtype.element_ty), mask=d_GC < OUT)


@triton.jit
def emulate_kernel(
    x_ptr, largest_ptr, static_ptr, out_ptr, stride_x,
    D: tl.constexpr, OUT: tl.constexpr, LOWEST: tl.constexpr, MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr, TOP: tl.constexpr, HAS_NAN: tl.constexpr, SCALE: tl.constexpr,
    GROUP: tl.constexpr, ARRANGED: tl.constexpr, BG: tl.constexpr, BP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a block of a row, as `emulate_groups` has it, in place."""
    take_turn(PDL)
    emulate_groups(
        x_ptr, largest_ptr, static_ptr, out_ptr, stride_x, tl.program_id(0), tl.program_id(1),
        D, OUT, LOWEST, MANTISSA, LARGEST, TOP, HAS_NAN, SCALE, GROUP, ARRANGED, True, BG, BP,
    )  # fmt: skip


def groups_at_once(columns: int, group: int) -> int:
    """How many groups of a row a program rounds."""
    return max(1, min(COLUMNS, triton.next_power_of_2(columns)) // group)


def needs_largest(inputs: Inputs, static: Tensor | None) -> bool:
    """Whether the largest of a row, or of all of them, is looked for first."""
    return static is None and inputs.scale in ("row", "float8_e4m3fn", "tensor")


def emulate(
    x_RD: Tensor, columns: int, inputs: Inputs, static: Tensor | None,
    ends_E: Tensor | None = None, arranged: int = 0,
) -> Tensor:  # fmt: skip
    """What codes of rows stand for, in the dtype of these, and without a static global scale.

    arranged: the bits of the codes that columns are arranged for, with zeros behind them, if they
    are; then it is done in place. With `ends_E` rows after the last of them may hold anything.
    """
    R, width = x_RD.shape
    out = x_RD if arranged else x_RD.new_empty(R, columns)
    bits = None
    if needs_largest(inputs, static):
        whole = inputs.scale == "tensor"
        bits = quantize.largest(x_RD, ends_E, PROGRAMS) if whole else quantize.largest_of_rows(x_RD)
    BG = groups_at_once(width, inputs.group)
    OUT = out.shape[1]
    launch(
        emulate_kernel, (R, triton.cdiv(OUT, BG * inputs.group)),
        x_RD, bits, static, out, x_RD.stride(0),
        D=columns, OUT=OUT, LOWEST=inputs.lowest, MANTISSA=inputs.mantissa, LARGEST=inputs.largest,
        TOP=inputs.top, HAS_NAN=inputs.has_nan, SCALE=inputs.scale, GROUP=inputs.group,
        ARRANGED=arranged, BG=BG, BP=PROGRAMS, num_warps=4, **pdl_options(x_RD),
    )  # fmt: skip
    return out
