"""Floats to floats of 4, 6 and 8 bits with a scale for some columns of a row, as `moe_ops.quantize`
defines them, to the bit: the formats of OCP Microscaling (MX) 1.0 and NVFP4.

    e8m0            2**(floor(log2 amax) - exponent of the largest code), or by the rule "ceil" the
                    power of two by which nothing saturates; 255 for what is no number
    float8_e4m3fn   amax / largest / global scale, rounded
    float32         amax / largest

Codes of 4 and 6 bits lie as `quant/packing.py` packs them, the first value in the lowest bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.experts.formats.float8 import INTERPRETED, SMALLEST_SCALE
from moe_ops.kernels.triton.experts.formats.scales import scale_of
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, take_turn
from moe_ops.kernels.triton.quantize import (
    NOT_FINITE,
    TO_INTEGER,
    codes_of,
    divided_or_zero,
    magnitude,
    tile_of,
    warps_of,
)
from moe_ops.kernels.triton.replay import launch

# Bits of the exponent and of the mantissa, bias, largest value and its exponent, values that are
# packed together and their bytes: FORMAT of the kernel.
Element = tuple[int, int, int, float, int, int, int]
SCALES = {"float32": torch.float32, "e8m0": torch.uint8, "float8_e4m3fn": torch.float8_e4m3fn}


@triton.jit
def exponent_scale(bits, FORMAT: tl.constexpr, CEIL: tl.constexpr):
    """The e8m0 code for groups whose largest magnitude has these bits."""
    TOP: tl.constexpr = FORMAT[4]
    if CEIL:
        most = tl.full(bits.shape, FORMAT[3], tl.float32)
        exact = tl.div_rn(bits.to(tl.float32, bitcast=True), most)
        code = exact.to(tl.int32, bitcast=True) >> 23
        code += (exact > scale_of(code, "e8m0")).to(tl.int32)
    else:
        code = tl.maximum((bits >> 23) - TOP, 0)
    return tl.where(bits < NOT_FINITE, code, 255)


@triton.jit
def minifloat_of(x, FORMAT: tl.constexpr):
    """The code of a float of 4 or 6 bits nearest to x, halves to the even one; of NaN that of 0."""
    MANTISSA: tl.constexpr = FORMAT[1]
    LOWEST: tl.constexpr = 1 - FORMAT[2]  # exponent of the smallest normal, and of all subnormals
    BITS: tl.constexpr = FORMAT[0] + FORMAT[1]
    MOST: tl.constexpr = FORMAT[3]
    x = tl.where(x == x, x, 0.0)
    sign = (x.to(tl.int32, bitcast=True) >> (31 - BITS)) & (1 << BITS)
    x = tl.minimum(tl.abs(x), MOST)
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) - 127, LOWEST)
    steps = x * ((MANTISSA - exponent + 127) << 23).to(tl.float32, bitcast=True)
    # The hidden bit of a normal adds one to the exponent field, and so does a carry of rounding.
    mantissa = (steps + TO_INTEGER).to(tl.int32, bitcast=True) & 0xFF
    return ((exponent - LOWEST) << MANTISSA) + mantissa | sign


@triton.jit
def halves_of(codes):
    """The even and the odd columns."""
    return tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))


@triton.jit(do_not_specialize=["N"])
def quantize_blocks_kernel(
    x_ptr, global_scale_ptr, codes_ptr, scale_ptr, stride_x, stride_global_scale, N,
    D: tl.constexpr, GROUP: tl.constexpr, BG: tl.constexpr, BC: tl.constexpr,
    FORMAT: tl.constexpr, KIND: tl.constexpr, CEIL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BG groups of columns of a row, of all N groups of all rows."""
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    VALUES: tl.constexpr = FORMAT[5]
    STORED: tl.constexpr = D // VALUES * FORMAT[6]
    take_turn(PDL)
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    row = (g // GROUPS).to(tl.int64)[:, None]
    c = tl.arange(0, BC)[None, :]
    d = (g % GROUPS)[:, None] * GROUP + c
    inside = (g < N)[:, None] & (c < GROUP) & (d < D)
    x = tl.load(x_ptr + row * stride_x + d, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(magnitude(x), 1)
    if KIND == "e8m0":
        code = exponent_scale(bits, FORMAT, CEIL)
        tl.store(scale_ptr + g, code.to(tl.uint8), mask=g < N)
        # By the inverse, as the scale may be subnormal.
        x = x * scale_of(254 - code & 0xFF, "e8m0")[:, None]
        scale = tl.full((BG,), 1.0, tl.float32)
    else:
        most = tl.full((BG,), FORMAT[3], tl.float32)
        scale = tl.div_rn(bits.to(tl.float32, bitcast=True), most)
        if KIND == "float32":
            scale = tl.where(bits < NOT_FINITE, tl.maximum(scale, SMALLEST_SCALE), float("nan"))
            tl.store(scale_ptr + g, scale, mask=g < N)
        else:
            if global_scale_ptr is not None:
                global_scale = tl.load(
                    global_scale_ptr + g // GROUPS * stride_global_scale, mask=g < N, other=1.0
                )
                scale = tl.div_rn(scale, global_scale)
                scale = tl.where(scale == scale, scale, 0.0)  # of zeros, by zero
            scale = tl.where(bits < NOT_FINITE, tl.maximum(scale, 0.0), float("nan"))
            one = tl.full((BG,), 1.0, tl.float32)
            code = tl.reshape(codes_of(scale[:, None], one, False), (BG,))
            tl.store(scale_ptr + g, code, mask=g < N)
            scale = code.to(tl.float32)
            if INTERPRETED:  # where a float8 cannot be NaN
                scale = tl.where(bits < NOT_FINITE, scale, float("nan"))
            if global_scale_ptr is not None:
                scale *= global_scale
    if VALUES == 1:
        tl.store(codes_ptr + row * STORED + d, codes_of(x, scale, False), mask=inside)
    else:
        even, odd = halves_of(minifloat_of(divided_or_zero(x, scale), FORMAT))
        c = tl.arange(0, BC // VALUES)[None, :]
        d = (g % GROUPS)[:, None] * (GROUP // VALUES) + c
        inside = (g < N)[:, None] & (c < GROUP // VALUES) & (d < D // VALUES)
        at = codes_ptr + row * STORED + d * FORMAT[6]
        if VALUES == 2:
            tl.store(at, (even | odd << 4).to(tl.uint8), mask=inside)
        else:
            first, third = halves_of(even)
            second, fourth = halves_of(odd)
            word = first | second << 6 | third << 12 | fourth << 18
            tl.store(at, (word & 0xFF).to(tl.uint8), mask=inside)
            tl.store(at + 1, (word >> 8 & 0xFF).to(tl.uint8), mask=inside)
            tl.store(at + 2, (word >> 16).to(tl.uint8), mask=inside)


@on_its_device
def quantize(
    x_RD: Tensor, global_scale: Tensor | None, element: Element, group: int, kind: str, rule: str
) -> tuple[Tensor, Tensor]:
    """Codes of x, packed, and the scales of so many columns of a row, of a kind of SCALES;
    global_scale: the global scale of those in float8, one or one for each row."""
    R, D = x_RD.shape
    group = D if group == -1 else group
    groups = triton.cdiv(D, group)
    values, units = element[5:]
    dtype = torch.float8_e4m3fn if values == 1 else torch.uint8
    codes_RD = x_RD.new_empty(R, D // values * units, dtype=dtype)
    scale_RG = x_RD.new_empty(R, groups, dtype=SCALES[kind])
    if R == 0:
        return codes_RD, scale_RG
    BG, BC = tile_of(max(group, values))
    stride_global_scale = (
        global_scale.stride(0) if global_scale is not None and global_scale.numel() > 1 else 0
    )
    launch(
        quantize_blocks_kernel, (triton.cdiv(R * groups, BG),),
        x_RD, global_scale, codes_RD, scale_RG, x_RD.stride(0), stride_global_scale, R * groups,
        D=D, GROUP=group, BG=BG, BC=BC, FORMAT=element, KIND=kind, CEIL=rule == "ceil",
        num_warps=warps_of(BG * BC), **pdl_options(x_RD),
    )  # fmt: skip
    return codes_RD, scale_RG
