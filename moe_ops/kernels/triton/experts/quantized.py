"""Products with quantised weights: codes are loaded as they are stored, decoded in registers and
multiplied, a step of columns at a time.

Codes of four bits come as words of eight. Two shifts and two masks make a pair of halves of the
nibbles j and j + 4 of a word, so a step is four products, of the pairs 0 to 3 of all words, and
tokens are read in that order of columns: value 8 q + j + 4 i is column 2 q + i of product j. So
weights stay as checkpoints hold them.

Codes of eight bits come as they are, and may meet inputs of 8 bits, in groups of as many columns;
`tokens.py` makes these.

Scales of groups of at least a step are multiplied into the float32 sum of the step where that is
small, others into the decoded values: a second sum of many tokens has no room in registers. An
infinite scale makes NaN, as infinity times a code of zero does.

W is the format of a weight, a `Weight` of `moe_ops.kernels.triton`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Weight
from moe_ops.kernels.triton.experts.float8 import INTERPRETED, to_float8

MOST_IN_SUM = tl.constexpr(64)  # tokens whose sums are scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """What makes the values of a layer's weights of their codes: scales, zero points, and W."""

    scale13_EFG: Tensor
    scale2_EDG: Tensor
    zero13_EFG: Tensor | None
    zero2_EDG: Tensor | None
    weight: Weight

    @property
    def in_words(self) -> bool:
        return self.bits == 4

    @property
    def quantises(self) -> bool:
        """Whether inputs have 8 bits."""
        return self.weight[4]

    @property
    def bits(self) -> int:
        return self.weight[5]


@triton.jit
def and_or(a, mask, b):
    """(a & mask) | b of int32: one instruction, where the compiler makes two."""
    if INTERPRETED:
        return (a & mask) | b
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [a, mask, b],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def half_of(pair, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """One of the two halves of an int32."""
    bits = pair >> 16 if HIGH else pair & 0xFFFF
    return bits.to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def bits_of(half):
    return half.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def pair_fma(a, b, c, DTYPE: tl.constexpr):
    """a * b + c of the two halves in each int32."""
    if INTERPRETED:
        b, c = a * 0 + b, a * 0 + c
        low = half_of(a, False, DTYPE).to(tl.float32) * half_of(b, False, DTYPE).to(tl.float32)
        low += half_of(c, False, DTYPE).to(tl.float32)
        high = half_of(a, True, DTYPE).to(tl.float32) * half_of(b, True, DTYPE).to(tl.float32)
        high += half_of(c, True, DTYPE).to(tl.float32)
        return bits_of(low.to(DTYPE)) | (bits_of(high.to(DTYPE)) << 16)
    if DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scale_of(stored, KIND: tl.constexpr):
    """A stored scale as float32."""
    if KIND == "e8m0":
        code = stored.to(tl.int32)
        # As bits: 2**-127 is subnormal, and what would be infinity is NaN.
        special = tl.where((code == 0) | (code == 255), 1 << 22, 0)
        scale = ((code << 23) | special).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
def scales(ptr, mask, KIND: tl.constexpr):
    """Stored scales as float32; of a group that is not there 0."""
    scale = scale_of(tl.load(ptr, mask=mask, other=0), KIND)
    if KIND == "e8m0":
        scale = tl.where(mask, scale, 0.0)
    return scale


@triton.jit
def finite(scale):
    """Scales that are multiplied into a sum; see the module."""
    return tl.where(tl.abs(scale) < float("inf"), scale, float("nan"))


@triton.jit
def group_row(e, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, W: tl.constexpr):
    """The place of a row's first scale among those of all experts [E, row groups, groups]."""
    DOWN: tl.constexpr = W[1]
    ACROSS: tl.constexpr = W[2]
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
def add_product(
    acc_MN, w_M1, s_ptr, z_ptr, e, row_M, inside_M, x_1N, t_ptr, token_N, inside_N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr,
    ARRANGED: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """acc_MN and the products of rows of the weights of experts, at w_M1, with tokens, at x_1N, of
    which those quantised have scales [tokens, groups] at t_ptr; `rescaled` follows the last one.
    POLICY is that of the cache for weights."""
    BITS: tl.constexpr = W[5]
    group_M = group_row(e, row_M, ROWS, COLUMNS, W)
    for start in range(0, COLUMNS, STEP):
        if BITS == 4:
            acc_MN = add_words(
                acc_MN, w_M1, s_ptr, z_ptr, group_M, inside_M, x_1N, inside_N, start,
                COLUMNS, STEP, W, ARRANGED, POLICY,
            )  # fmt: skip
        else:
            acc_MN = add_bytes(
                acc_MN, w_M1, s_ptr, group_M, inside_M, x_1N, t_ptr, token_N, inside_N, start,
                COLUMNS, STEP, W, POLICY,
            )  # fmt: skip
    return acc_MN


@triton.jit
def rescaled(acc_MN, W: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of all products. Codes of float4 in bfloat16 are 2**-126 of their values, and scales
    were multiplied by 2**64, so that those from 2**-64 to 2**63 stay exact."""
    ELEMENT: tl.constexpr = W[0]
    if ELEMENT == "float4_e2m1" and DTYPE == tl.bfloat16:
        acc_MN = acc_MN * 4.611686018427387904e18
    return acc_MN


@triton.jit
def less_zero(z_ptr, at, inside, DTYPE: tl.constexpr):
    """-128 or -1024, see `decoded`, and minus zero points, which for int4 are 8; twice."""
    NEGATIVE: tl.constexpr = -0x3CFF3D00 if DTYPE == tl.bfloat16 else -0x1BFF1C00
    if z_ptr is None:
        pair = NEGATIVE | 0x00080008
    else:
        zero = tl.load(z_ptr + at, mask=inside, other=0).to(tl.int32)
        pair = (zero | (zero << 16)) | NEGATIVE
    return pair


@triton.jit
def scale_pairs(s_ptr, at, inside, KIND: tl.constexpr, FLOAT: tl.constexpr, DTYPE: tl.constexpr):
    """Scales that are multiplied into values, twice in each int32; of float4 in bfloat16 times
    2**64 (see `rescaled`)."""
    scale = scales(s_ptr + at, inside, KIND)
    if FLOAT and DTYPE == tl.bfloat16:
        scale *= 1.8446744073709552e19
    bits = bits_of(scale.to(DTYPE))
    return bits | (bits << 16)


@triton.jit
def decoded(
    w_MW, j: tl.constexpr, less, scale_pair,
    FLOAT: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """[M, 2 W] of DTYPE: the values of nibbles j and j + 4 of each word, side by side."""
    NEGATIVE_ZERO: tl.constexpr = -0x7FFF8000  # of both halves; as a mask, their signs
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    if FLOAT:
        # Sign, exponent and mantissa to their places: the value times 2**-126, which the scale
        # makes up for, or times 2**-14, which a scale in float16 has no room for.
        v = w_MW << (12 - 4 * j) if j < 3 else w_MW
        signs = v & NEGATIVE_ZERO
        if BF16:
            v = and_or(v >> 6, 0x01C001C0, signs)
        else:
            v = pair_fma(and_or(v >> 3, 0x0E000E00, signs), 0x74007400, NEGATIVE_ZERO, DTYPE)
    else:
        # 128 + code of bfloat16, or 1024 + code of float16, is this and the bits of the code.
        MAGIC: tl.constexpr = 0x43004300 if BF16 else 0x64006400
        v = and_or(w_MW >> (4 * j) if j > 0 else w_MW, 0x000F000F, MAGIC)
        v = pair_fma(v, 0x3F803F80 if BF16 else 0x3C003C00, less, DTYPE)
    if SCALED:
        v = pair_fma(v, scale_pair, NEGATIVE_ZERO, DTYPE)
    halves = tl.join(half_of(v, False, DTYPE), half_of(v, True, DTYPE))
    return tl.reshape(halves, (w_MW.shape[0], 2 * w_MW.shape[1]))


@triton.jit
def add_words(
    acc_MN, w_M1, s_ptr, z_ptr, group_M, inside_M, x_1N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, ARRANGED: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_1N.dtype.element_ty
    ELEMENT: tl.constexpr = W[0]
    GROUP: tl.constexpr = W[2]
    KIND: tl.constexpr = W[3]
    FLOAT: tl.constexpr = ELEMENT == "float4_e2m1"
    LARGE: tl.constexpr = GROUP == -1 or GROUP >= STEP
    IN_SUM: tl.constexpr = LARGE and acc_MN.shape[1] <= MOST_IN_SUM
    SCALED: tl.constexpr = not IN_SUM or (FLOAT and DTYPE == tl.bfloat16)
    WORDS: tl.constexpr = STEP // 8
    first = start // 8
    inside_W = first + tl.arange(0, WORDS) < COLUMNS // 8
    w_MW = tl.load(
        w_M1 + (first + tl.arange(0, WORDS))[None, :],
        mask=inside_M[:, None] & inside_W[None, :], other=0, eviction_policy=POLICY,
    )  # fmt: skip
    less, scale_pair = 0, 0
    at_M = group_M if GROUP == -1 else group_M + start // GROUP
    if IN_SUM:
        scale_M = finite(scales(s_ptr + at_M, inside_M, KIND))
        part_MN = tl.zeros_like(acc_MN)
        if FLOAT:
            scale_pair = 0x5F805F80  # 2**64 of bfloat16
        else:
            less = less_zero(z_ptr, at_M[:, None], inside_M[:, None], DTYPE)
    else:
        GROUPS: tl.constexpr = 1 if LARGE else STEP // GROUP
        g = tl.arange(0, GROUPS)
        inside_MG = inside_M[:, None] & (start + g * GROUP < COLUMNS)[None, :]
        at_MG = at_M[:, None] + g[None, :]
        pair_MG = scale_pairs(s_ptr, at_MG, inside_MG, KIND, FLOAT, DTYPE)
        scale_pair = spread(pair_MG, WORDS // GROUPS)
        part_MN = acc_MN
        if not FLOAT:
            less = less_zero(z_ptr, at_MG, inside_MG, DTYPE)
            if z_ptr is not None:
                less = spread(less, WORDS // GROUPS)
    c = tl.arange(0, 2 * WORDS)
    inside_V = first + c // 2 < COLUMNS // 8
    for j in tl.static_range(4):
        values_MV = decoded(w_MW, j, less, scale_pair, FLOAT, SCALED, DTYPE)
        if ARRANGED:
            at_V = j * (COLUMNS // 4) + start // 4 + c
        else:
            at_V = start + c // 2 * 8 + j + c % 2 * 4
        x_VN = tl.load(x_1N + at_V[:, None], mask=inside_V[:, None] & inside_N[None, :], other=0.0)
        part_MN = tl.dot(values_MV, x_VN, part_MN)
    if IN_SUM:
        part_MN = acc_MN + part_MN * scale_M[:, None]
    return part_MN


@triton.jit
def float8_as(w, DTYPE: tl.constexpr):
    """float8 as halves; by way of float32, as the direct conversion to bfloat16 takes a slow unit
    for every value."""
    return w.to(tl.float32).to(DTYPE)


@triton.jit
def add_bytes(
    acc_MN, w_M1, s_ptr, group_M, inside_M, x_1N, t_ptr, token_N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_1N.dtype.element_ty
    GROUP: tl.constexpr = W[2]
    KIND: tl.constexpr = W[3]
    INPUTS_8: tl.constexpr = W[4]
    LARGE: tl.constexpr = GROUP == -1 or GROUP >= STEP
    IN_SUM: tl.constexpr = LARGE and (INPUTS_8 or acc_MN.shape[1] <= MOST_IN_SUM)
    d = start + tl.arange(0, STEP)
    inside_D = d < COLUMNS
    w_MD = tl.load(
        w_M1 + d[None, :], mask=inside_M[:, None] & inside_D[None, :], other=0.0,
        eviction_policy=POLICY,
    )  # fmt: skip
    x_DN = tl.load(x_1N + d[:, None], mask=inside_D[:, None] & inside_N[None, :], other=0.0)
    at_M = group_M if GROUP == -1 else group_M + start // GROUP
    if IN_SUM:
        factor_MN = finite(scales(s_ptr + at_M, inside_M, KIND))[:, None]
        if INPUTS_8:
            if t_ptr is None:
                x_DN, scale_N = to_float8(x_DN, 0)
            else:
                # By offsets of 32 bits, as addresses would take twice as many registers.
                at_N = token_N * ((COLUMNS + GROUP - 1) // GROUP)
                scale_N = tl.load(t_ptr + start // GROUP + at_N, mask=inside_N, other=0.0)
            factor_MN = factor_MN * scale_N[None, :]
            part_MN = tl.dot(w_MD, x_DN)
        else:
            part_MN = tl.dot(float8_as(w_MD, DTYPE), x_DN)
        acc_MN += part_MN * factor_MN
    else:
        tl.static_assert(not INPUTS_8)
        GROUPS: tl.constexpr = 1 if LARGE else STEP // GROUP
        g = tl.arange(0, GROUPS)
        inside_MG = inside_M[:, None] & (start + g * GROUP < COLUMNS)[None, :]
        at_MG = at_M[:, None] + g[None, :]
        scale_MD = spread(scales(s_ptr + at_MG, inside_MG, KIND).to(DTYPE), STEP // GROUPS)
        acc_MN = tl.dot(float8_as(w_MD, DTYPE) * scale_MD, x_DN, acc_MN)
    return acc_MN


def as_stored(w: Tensor, weight: Weight) -> Tensor:
    """A weight of codes as the kernels load it: words, or bytes."""
    return w.view(torch.int32) if weight[5] == 4 else w
