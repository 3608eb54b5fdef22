"""Products with quantised weights: codes are loaded as they are stored, decoded in registers and
multiplied, a step of columns at a time.

Codes of four bits come as words of eight. A shift and a mask make a pair of halves of the nibbles j
and j + 4 of a word; of float4 in bfloat16 a product and two masks do. Which column of the weights
meets which of a matrix unit's is free, so tokens are stored in the order of `column_of`
(`tokens.py`), in which a thread multiplies words that it loads side by side. So weights stay as
checkpoints hold them.

Codes of six bits come as three words for sixteen of them, of which i and i + 8 make a pair. A
thread has the six words of 32 columns side by side, and tokens are arranged as they are for four.

Codes of eight bits come as they are, and may meet inputs of 8 bits: in groups of as many columns,
which `tokens.py` makes, or with a scale a row or tensor (`row_scales.py`).

Scales of groups of at least a step are multiplied into the float32 sum of the step where that is
small, others into the decoded values: a second sum of many tokens has no room in registers. An
infinite scale makes NaN, as infinity times a code of zero does. Scales of float8 come as bytes,
and the global scale of an expert above these is multiplied into the sum of all columns.

W is the format of a weight, a `Weight` of `moe_ops.kernels.triton`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Inputs, Weight, one_a_step
from moe_ops.kernels.triton.experts.float8 import INTERPRETED

MOST_IN_SUM = tl.constexpr(32)  # tokens whose sums are scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """What makes the values of a layer's weights of their codes: scales, zero points, and W; how
    inputs are emulated, if they are, and their static scales."""

    scale13_EFG: Tensor
    scale2_EDG: Tensor
    zero13_EFG: Tensor | None
    zero2_EDG: Tensor | None
    weight: Weight
    global13_E: Tensor | None = None
    global2_E: Tensor | None = None
    inputs: Inputs | None = None  # that are emulated
    scaled: str = ""  # of those of 8 bits, what has a scale: "group", "row" or "tensor"
    x_scale: Tensor | None = None  # static ones
    h_scale: Tensor | None = None
    x_scale_TG: Tensor | None = None  # of tokens that are codes already
    result: torch.dtype | None = None  # the dtype of results then

    @property
    def in_words(self) -> bool:
        return self.bits < 8

    @property
    def quantises(self) -> bool:
        """Whether inputs have 8 bits."""
        return self.weight.inputs_8

    @property
    def by_row(self) -> bool:
        """Whether inputs have 8 bits, and scales that leave the sum: see `row_scales.py`."""
        return self.quantises and self.scaled != "group"

    @property
    def dtype(self) -> torch.dtype:
        """Of codes of 8 bits, of weights and of inputs."""
        return torch.int8 if self.weight.element == "int8" else torch.float8_e4m3fn

    @property
    def bits(self) -> int:
        return self.weight.bits

    def weigh(self, weights_TK: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(weights that h is multiplied by, weights of the last sum): one is None. It is the former
        where h is rounded to codes, which would be others of the product."""
        return (weights_TK, None) if self.inputs is None else (None, weights_TK)

    @property
    def one_a_step(self) -> bool:
        return one_a_step(self.weight)


def floats_of(x_TD: Tensor, codes: Codes | None) -> torch.dtype:
    """The dtype of results, in which h is rounded: that of tokens, unless they are codes."""
    given = codes is not None and codes.x_scale_TG is not None
    return codes.result if given else x_TD.dtype  # type: ignore[union-attr,return-value]


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
def signs_and_rest(v):
    """The signs of two halves, and the next three bits of each moved three places to the right: in
    three instructions, where the compiler would merge this shift with that before, and need more.
    """
    if INTERPRETED:
        return (v & -0x7FFF8000) | ((v >> 3) & 0x0E000E00)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 signs, rest;
        and.b32 signs, $1, 0x80008000;
        shr.u32 rest, $1, 3;
        lop3.b32 $0, rest, 0x0E000E00, signs, 0xEA;
        }""", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def float4_bits(w, LATER: tl.constexpr):
    """Nibbles 0 and 4 of words, or 1 and 5, as bits of two bfloat16: the sign at bit 15, the others
    at 8 to 6. A product with two powers of two copies a nibble to both places, so that only masks
    are left to the unit of masks and shifts, which takes twice as long for an instruction."""
    CODES: tl.constexpr = 0x00F000F0 if LATER else 0x000F000F
    COPIES: tl.constexpr = 0x0104 if LATER else 0x1040
    if INTERPRETED:
        return ((w & CODES) * COPIES) & -0x7E3F7E40
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 codes;
        and.b32 codes, $1, {CODES};
        mul.lo.u32 codes, codes, {COPIES};
        and.b32 $0, codes, 0x81C081C0;
        }}""", "=r,r", [w], dtype=tl.int32, is_pure=True, pack=1,
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


@triton.constexpr_function
def by_row(W):
    """As that of `Codes`: inputs in groups have weights in groups of as many columns."""
    return W is not None and W.inputs_8 and W.across == -1


@triton.jit
def add_product(
    acc_MN, w_M1, s_ptr, z_ptr, e, row_M, inside_M, x_1N, t_ptr, token_N, inside_N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """acc_MN and the products of rows of the weights of experts, at w_M1, with tokens, at x_1N, of
    which those quantised have scales [tokens, groups] at t_ptr; `rescaled` follows the last one.
    POLICY is that of the cache for weights."""
    group_M = group_row(e, row_M, ROWS, COLUMNS, W)
    if by_row(W):
        sum_MN = sum_of_bytes(
            w_M1, inside_M, x_1N, inside_N, acc_MN.shape[0], acc_MN.shape[1], COLUMNS, STEP, W,
            POLICY,
        )  # fmt: skip
        s_M = tl.load(s_ptr + group_M, mask=inside_M, other=0)
        t_N = tl.load(t_ptr + token_N, mask=inside_N, other=0.0)
        KIND: tl.constexpr = W.kind
        factor_MN = finite(scale_of(s_M, KIND))[:, None] * t_N[None, :]
        acc_MN += sum_MN.to(tl.float32) * factor_MN
    else:
        acc_MN = add_steps(
            acc_MN, w_M1, s_ptr, z_ptr, group_M, inside_M, x_1N, t_ptr, token_N, inside_N,
            COLUMNS, STEP, W, POLICY,
        )  # fmt: skip
    return acc_MN


@triton.jit
def add_steps(
    acc_MN, w_M1, s_ptr, z_ptr, group_M, inside_M, x_1N, t_ptr, token_N, inside_N,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """The same, where scales are those of a step or less."""
    BITS: tl.constexpr = W.bits
    s_MG, z_MG, t_N = factors(
        s_ptr, z_ptr, t_ptr, group_M, inside_M, token_N, inside_N, 0, COLUMNS, STEP, W
    )
    for start in range(0, COLUMNS, STEP):
        # Those of the next step are on their way during this one.
        next_s_MG, next_z_MG, next_t_N = factors(
            s_ptr, z_ptr, t_ptr, group_M, inside_M, token_N, inside_N, start + STEP,
            COLUMNS, STEP, W,
        )  # fmt: skip
        if BITS == 4:
            acc_MN = add_words(
                acc_MN, w_M1, s_MG, z_MG, inside_M, x_1N, inside_N, start, COLUMNS, STEP, W, POLICY
            )
        elif BITS == 6:
            acc_MN = add_sixes(
                acc_MN, w_M1, s_MG, inside_M, x_1N, inside_N, start, COLUMNS, STEP, W, POLICY
            )
        else:
            acc_MN = add_bytes(
                acc_MN, w_M1, s_MG, z_MG, inside_M, x_1N, t_N, inside_N, start,
                COLUMNS, STEP, W, POLICY,
            )  # fmt: skip
        s_MG, z_MG, t_N = next_s_MG, next_z_MG, next_t_N
    return acc_MN


@triton.jit
def factors(
    s_ptr, z_ptr, t_ptr, group_M, inside_M, token_N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """(scales, zero points, scales of tokens) of a step, as they are stored: [M, groups of the
    step] and [tokens]. Instead of those that there are none of: anything."""
    GROUP: tl.constexpr = W.across
    LARGE: tl.constexpr = GROUP == -1 or GROUP >= STEP
    GROUPS: tl.constexpr = 1 if LARGE else STEP // GROUP
    g = tl.arange(0, GROUPS)
    if GROUP == -1:
        first = 0
        inside_MG = inside_M[:, None]
    else:
        first = start // GROUP
        inside_MG = inside_M[:, None] & (start + g * GROUP < COLUMNS)[None, :]
    at_MG = group_M[:, None] + first + g[None, :]
    s_MG = tl.load(s_ptr + at_MG, mask=inside_MG, other=0)
    z_MG, t_N = s_MG, token_N
    if z_ptr is not None:
        z_MG = tl.load(z_ptr + at_MG, mask=inside_MG, other=0)
    if t_ptr is not None:
        # By offsets of 32 bits, as addresses would take twice as many registers.
        at_N = token_N * ((COLUMNS + GROUP - 1) // GROUP)
        t_N = tl.load(t_ptr + first + at_N, mask=inside_N & (start < COLUMNS), other=0.0)
    return s_MG, z_MG, t_N


@triton.jit
def rescaled(acc_MN, W: tl.constexpr, DTYPE: tl.constexpr):
    """The sum of all products. Codes of float4 in bfloat16 are 2**-126 of their values, and scales
    were multiplied by 2**64, so that those from 2**-64 to 2**63 stay exact. So are those of float6,
    or 2**-124."""
    ELEMENT: tl.constexpr = W.element
    if DTYPE == tl.bfloat16:
        if ELEMENT == "float4_e2m1" or ELEMENT == "float6_e2m3":
            acc_MN = acc_MN * 4.611686018427387904e18
        elif ELEMENT == "float6_e3m2":
            acc_MN = acc_MN * 1.152921504606846976e18
    return acc_MN


@triton.jit
def under_global(acc_MN, g_ptr, e):
    """The sum of products with an expert's weight, times the global scale of the expert, if any."""
    if g_ptr is not None:
        acc_MN = acc_MN * tl.load(g_ptr + e)
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
def under_globals(acc_MN, g_ptr, e, row_M, inside_M, ROWS: tl.constexpr, SHARED: tl.constexpr):
    """The sum of the first product with an expert's weight, times the global scales of its rows, if
    any: the expert's one, or where SHARED says so those at `factor_at`."""
    if g_ptr is not None:
        if SHARED == "":
            acc_MN = under_global(acc_MN, g_ptr, e)
        else:
            at_M = factor_at(e, row_M, ROWS, SHARED)
            acc_MN = acc_MN * tl.load(g_ptr + at_M, mask=inside_M, other=0.0)[:, None]
    return acc_MN


@triton.jit
def less_zero(zero, STORED: tl.constexpr, DTYPE: tl.constexpr):
    """-128 or -1024, see `decoded`, and minus zero points, which for int4 are 8; twice."""
    NEGATIVE: tl.constexpr = -0x3CFF3D00 if DTYPE == tl.bfloat16 else -0x1BFF1C00
    if STORED:
        zero = zero.to(tl.int32)
        pair = (zero | (zero << 16)) | NEGATIVE
    else:
        pair = NEGATIVE | 0x00080008
    return pair


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


@triton.jit
def decoded(
    w_MW, j: tl.constexpr, less, scale_pair,
    FLOAT: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The values of nibbles j and j + 4 of each word, as the halves of an int32."""
    NEGATIVE_ZERO: tl.constexpr = -0x7FFF8000  # of both halves; as a mask, their signs
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    if FLOAT:
        # Sign, exponent and mantissa to their places: the value times 2**-126, which the scale
        # makes up for, or times 2**-14, which a scale in float16 has no room for.
        if BF16:
            v = float4_bits(w_MW >> 8 if j > 1 else w_MW, j % 2 == 1)
        else:
            v = w_MW << (12 - 4 * j) if j < 3 else w_MW
            v = pair_fma(signs_and_rest(v), 0x74007400, NEGATIVE_ZERO, DTYPE)
    else:
        # 128 + code of bfloat16, or 1024 + code of float16, is this and the bits of the code.
        MAGIC: tl.constexpr = 0x43004300 if BF16 else 0x64006400
        v = and_or(w_MW >> (4 * j) if j > 0 else w_MW, 0x000F000F, MAGIC)
        v = pair_fma(v, 0x3F803F80 if BF16 else 0x3C003C00, less, DTYPE)
    if SCALED:
        v = pair_fma(v, scale_pair, NEGATIVE_ZERO, DTYPE)
    return v


@triton.jit
def pairs_of(w, less, scale_pair, FLOAT: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """[..., 2, 2] of words [...]: `decoded` for j from 0 to 3."""
    p0 = decoded(w, 0, less, scale_pair, FLOAT, SCALED, DTYPE)
    p1 = decoded(w, 1, less, scale_pair, FLOAT, SCALED, DTYPE)
    p2 = decoded(w, 2, less, scale_pair, FLOAT, SCALED, DTYPE)
    p3 = decoded(w, 3, less, scale_pair, FLOAT, SCALED, DTYPE)
    return tl.join(tl.join(p0, p2), tl.join(p1, p3))


@triton.jit
def values_of(
    w_MW, less, scale_pair, FLOAT: tl.constexpr, SCALED: tl.constexpr, DTYPE: tl.constexpr
):
    """[M, 8 W] of DTYPE: the values of words in the order of `column_of`, in which what a thread of
    a matrix unit multiplies comes of words that it loads side by side."""
    M: tl.constexpr = w_MW.shape[0]
    BLOCKS: tl.constexpr = w_MW.shape[1] // 16
    pairs = pairs_of(w_MW, less, scale_pair, FLOAT, SCALED, DTYPE)
    pairs = tl.permute(tl.reshape(pairs, (M, BLOCKS, 4, 4, 4)), (0, 1, 3, 4, 2))
    pairs = tl.reshape(pairs, (M, BLOCKS * 64))
    halves = tl.join(half_of(pairs, False, DTYPE), half_of(pairs, True, DTYPE))
    return tl.reshape(halves, (M, BLOCKS * 128))


@triton.jit
def add_words(
    acc_MN, w_M1, s_MG, z_MG, inside_M, x_1N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_1N.dtype.element_ty
    ELEMENT: tl.constexpr = W.element
    GROUP: tl.constexpr = W.across
    KIND: tl.constexpr = W.kind
    FLOAT: tl.constexpr = ELEMENT == "float4_e2m1"
    LARGE: tl.constexpr = GROUP == -1 or GROUP >= STEP
    IN_SUM: tl.constexpr = LARGE and acc_MN.shape[1] <= MOST_IN_SUM
    SCALED: tl.constexpr = not IN_SUM or (FLOAT and DTYPE == tl.bfloat16)
    tl.static_assert(STEP == 128)  # among so many columns tokens are arranged
    WORDS: tl.constexpr = STEP // 8
    first = start // 8
    inside_W = first + tl.arange(0, WORDS) < COLUMNS // 8
    w_MW = tl.load(
        w_M1 + (first + tl.arange(0, WORDS))[None, :],
        mask=inside_M[:, None] & inside_W[None, :], other=0, eviction_policy=POLICY,
    )  # fmt: skip
    less = less_zero(z_MG, ELEMENT == "uint4", DTYPE)
    if IN_SUM:
        scale_pair = 0x5F805F80  # 2**64 of bfloat16
    else:
        GROUPS: tl.constexpr = s_MG.shape[1]
        scale_pair = spread(scale_pairs(s_MG, KIND, FLOAT, DTYPE), WORDS // GROUPS)
        if ELEMENT == "uint4":
            less = spread(less, WORDS // GROUPS)
    values_MD = values_of(w_MW, less, scale_pair, FLOAT, SCALED, DTYPE)
    # Columns past the last one are stored as zeros.
    x_DN = tl.load(x_1N + (start + tl.arange(0, STEP))[:, None], mask=inside_N[None, :], other=0.0)
    if IN_SUM:
        acc_MN += tl.dot(values_MD, x_DN) * finite(scale_of(s_MG, KIND))
    else:
        acc_MN = tl.dot(values_MD, x_DN, acc_MN)
    return acc_MN


@triton.jit
def add_sixes(
    acc_MN, w_M1, s_MG, inside_M, x_1N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_1N.dtype.element_ty
    ELEMENT: tl.constexpr = W.element
    KIND: tl.constexpr = W.kind
    RUNS: tl.constexpr = STEP // 32
    M: tl.constexpr = acc_MN.shape[0]
    tl.static_assert(STEP == 128)  # among so many columns tokens are arranged
    a, b = two_words(w_M1, inside_M, start, 0, COLUMNS, RUNS, POLICY)
    c, d = two_words(w_M1, inside_M, start, 1, COLUMNS, RUNS, POLICY)
    e, f = two_words(w_M1, inside_M, start, 2, COLUMNS, RUNS, POLICY)
    scale = scale_pairs(s_MG, KIND, True, DTYPE)
    GROUPS: tl.constexpr = s_MG.shape[1]
    if GROUPS == 2 * RUNS:
        left_scale, right_scale = tl.split(tl.reshape(scale, (M, RUNS, 2)))
    else:
        left_scale = spread(scale, RUNS // GROUPS)
        right_scale = left_scale
    left = joined_8(sixes_of(a, b, c, ELEMENT, DTYPE), left_scale, DTYPE)
    right = joined_8(sixes_of(d, e, f, ELEMENT, DTYPE), right_scale, DTYPE)
    pairs = tl.permute(tl.reshape(tl.join(left, right), (M, RUNS, 8, 2)), (0, 3, 2, 1))
    pairs = tl.reshape(pairs, (M, STEP // 2))
    halves = tl.join(half_of(pairs, False, DTYPE), half_of(pairs, True, DTYPE))
    values_MD = tl.reshape(halves, (M, STEP))
    # Columns past the last one are stored as zeros.
    x_DN = tl.load(x_1N + (start + tl.arange(0, STEP))[:, None], mask=inside_N[None, :], other=0.0)
    return tl.dot(values_MD, x_DN, acc_MN)


@triton.jit
def two_words(
    w_M1, inside_M, start, PIECE: tl.constexpr, COLUMNS: tl.constexpr, RUNS: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """[M, RUNS] each: of the six words of every 32 columns two that lie side by side."""
    M: tl.constexpr = w_M1.shape[0]
    i = tl.arange(0, 2 * RUNS)
    word = start // 32 * 6 + (i // 2 * 6 + i % 2 + 2 * PIECE)
    w_MW = tl.load(
        w_M1 + word[None, :], mask=inside_M[:, None] & (word < COLUMNS // 16 * 3)[None, :],
        other=0, eviction_policy=POLICY,
    )  # fmt: skip
    return tl.split(tl.reshape(w_MW, (M, RUNS, 2)))


@triton.jit
def middle(a, b):
    """Of each half of words the upper byte of a, and above it the lower one of b."""
    if INTERPRETED:
        return ((a >> 8) & 0x00FF00FF) | ((b << 8) & -0x00FF0100)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6341;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def sixes_of(first, second, third, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """The codes i and i + 8 of the sixteen of three words as the halves of an int32, for i from 0
    to 7: eight of six bits fill three halves, so that both are at the same bits of theirs."""
    a = (first & 0xFFFF) | (second & -0x10000)
    b = ((first >> 16) & 0xFFFF) | (third << 16)
    c = (second & 0xFFFF) | (third & -0x10000)
    ab, bc = middle(a, b), middle(b, c)
    return (
        pair_at(a, 0, ELEMENT, DTYPE), pair_at(a, 6, ELEMENT, DTYPE),
        pair_at(ab, 4, ELEMENT, DTYPE), pair_at(b, 2, ELEMENT, DTYPE),
        pair_at(b, 8, ELEMENT, DTYPE), pair_at(bc, 6, ELEMENT, DTYPE),
        pair_at(c, 4, ELEMENT, DTYPE), pair_at(c, 10, ELEMENT, DTYPE),
    )  # fmt: skip


@triton.jit
def pair_at(words, BIT: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """The codes that begin at a bit of both halves of words: sign, exponent and mantissa at their
    places. So a value is times 2**-124 or 2**-126 in bfloat16, which `rescaled` makes up for; in
    float16, which has no room for that, it is the value."""
    tl.static_assert(ELEMENT == "float6_e3m2" or ELEMENT == "float6_e2m3")
    MANTISSA: tl.constexpr = 2 if ELEMENT == "float6_e3m2" else 3
    PLACE: tl.constexpr = (7 if DTYPE == tl.bfloat16 else 10) - MANTISSA
    signs = (words << (10 - BIT)) & -0x7FFF8000
    moved = words << (PLACE - BIT) if PLACE >= BIT else words >> (BIT - PLACE)
    pair = and_or(moved, 0x001F001F << PLACE, signs)
    if DTYPE == tl.float16:
        pair = pair_fma(pair, 0x6C006C00 if MANTISSA == 2 else 0x74007400, -0x7FFF8000, DTYPE)
    return pair


@triton.jit
def joined_8(pairs, scale_pair, DTYPE: tl.constexpr):
    """[..., 2, 2, 2]: those of `sixes_of`, times scales [...]."""
    p0 = pair_fma(pairs[0], scale_pair, -0x7FFF8000, DTYPE)  # the halves of which are -0
    p1 = pair_fma(pairs[1], scale_pair, -0x7FFF8000, DTYPE)
    p2 = pair_fma(pairs[2], scale_pair, -0x7FFF8000, DTYPE)
    p3 = pair_fma(pairs[3], scale_pair, -0x7FFF8000, DTYPE)
    p4 = pair_fma(pairs[4], scale_pair, -0x7FFF8000, DTYPE)
    p5 = pair_fma(pairs[5], scale_pair, -0x7FFF8000, DTYPE)
    p6 = pair_fma(pairs[6], scale_pair, -0x7FFF8000, DTYPE)
    p7 = pair_fma(pairs[7], scale_pair, -0x7FFF8000, DTYPE)
    return in_order(p0, p1, p2, p3, p4, p5, p6, p7)


@triton.jit
def in_order(p0, p1, p2, p3, p4, p5, p6, p7):
    """[..., 2, 2, 2] of eight tensors [...]."""
    evens = tl.join(tl.join(p0, p4), tl.join(p2, p6))
    odds = tl.join(tl.join(p1, p5), tl.join(p3, p7))
    return tl.join(evens, odds)


@triton.jit
def bytes_as(w_MD, z_MG, ELEMENT: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of eight bits as halves, which hold them, and integers less a zero point, exactly; by
    way of float32, as the direct conversion to bfloat16 takes a slow unit for every value."""
    value_MD = w_MD.to(tl.float32)
    if ELEMENT == "uint8":
        EACH: tl.constexpr = w_MD.shape[1] // z_MG.shape[1]
        value_MD -= spread(z_MG.to(tl.float32), EACH)
    return value_MD.to(DTYPE)


@triton.jit
def add_bytes(
    acc_MN, w_M1, s_MG, z_MG, inside_M, x_1N, t_N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_1N.dtype.element_ty
    ELEMENT: tl.constexpr = W.element
    GROUP: tl.constexpr = W.across
    KIND: tl.constexpr = W.kind
    INPUTS_8: tl.constexpr = W.inputs_8
    LARGE: tl.constexpr = GROUP == -1 or GROUP >= STEP
    IN_SUM: tl.constexpr = LARGE and (INPUTS_8 or acc_MN.shape[1] <= MOST_IN_SUM)
    d = start + tl.arange(0, STEP)
    inside_D = d < COLUMNS
    w_MD = tl.load(
        w_M1 + d[None, :], mask=inside_M[:, None] & inside_D[None, :], other=0.0,
        eviction_policy=POLICY,
    )  # fmt: skip
    x_DN = tl.load(x_1N + d[:, None], mask=inside_D[:, None] & inside_N[None, :], other=0.0)
    if IN_SUM:
        factor_MN = finite(scale_of(s_MG, KIND))
        if INPUTS_8:
            factor_MN = factor_MN * t_N[None, :]
            part_MN = tl.dot(w_MD, x_DN)
        else:
            part_MN = tl.dot(bytes_as(w_MD, z_MG, ELEMENT, DTYPE), x_DN)
        acc_MN += part_MN * factor_MN
    elif ELEMENT == "float8_e5m2":
        # Of float32, as its scales may be smaller than any float16.
        scale_MD = spread(scale_of(s_MG, KIND), STEP // s_MG.shape[1])
        acc_MN = tl.dot((w_MD.to(tl.float32) * scale_MD).to(DTYPE), x_DN, acc_MN)
    else:
        tl.static_assert(not INPUTS_8)
        scale_MD = spread(scale_of(s_MG, KIND).to(DTYPE), STEP // s_MG.shape[1])
        acc_MN = tl.dot(bytes_as(w_MD, z_MG, ELEMENT, DTYPE) * scale_MD, x_DN, acc_MN)
    return acc_MN


@triton.jit
def sum_of_bytes(
    w_M1, inside_M, x_1N, inside_N, M: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """[M, N]: products of codes of 8 bits with those of tokens, before all scales: int32 of int8.
    Of float8 the unit of Hopper keeps 14 bits of a sum, so that each step makes one of its own."""
    INT8: tl.constexpr = W.element == "int8"
    sum_MN = tl.zeros((M, N), tl.int32 if INT8 else tl.float32)
    for start in range(0, COLUMNS, STEP):
        d = start + tl.arange(0, STEP)
        inside_D = d < COLUMNS
        w_MD = tl.load(
            w_M1 + d[None, :], mask=inside_M[:, None] & inside_D[None, :], other=0.0,
            eviction_policy=POLICY,
        )  # fmt: skip
        x_DN = tl.load(x_1N + d[:, None], mask=inside_D[:, None] & inside_N[None, :], other=0.0)
        if INT8:
            sum_MN = tl.dot(w_MD, x_DN, sum_MN, out_dtype=tl.int32)
        else:
            sum_MN = tl.dot(w_MD, x_DN, sum_MN, max_num_imprecise_acc=STEP)
    return sum_MN


def as_stored(w: Tensor, weight: Weight) -> Tensor:
    """A weight of codes as the kernels load it: words, or bytes."""
    return w.view(torch.int32) if weight.bits < 8 else w


def scales_as_stored(scale: Tensor, weight: Weight) -> Tensor:
    """Scales as the kernels load them: those of float8 as bytes, which every GPU has."""
    return scale.view(torch.uint8) if weight.kind == "float8_e4m3fn" else scale
