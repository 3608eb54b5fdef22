"""Floats to codes of 8 bits and their float32 scales, as `moe_ops.quantize` defines them, to the
bit: divided by their scale as IEEE says, rounded half to even and saturated.

A scale that is not given is the largest magnitude over that of a code. Magnitudes are compared as
integers, in whose order NaN is the largest: what a float's maximum would drop.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.experts.formats.float8 import (
    INTERPRETED,
    LARGEST_CODE,
    SMALLEST_SCALE,
    rounded_to_float8,
)
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

TILE = 4096  # floats of a program
MOST_PARTIAL = 1024  # programs that look for the largest magnitude of a tensor
NOT_FINITE = tl.constexpr(0x7F800000)  # the bits of infinity; those of NaN are above
# Added to a float32 below 2**22 these leave the nearest integer in the lowest bits, half to even.
TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def magnitude(x):
    """The bits of |x| of float32, in the order of magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_largest(bits, MOST: tl.constexpr):
    """The scale of floats whose largest magnitude has these bits, by the largest code."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), tl.full(bits.shape, MOST, tl.float32))
    scale = tl.maximum(scale, SMALLEST_SCALE)
    return tl.where(bits < NOT_FINITE, scale, float("nan"))


@triton.constexpr_function
def most_of(INT8):
    """The largest code of 8 bits."""
    return 127.0 if INT8 else LARGEST_CODE.value


@triton.jit
def saturated(x, MOST: tl.constexpr):
    """x from -MOST to MOST; NaN stays."""
    x = tl.maximum(x, -MOST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divided(x, divisor):
    """x [M, N] by divisors [M, 1] that are not 0, as IEEE says. Zeros, with which rows are padded,
    too, are divided apart: for them the GPU's division calls a function, which takes long."""
    zero_of_sign = tl.where(divisor == divisor, tl.where(divisor < 0, -1.0, 1.0), float("nan"))
    divisor = tl.broadcast_to(divisor, x.shape)
    quotient = tl.div_rn(tl.where(x == 0, divisor, x), divisor)
    return tl.where(x == 0, x * zero_of_sign, quotient)


@triton.jit
def divided_or_zero(x, scale):
    """x [M, N] by scales [M]; by a scale of 0 numbers are 0."""
    zero = (scale == 0)[:, None]
    return tl.where(zero & (x == x), 0.0, divided(x, tl.where(zero, 1.0, scale[:, None])))


@triton.jit
def codes_of(x, scale, INT8: tl.constexpr):
    """Codes of x [M, N] by scales [M]. A scale of 0 makes codes of 0; NaN is 0 as an int8."""
    x = divided_or_zero(x, scale)
    x = saturated(x, most_of(INT8))
    if INT8:
        codes = (x + TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
        codes = tl.where(x == x, codes, 0)
    else:
        codes = as_float8(x)
    return codes


@triton.jit
def as_float8(x):
    """float32 of at most the largest code, as codes."""
    if INTERPRETED:  # whose conversion makes a number of NaN, and drops the sign of zero
        bits = rounded_to_float8(x).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        bits = tl.where(x == x, bits | (x.to(tl.int32, bitcast=True) >> 24 & 0x80), 0x7F)
        codes = bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        codes = x.to(tl.float8e4nv)
    return codes


@triton.jit
def largest_of_parts(parts_ptr, PARTS: tl.constexpr):
    """The largest of what the programs of `largest_kernel` found."""
    return tl.max(tl.load(parts_ptr + tl.arange(0, PARTS)), 0)


@triton.jit(do_not_specialize=["R"])
def largest_kernel(
    x_ptr, ends_ptr, parts_ptr, stride_x, R,
    E: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The bits of the largest magnitude among rows of a program; with ends of experts, among the
    rows that these have."""
    take_turn(PDL)
    if ends_ptr is not None:
        R = tl.load(ends_ptr + E - 1)
    d = tl.arange(0, BD)
    largest_B = tl.zeros((BR,), tl.int32)
    for first in range(tl.program_id(0) * BR, R, tl.num_programs(0) * BR):
        row = first + tl.arange(0, BR)
        inside = (row < R)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride_x + d[None, :], inside, other=0.0)
        largest_B = tl.maximum(largest_B, tl.max(magnitude(x.to(tl.float32)), 1))
    tl.store(parts_ptr + tl.program_id(0), tl.max(largest_B, 0))


def largest(x_RD: Tensor, ends_E: Tensor | None = None, parts: int | None = None) -> Tensor:
    """The bits of the largest magnitudes of parts of x, a power of two of them; of the rows that
    experts have, if their ends are given."""
    BR, _ = tile_of(x_RD.shape[1])
    if parts is None:
        needed = max(1, triton.cdiv(x_RD.shape[0], BR))
        parts = min(MOST_PARTIAL, triton.next_power_of_2(needed))
    return _largest(x_RD, ends_E, parts, BR)


def largest_of_rows(x_RD: Tensor) -> Tensor:
    """The bits of the largest magnitude of each row of x."""
    return _largest(x_RD, None, x_RD.shape[0], 1)


def _largest(x_RD: Tensor, ends_E: Tensor | None, parts: int, BR: int) -> Tensor:
    """The bits of the largest magnitude that each of `parts` programs finds. Programs take BR rows
    at a time in turn."""
    R, D = x_RD.shape
    BD = triton.next_power_of_2(D)
    out = x_RD.new_empty(parts, dtype=torch.int32)
    launch(
        largest_kernel, (parts,), x_RD, ends_E, out, x_RD.stride(0), R,
        E=0 if ends_E is None else ends_E.numel(), D=D, BR=BR, BD=BD,
        num_warps=warps_of(BR * BD), **pdl_options(x_RD),
    )  # fmt: skip
    return out


def tile_of(columns: int) -> tuple[int, int]:
    """How many groups of `columns` columns a program takes, and how many columns its tile has."""
    width = triton.next_power_of_2(columns)
    return max(1, TILE // width), width


def warps_of(elements: int) -> int:
    """At most 32 floats a thread, where there are so many threads."""
    return min(16, max(4, elements // 1024))


@triton.jit(do_not_specialize=["N"])
def quantize_kernel(
    x_ptr, static_ptr, parts_ptr, codes_ptr, scale_ptr, stride_x, N,
    D: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr, INT8: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BG groups of columns of a row, of all N groups of all rows; by one scale if it
    is given, or if parts of the largest magnitude are."""
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    take_turn(PDL)
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    row = (g // GROUPS).to(tl.int64)[:, None]
    c = tl.arange(0, BC)[None, :]
    d = (g % GROUPS)[:, None] * GROUP + c
    inside = (g < N)[:, None] & (c < GROUP) & (d < D)
    x = tl.load(x_ptr + row * stride_x + d, mask=inside, other=0.0).to(tl.float32)
    if static_ptr is not None:
        scale = tl.load(static_ptr) + tl.zeros((BG,), tl.float32)
    elif parts_ptr is not None:
        bits = largest_of_parts(parts_ptr, PARTS) + tl.zeros((BG,), tl.int32)
        scale = scale_of_largest(bits, most_of(INT8))
    else:
        scale = scale_of_largest(tl.max(magnitude(x), 1), most_of(INT8))
    tl.store(codes_ptr + row * D + d, codes_of(x, scale, INT8), mask=inside)
    ONE: tl.constexpr = static_ptr is not None or parts_ptr is not None
    # One scale is that of no rows, too.
    tl.store(scale_ptr + g, scale, mask=g == 0 if ONE else g < N)


@on_its_device
def quantize(
    x_RD: Tensor, scale: Tensor | None, group: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes of x in float8_e4m3fn or int8, and their scales: one if `group` is all rows and columns
    (-1), which `scale` may give, else one for so many columns of a row."""
    (R, D), (down, across) = x_RD.shape, group
    one, columns = down == -1, D if across == -1 else across
    groups = 1 if across == -1 else triton.cdiv(D, across)
    codes_RD = x_RD.new_empty(R, D, dtype=dtype)
    scale_RG = x_RD.new_empty(1 if one else R, groups, dtype=torch.float32)
    if not one and scale_RG.numel() == 0:
        return codes_RD, scale_RG
    parts = largest(x_RD) if one and scale is None else None
    BG, BC = tile_of(columns)
    launch(
        quantize_kernel, (max(1, triton.cdiv(R * groups, BG)),),
        x_RD, scale, parts, codes_RD, scale_RG, x_RD.stride(0), R * groups,
        D=D, GROUP=columns, BG=BG, BC=BC, INT8=dtype == torch.int8,
        PARTS=1 if parts is None else parts.numel(), num_warps=warps_of(BG * BC),
        **pdl_options(x_RD),
    )  # fmt: skip
    return codes_RD, scale_RG
