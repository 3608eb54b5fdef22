"""Products with quantised weights: codes are loaded as they are stored, decoded in registers and
multiplied, a step of columns at a time.

Codes of four bits come as words of eight. Two shifts and two masks make a pair of halves of the
nibbles j and j + 4 of a word, so a step is four products, of the pairs 0 to 3 of all words, and
tokens are read in that order of columns: value 8 q + j + 4 i is column 2 q + i of product j. So
weights stay as checkpoints hold them. `arrange` stores tokens product by product, so that they are
read 16 bytes at a time; h is stored so where it is made.

Codes of eight bits come as they are. Inputs of 8 bits are quantised by `quantise` before, or on the
way to a product of a few tokens, in the groups of columns that the weight has.

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
from triton import knobs

from moe_ops.kernels.triton import Weight
from moe_ops.kernels.triton.launch import pdl_options
from moe_ops.kernels.triton.replay import launch

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # by Python, which has no PTX
MOST_IN_SUM = tl.constexpr(64)  # tokens whose sums are scaled
LARGEST_CODE = tl.constexpr(448.0)  # of float8_e4m3fn
SMALLEST_SCALE = tl.constexpr(1e-12)


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
def scales(ptr, mask, KIND: tl.constexpr):
    """Stored scales as float32; of a group that is not there 0."""
    if KIND == "e8m0":
        code = tl.load(ptr, mask=mask, other=0).to(tl.int32)
        # As bits: 2**-127 is subnormal, and what would be infinity is NaN.
        special = tl.where((code == 0) | (code == 255), 1 << 22, 0)
        scale = tl.where(mask, ((code << 23) | special).to(tl.float32, bitcast=True), 0.0)
    else:
        scale = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
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
def column_of(i, COLUMNS: tl.constexpr, W: tl.constexpr):
    """Where column i of the tokens of a product is stored, once arranged."""
    if W is not None and W[5] == 4:
        i = i % 4 * (COLUMNS // 4) + i // 8 * 2 + i % 8 // 4
    return i


@triton.jit
def spread(values_MG, EACH: tl.constexpr):
    """Each column EACH times."""
    M: tl.constexpr = values_MG.shape[0]
    G: tl.constexpr = values_MG.shape[1]
    return tl.reshape(tl.broadcast_to(values_MG[:, :, None], (M, G, EACH)), (M, G * EACH))


@triton.jit
def add_product(
    acc_MN, w_M1, s_ptr, z_ptr, group_M, inside_M, x_1N, t_ptr, token_N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, ARRANGED: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """acc_MN and the products of columns start to start + STEP of rows of weights, at w_M1, with
    tokens, at x_1N, of which those quantised have scales [tokens, groups] at t_ptr; `rescaled`
    follows the last step. POLICY is that of the cache for weights."""
    BITS: tl.constexpr = W[5]
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
    """The sum of all steps. Codes of float4 in bfloat16 are 2**-126 of their values, and scales
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
    scale is a product with its inverse."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), AXIS)
    scale = tl.maximum(largest / LARGEST_CODE, SMALLEST_SCALE)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    codes = x * tl.expand_dims(1.0 / scale, AXIS)
    codes = tl.maximum(codes, -LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.minimum(codes, LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:  # where a float8 cannot be NaN, either
        codes = rounded_to_float8(codes)
        scale = tl.where(tl.sum(x * 0, AXIS) == 0, scale, float("nan"))
    return codes.to(tl.float8e4nv), scale


@triton.jit
def arrange_kernel(
    x_ptr, out_ptr, stride_x, D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, PDL: tl.constexpr
):
    """One program: BD columns of a token, where `column_of` says."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BD + tl.arange(0, BD)
    # Reads scatter within a token, which stays in the L1 cache; writes do not.
    j, rest = at // (D // 4), at % (D // 4)
    column = rest // 2 * 8 + j + rest % 2 * 4
    tl.store(out_ptr + t * D + at, tl.load(x_ptr + t * stride_x + column, mask=at < D), mask=at < D)


def arrange(x_TD: Tensor, weight: Weight) -> Tensor:
    """Tokens whose columns are in the order in which weights in words are multiplied."""
    T, D = x_TD.shape
    out_TD = x_TD.new_empty(T, D)
    BD = min(1024, triton.next_power_of_2(D))
    pdl, options = pdl_options(x_TD)
    launch(
        arrange_kernel, (T, triton.cdiv(D, BD)), x_TD, out_TD, x_TD.stride(0),
        D=D, BD=BD, W=weight, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
    return out_TD


@triton.jit
def quantise_kernel(
    x_ptr, out_ptr, scale_ptr, stride_x,
    D: tl.constexpr, BG: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BG groups of columns of a token."""
    GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * BG + tl.arange(0, BG)
    at_GC = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x_GC = tl.load(x_ptr + t * stride_x + at_GC, mask=at_GC < D, other=0.0)
    codes_GC, scale_G = to_float8(x_GC, 1)
    tl.store(out_ptr + t * D + at_GC, codes_GC, mask=at_GC < D)
    tl.store(scale_ptr + t * GROUPS + g, scale_G, mask=g < GROUPS)


def quantise(x_TD: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """Codes of float8, and float32 scales [T, groups], of tokens for weights with inputs of 8
    bits."""
    (T, D), group = x_TD.shape, weight[2]
    groups = triton.cdiv(D, group)
    codes_TD = x_TD.new_empty(T, D, dtype=torch.float8_e4m3fn)
    scale_TG = x_TD.new_empty(T, groups, dtype=torch.float32)
    BG = min(8, triton.next_power_of_2(groups))
    pdl, options = pdl_options(x_TD)
    launch(
        quantise_kernel, (T, triton.cdiv(groups, BG)), x_TD, codes_TD, scale_TG, x_TD.stride(0),
        D=D, BG=BG, GROUP=group, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip
    return codes_TD, scale_TG


def tokens_for(x_TD: Tensor, codes: Codes | None) -> tuple[Tensor, Tensor | None]:
    """Tokens, and scales if they have any, as the product with the first weight reads them."""
    if codes is None:
        return x_TD, None
    if codes.in_words:
        return arrange(x_TD, codes.weight), None
    return quantise(x_TD, codes.weight) if codes.quantises else (x_TD, None)


def as_stored(w: Tensor, weight: Weight) -> Tensor:
    """A weight of codes as the kernels load it: words, or bytes."""
    return w.view(torch.int32) if weight[5] == 4 else w
