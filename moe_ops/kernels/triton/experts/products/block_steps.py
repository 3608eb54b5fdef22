"""Products of blocks of weights with few tokens, a step of columns at a time. Codes are loaded as
they are stored, and decoded in registers. Decoders are those of `formats/`.

Codes of eight bits may meet inputs of 8 bits: in groups of as many columns, which `group_scales.py`
makes, or with a scale a row or tensor (`row_scales.py`).

W is the format of a weight, a `Weight` of `moe_ops.kernels.triton`, or None for floats.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.formats.codes import are_blocks, brings_its_decoder, by_row
from moe_ops.kernels.triton.experts.formats.eight_bits import bytes_as
from moe_ops.kernels.triton.experts.formats.four_bits import less_zero, values_of
from moe_ops.kernels.triton.experts.formats.halves import half_of
from moe_ops.kernels.triton.experts.formats.k_quants import halves_of_blocks
from moe_ops.kernels.triton.experts.formats.registered import values_of_words, words_of
from moe_ops.kernels.triton.experts.formats.scales import (
    finite,
    group_row,
    scale_of,
    scale_pairs,
    spread,
)
from moe_ops.kernels.triton.experts.formats.six_bits import joined_8, sixes_of

MOST_IN_SUM = tl.constexpr(32)  # tokens whose sums are scaled


@triton.jit
def add_product(
    acc_MN, w_M1, stride_w, w_scale_ptr, w_zero_ptr, e, row_M, inside_M, x_1N, x_scale_ptr, token_N,
    inside_N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr,
    POLICY: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """acc_MN and the products of rows of the weights of experts, at w_M1, with tokens, at x_1N, of
    which those quantised have scales [tokens, groups] at x_scale_ptr; `rescaled` follows the last
    one. Columns of weights are contiguous, of floats stride_w apart. POLICY is that of the cache
    for weights, CHAIN as in `sum_of_bytes`."""
    if W is None:
        d = tl.arange(0, STEP)
        for start in range(0, COLUMNS, STEP):
            inside_D = start + d < COLUMNS
            at_MD = w_M1 + ((start + d).to(tl.int64) * stride_w)[None, :]
            inside_MD = inside_M[:, None] & inside_D[None, :]
            w_MD = tl.load(at_MD, mask=inside_MD, other=0.0, eviction_policy=POLICY)
            at_DN, inside_DN = x_1N + (start + d)[:, None], inside_D[:, None] & inside_N[None, :]
            x_DN = tl.load(at_DN, mask=inside_DN, other=0.0)
            acc_MN = tl.dot(w_MD, x_DN, acc_MN)
    elif by_row(W):
        group_M = group_row(e, row_M, ROWS, COLUMNS, W)
        sum_MN = sum_of_bytes(
            w_M1, inside_M, x_1N, inside_N, acc_MN.shape[0], acc_MN.shape[1], COLUMNS, STEP, W,
            POLICY, CHAIN,
        )  # fmt: skip
        w_scale_M = tl.load(w_scale_ptr + group_M, mask=inside_M, other=0)
        x_scale_N = tl.load(x_scale_ptr + token_N, mask=inside_N, other=0.0)
        KIND: tl.constexpr = W.kind
        factor_MN = finite(scale_of(w_scale_M, KIND))[:, None] * x_scale_N[None, :]
        acc_MN += sum_MN.to(tl.float32) * factor_MN
    else:
        group_M = group_row(e, row_M, ROWS, COLUMNS, W)
        acc_MN = add_steps(
            acc_MN, w_M1, w_scale_ptr, w_zero_ptr, group_M, inside_M, x_1N, x_scale_ptr, token_N,
            inside_N, COLUMNS, STEP, W, POLICY,
        )  # fmt: skip
    return acc_MN


@triton.jit
def add_steps(
    acc_MN, w_M1, w_scale_ptr, w_zero_ptr, group_M, inside_M, x_1N, x_scale_ptr, token_N, inside_N,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """acc_MN and the products, as `add_product` gives them, where a scale serves a step of columns
    or less."""
    BITS: tl.constexpr = W.bits
    w_scale_MG, w_zero_MG, x_scale_N = factors(
        w_scale_ptr, w_zero_ptr, x_scale_ptr, group_M, inside_M, token_N, inside_N, 0, COLUMNS,
        STEP, W,
    )  # fmt: skip
    for start in range(0, COLUMNS, STEP):
        # Those of the next step are on their way during this one.
        next_w_scale_MG, next_w_zero_MG, next_x_scale_N = factors(
            w_scale_ptr, w_zero_ptr, x_scale_ptr, group_M, inside_M, token_N, inside_N,
            start + STEP, COLUMNS, STEP, W,
        )  # fmt: skip
        if are_blocks(W):
            acc_MN = add_blocks(
                acc_MN, w_M1, w_scale_MG, inside_M, x_1N, inside_N, start, STEP, W, POLICY
            )
        elif brings_its_decoder(W):
            acc_MN = add_registered(
                acc_MN, w_M1, w_scale_MG, w_zero_MG, w_zero_ptr is not None, inside_M, x_1N,
                inside_N, start, COLUMNS, STEP, W, POLICY,
            )  # fmt: skip
        elif BITS == 4:
            acc_MN = add_words(
                acc_MN, w_M1, w_scale_MG, w_zero_MG, inside_M, x_1N, inside_N, start, COLUMNS, STEP,
                W, POLICY,
            )  # fmt: skip
        elif BITS == 6:
            acc_MN = add_sixes(
                acc_MN, w_M1, w_scale_MG, inside_M, x_1N, inside_N, start, COLUMNS, STEP, W, POLICY
            )
        else:
            acc_MN = add_bytes(
                acc_MN, w_M1, w_scale_MG, w_zero_MG, inside_M, x_1N, x_scale_N, inside_N, start,
                COLUMNS, STEP, W, POLICY,
            )  # fmt: skip
        w_scale_MG, w_zero_MG, x_scale_N = next_w_scale_MG, next_w_zero_MG, next_x_scale_N
    return acc_MN


@triton.jit
def factors(
    w_scale_ptr, w_zero_ptr, x_scale_ptr, group_M, inside_M, token_N, inside_N, start,
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
    w_scale_MG = tl.load(w_scale_ptr + at_MG, mask=inside_MG, other=0)
    w_zero_MG, x_scale_N = w_scale_MG, token_N
    if w_zero_ptr is not None:
        w_zero_MG = tl.load(w_zero_ptr + at_MG, mask=inside_MG, other=0)
    if x_scale_ptr is not None:
        # By offsets of 32 bits, as addresses would take twice as many registers.
        at_N = token_N * ((COLUMNS + GROUP - 1) // GROUP)
        here_N = inside_N & (start < COLUMNS)
        x_scale_N = tl.load(x_scale_ptr + first + at_N, mask=here_N, other=0.0)
    return w_scale_MG, w_zero_MG, x_scale_N


@triton.jit
def add_words(
    acc_MN, w_M1, w_scale_MG, w_zero_MG, inside_M, x_1N, inside_N, start,
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
    at_MW = w_M1 + (first + tl.arange(0, WORDS))[None, :]
    inside_MW = inside_M[:, None] & inside_W[None, :]
    w_MW = tl.load(at_MW, mask=inside_MW, other=0, eviction_policy=POLICY)
    less = less_zero(w_zero_MG, ELEMENT == "uint4", DTYPE)
    if IN_SUM:
        scale_pair = 0x5F805F80  # 2**64 of bfloat16
    else:
        GROUPS: tl.constexpr = w_scale_MG.shape[1]
        scale_pair = spread(scale_pairs(w_scale_MG, KIND, FLOAT, DTYPE), WORDS // GROUPS)
        if ELEMENT == "uint4":
            less = spread(less, WORDS // GROUPS)
    values_MD = values_of(w_MW, less, scale_pair, FLOAT, SCALED, DTYPE)
    # Columns past the last one are stored as zeros.
    x_DN = tl.load(x_1N + (start + tl.arange(0, STEP))[:, None], mask=inside_N[None, :], other=0.0)
    if IN_SUM:
        acc_MN += tl.dot(values_MD, x_DN) * finite(scale_of(w_scale_MG, KIND))
    else:
        acc_MN = tl.dot(values_MD, x_DN, acc_MN)
    return acc_MN


@triton.jit
def add_sixes(
    acc_MN, w_M1, w_scale_MG, inside_M, x_1N, inside_N, start,
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
    scale = scale_pairs(w_scale_MG, KIND, True, DTYPE)
    GROUPS: tl.constexpr = w_scale_MG.shape[1]
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
    """[M, RUNS] each: two words that lie side by side, of the six words of every 32 columns."""
    M: tl.constexpr = w_M1.shape[0]
    i = tl.arange(0, 2 * RUNS)
    word = start // 32 * 6 + (i // 2 * 6 + i % 2 + 2 * PIECE)
    inside_MW = inside_M[:, None] & (word < COLUMNS // 16 * 3)[None, :]
    w_MW = tl.load(w_M1 + word[None, :], mask=inside_MW, other=0, eviction_policy=POLICY)
    return tl.split(tl.reshape(w_MW, (M, RUNS, 2)))


@triton.jit
def add_bytes(
    acc_MN, w_M1, w_scale_MG, w_zero_MG, inside_M, x_1N, x_scale_N, inside_N, start,
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
    at_MD, inside_MD = w_M1 + d[None, :], inside_M[:, None] & inside_D[None, :]
    w_MD = tl.load(at_MD, mask=inside_MD, other=0.0, eviction_policy=POLICY)
    x_DN = tl.load(x_1N + d[:, None], mask=inside_D[:, None] & inside_N[None, :], other=0.0)
    if IN_SUM:
        factor_MN = finite(scale_of(w_scale_MG, KIND))
        if INPUTS_8:
            factor_MN = factor_MN * x_scale_N[None, :]
            part_MN = tl.dot(w_MD, x_DN)
        else:
            part_MN = tl.dot(bytes_as(w_MD, w_zero_MG, ELEMENT, DTYPE), x_DN)
        acc_MN += part_MN * factor_MN
    elif ELEMENT == "float8_e5m2":
        # Of float32, as its scales may be smaller than any float16.
        scale_MD = spread(scale_of(w_scale_MG, KIND), STEP // w_scale_MG.shape[1])
        acc_MN = tl.dot((w_MD.to(tl.float32) * scale_MD).to(DTYPE), x_DN, acc_MN)
    else:
        tl.static_assert(not INPUTS_8)
        scale_MD = spread(scale_of(w_scale_MG, KIND).to(DTYPE), STEP // w_scale_MG.shape[1])
        acc_MN = tl.dot(bytes_as(w_MD, w_zero_MG, ELEMENT, DTYPE) * scale_MD, x_DN, acc_MN)
    return acc_MN


@triton.jit
def add_registered(
    acc_MN, w_M1, w_scale_MG, w_zero_MG, HAS_ZERO: tl.constexpr, inside_M, x_1N, inside_N, start,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """acc_MN and the products of a step with codes that their own decoder decodes. They are scaled
    in float32, as values and scales may be smaller than any float16."""
    DTYPE: tl.constexpr = x_1N.dtype.element_ty
    KIND: tl.constexpr = W.kind
    VALUES: tl.constexpr = W.values
    EACH: tl.constexpr = STEP // w_scale_MG.shape[1]
    word = start // VALUES + tl.arange(0, STEP // VALUES)
    inside_MW = inside_M[:, None] & (word < COLUMNS // VALUES)[None, :]
    value_MD = values_of_words(words_of(w_M1 + word[None, :] * W.units, inside_MW, W, POLICY), W)
    if HAS_ZERO:
        value_MD -= spread(w_zero_MG.to(tl.float32), EACH)
    value_MD *= spread(scale_of(w_scale_MG, KIND), EACH)
    d = start + tl.arange(0, STEP)
    x_DN = tl.load(x_1N + d[:, None], mask=(d < COLUMNS)[:, None] & inside_N[None, :], other=0.0)
    return tl.dot(value_MD.to(DTYPE), x_DN, acc_MN)


@triton.jit
def add_blocks(
    acc_MN, w_M1, w_scale_MG, inside_M, x_1N, inside_N, start, STEP: tl.constexpr, W: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """acc_MN and the products of a step with blocks, of which rows are whole ones."""
    tl.static_assert(STEP == 128)  # half a block
    DTYPE: tl.constexpr = x_1N.dtype.element_ty
    KIND: tl.constexpr = W.kind
    value_MD = halves_of_blocks(w_M1, start, inside_M, W, POLICY) * scale_of(w_scale_MG, KIND)
    d = start + tl.arange(0, STEP)
    x_DN = tl.load(x_1N + d[:, None], mask=inside_N[None, :], other=0.0)
    return tl.dot(value_MD.to(DTYPE), x_DN, acc_MN)


@triton.jit
def sum_of_bytes(
    w_M1, inside_M, x_1N, inside_N, M: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, W: tl.constexpr, POLICY: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """[M, N]: products of codes of 8 bits with those of tokens, before all scales: int32 of int8.
    Of float8 the unit of Hopper keeps 14 bits of a sum, so that each step makes one of its own,
    but in a CHAIN, which adds as the kernel for many rows does."""
    INT8: tl.constexpr = W.element == "int8"
    sum_MN = tl.zeros((M, N), tl.int32 if INT8 else tl.float32)
    for start in range(0, COLUMNS, STEP):
        d = start + tl.arange(0, STEP)
        inside_D = d < COLUMNS
        at_MD, inside_MD = w_M1 + d[None, :], inside_M[:, None] & inside_D[None, :]
        w_MD = tl.load(at_MD, mask=inside_MD, other=0.0, eviction_policy=POLICY)
        x_DN = tl.load(x_1N + d[:, None], mask=inside_D[:, None] & inside_N[None, :], other=0.0)
        if INT8:
            sum_MN = tl.dot(w_MD, x_DN, sum_MN, out_dtype=tl.int32)
        elif CHAIN:
            sum_MN = tl.dot(w_MD, x_DN, sum_MN)
        else:
            sum_MN = tl.dot(w_MD, x_DN, sum_MN, max_num_imprecise_acc=STEP)
    return sum_MN
