"""Scales of weights: where those of a row lie, what values they are, and what they multiply.

Scales of groups of at least a step are multiplied into the float32 sum of the step where that is
small, others into the decoded values: a second sum of many tokens has no room in registers. An
infinite scale makes NaN, as infinity times a code of zero does. Scales of float8 come as bytes,
and the global scale of an expert above these is multiplied into the sum of all columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.formats.halves import bits_of


@triton.jit
def scale_of(scale, KIND: tl.constexpr):
    """Stored scales as float32."""
    if KIND == "e8m0":
        code = scale.to(tl.int32)
        # As bits: 2**-127 is subnormal, and what would be infinity is NaN.
        special = tl.where((code == 0) | (code == 255), 1 << 22, 0)
        scale = ((code << 23) | special).to(tl.float32, bitcast=True)
    elif KIND == "float8_e4m3fn":
        # As bits of float16: 2**-8 of the value, also of subnormals.
        code = scale.to(tl.int32)
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        scale = tl.where((code & 0x7F) == 0x7F, float("nan"), scale)
    else:
        scale = scale.to(tl.float32)
    return scale


@triton.jit
def finite(scale):
    """Scales that are multiplied into a sum; see the module."""
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


@triton.jit
def group_row(e, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr):
    """The place of a row's first scale among those of all experts [E, row groups, groups]."""
    DOWN: tl.constexpr = W.down
    ACROSS: tl.constexpr = W.across
    down: tl.constexpr = 1 if DOWN == -1 else (ROWS + DOWN - 1) // DOWN
    across: tl.constexpr = 1 if ACROSS == -1 else (COLUMNS + ACROSS - 1) // ACROSS
    group = 0 * row if DOWN == -1 else row // DOWN
    return (e.to(tl.int64) * down + group) * across


@triton.jit
def spread(values_MG, EACH: tl.constexpr):
    """Each column EACH times."""
    M: tl.constexpr = values_MG.shape[0]
    G: tl.constexpr = values_MG.shape[1]
    return tl.reshape(tl.broadcast_to(values_MG[:, :, None], (M, G, EACH)), (M, G * EACH))


@triton.jit
def rescaled(acc_MN, W: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of all products. Codes of float4 in bfloat16 are 2**-126 of their values, and scales
    were multiplied by 2**64, so that those from 2**-64 to 2**63 stay exact. So are those of float6,
    or 2**-124."""
    if W is not None and DTYPE == tl.bfloat16:
        ELEMENT: tl.constexpr = W.element
        if ELEMENT == "float4_e2m1" or ELEMENT == "float6_e2m3":
            acc_MN = acc_MN * 4.611686018427387904e18
        elif ELEMENT == "float6_e3m2":
            acc_MN = acc_MN * 1.152921504606846976e18
    return acc_MN


@triton.jit
def under_global(acc_MN, global_scale_ptr, e):
    """The sum of products with an expert's weight, times the global scale of the expert, if any."""
    if global_scale_ptr is not None:
        acc_MN = acc_MN * tl.load(global_scale_ptr + e)
    return acc_MN


@triton.jit
def factor_at(e, row_M, ROWS: tl.constexpr, SHARED: tl.constexpr):
    """Where the global scales of rows of an expert's weight are, of which ROWS there are, by how
    rows share them: see `Experts.shared13`."""
    if SHARED == "halves":
        at_M = 2 * e + (row_M >= ROWS // 2).to(tl.int32)
    elif SHARED == "pairs":
        at_M = 2 * e + row_M % 2
    else:
        at_M = e * ROWS + row_M
    return at_M


@triton.jit
def under_globals(
    acc_MN, global_scale_ptr, e, row_M, inside_M, ROWS: tl.constexpr, SHARED: tl.constexpr
):
    """The sum of the first product with an expert's weight, times the global scales of its rows, if
    any: the expert's one, or where SHARED says so those at `factor_at`."""
    if global_scale_ptr is not None:
        if SHARED == "":
            acc_MN = under_global(acc_MN, global_scale_ptr, e)
        else:
            at_M = factor_at(e, row_M, ROWS, SHARED)
            acc_MN = acc_MN * tl.load(global_scale_ptr + at_M, mask=inside_M, other=0.0)[:, None]
    return acc_MN


@triton.jit
def scale_pairs(scale, KIND: tl.constexpr, FLOAT: tl.constexpr, DTYPE: tl.constexpr):
    """Scales that are multiplied into values, twice in each int32; of float4 in bfloat16 times
    2**64 (see `rescaled`)."""
    if FLOAT and DTYPE == tl.bfloat16 and KIND == "e8m0":
        # The exponent of 2**(code - 127 + 64), or that of infinity; a bit more makes it NaN.
        code = scale.to(tl.int32)
        bits = tl.minimum(code + 64, 255) << 7 | tl.where(code == 255, 64, 0)
    else:
        scale = scale_of(scale, KIND)
        if FLOAT and DTYPE == tl.bfloat16:
            scale *= 1.8446744073709552e19
        bits = bits_of(scale.to(DTYPE))
    return bits | (bits << 16)
