"""Products of few tokens with quantised weights that stream through registers, in Gluon.

Every thread loads the codes that it multiplies, 16 bytes of a row at a time (of six bits three
times 8) and some steps ahead, decodes them, and passes them to the matrix unit as they lie: which
column of the weights is which of the unit's is free, as long as tokens follow. Nothing goes through
shared memory and no warp waits for another one until the end, so that few instructions are left
beside the decoding.

A step is 128 columns. Tiles have a first axis of shares: warps that multiply other columns, or
other experts, of the same rows of a tile, and whose sums are added up last.

    S, MW, MT, NT   shares; warps along the rows; tiles of 16 rows for each; tiles of 8 tokens
    C               the parts into which columns are cut: share s has part s % C
    [S, M, ...]     M = 16 * MW * MT rows; [S, N, ...]  N = 8 * NT tokens
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_ops.kernels.triton import STEP
from moe_ops.kernels.triton.experts.formats.codes import by_row
from moe_ops.kernels.triton.experts.formats.eight_bits_gluon import (
    bytes_of,
    of_float8,
    of_int8,
    pairs_of_bytes,
)
from moe_ops.kernels.triton.experts.formats.four_bits import less_zero, pairs_of
from moe_ops.kernels.triton.experts.formats.halves import half_of, pair_fma
from moe_ops.kernels.triton.experts.formats.scales import finite, scale_of, scale_pairs
from moe_ops.kernels.triton.experts.formats.six_bits import joined_8, sixes_of
from moe_ops.kernels.triton.experts.operands.rounded_gluon import (
    factors_of,
    rounded_words,
    words_by,
)
from moe_ops.kernels.triton.launch import take_turn
from moe_ops.kernels.triton.quantize import magnitude

COLUMNS_OF_STEP = gl.constexpr(STEP)


@gluon.constexpr_function
def doublings(n, axis, each=1):
    """Bases of a layout along an axis of three: each, 2 * each, up to half of n * each."""
    return [[each * 2**i if a == axis else 0 for a in range(3)] for i in range(n.bit_length() - 1)]


@gluon.constexpr_function
def unit_layout(SIZES):
    return gl.NVMMADistributedLayout([2, 0], [SIZES.S, SIZES.MW, 1], [1, 16, 8])


@gluon.constexpr_function
def warps_of(SIZES, along_rows):
    rows = doublings(SIZES.MW, 1, 16)
    return (rows if along_rows else [[0, 0, 0]] * len(rows)) + doublings(SIZES.S, 0)


@gluon.constexpr_function
def words_layout(SIZES, BITS):
    """The layout of words [S, M, words of a step]: each of four threads has four words of a row,
    side by side. Of six bits it is the layout of one third of them, pairs of words [S, M, 4]: a
    thread has three such pairs side by side."""
    if BITS == 6:
        return scales_layout(SIZES, 32)
    registers = [*doublings(4, 2), [0, 8, 0], *doublings(SIZES.MT, 1, 16 * SIZES.MW)]
    if BITS == 8:
        registers.append([0, 0, 16])
    lanes = [*doublings(4, 2, 4), *doublings(8, 1)]
    shape = [SIZES.S, 16 * SIZES.MW * SIZES.MT, 4 * BITS]
    return gl.DistributedLinearLayout(registers, lanes, warps_of(SIZES, True), [], shape)


@gluon.constexpr_function
def scales_layout(SIZES, GROUP):
    """The layout of scales [S, M, 4]: one for each four words, in the thread that has these. In
    groups of 16 they are [S, M, 8]."""
    each = 2 if GROUP == 16 else 1
    lanes = [*doublings(4, 2, each), *doublings(8, 1)]
    registers = [*doublings(each, 2), [0, 8, 0], *doublings(SIZES.MT, 1, 16 * SIZES.MW)]
    shape = [SIZES.S, 16 * SIZES.MW * SIZES.MT, 4 * each]
    return gl.DistributedLinearLayout(registers, lanes, warps_of(SIZES, True), [], shape)


@gluon.constexpr_function
def tokens_layout(SIZES, BITS, EACH):
    """The layout of tokens [S, N, step / EACH], in elements of EACH columns: where the matrix unit
    takes them to multiply them with codes of BITS bits."""
    run = 16 if BITS == 8 else 32  # columns that a thread has side by side
    registers = [*doublings(run // EACH, 2)]
    if BITS == 8:
        registers.append([0, 0, 64 // EACH])
    registers += doublings(SIZES.NT, 1, 8)
    lanes = [*doublings(4, 2, run // EACH), *doublings(8, 1)]
    shape = [SIZES.S, 8 * SIZES.NT, STEP // EACH]
    return gl.DistributedLinearLayout(registers, lanes, warps_of(SIZES, False), [], shape)


@gluon.constexpr_function
def token_layout(SIZES):
    """The layout of one token that is rounded to codes of 8 bits, [S, 1, step]: a thread has four
    columns."""
    registers, lanes = doublings(4, 2), doublings(32, 2, 4)
    return gl.DistributedLinearLayout(
        registers, lanes, warps_of(SIZES, False), [], [SIZES.S, 1, STEP]
    )


@gluon.constexpr_function
def row_layout(SIZES):
    """The layout of 1024 columns of one token, [S, 1, columns]."""
    registers, lanes = [*doublings(8, 2), *doublings(4, 2, 256)], doublings(32, 2, 8)
    return gl.DistributedLinearLayout(
        registers, lanes, warps_of(SIZES, False), [], [SIZES.S, 1, 1024]
    )


@gluon.constexpr_function
def one_a_step(W):
    """Whether one scale serves all columns of a step."""
    return W.across in (-1, STEP)


@gluon.constexpr_function
def leaves_sum(W, SIZES):
    """Whether sums, of a step or of all columns, are multiplied by scales, and not values."""
    return one_a_step(W) and not (SIZES.in_values and not W.inputs_8)


@gluon.constexpr_function
def token_groups(columns, W):
    """The number of scales of a token that has so many columns of 8 bits."""
    return 1 if by_row(W) else -(-columns // STEP)


@gluon.constexpr_function
def part_groups(columns, C, W):
    """The scales of a token from one of C parts of its columns to the next."""
    return 0 if by_row(W) else steps_of(columns, C)


@gluon.constexpr_function
def steps_of(columns, C):
    """The steps of each of C parts of the columns."""
    return -(-columns // (C * STEP))


@gluon.constexpr_function
def ragged(columns, C):
    """Whether parts have steps, or a step columns, that are not there."""
    return columns % (C * STEP) != 0


@gluon.constexpr_function
def along(layout, axis):
    """The layout of a vector along one axis of three."""
    rest = [a for a in range(3) if a != axis]
    return gl.SliceLayout(rest[0], gl.SliceLayout(rest[1], layout))


@gluon.jit
def from_pairs(pairs, DTYPE: gl.constexpr):
    """[S, M, columns] of pairs of halves [S, M, columns / 2]."""
    halves = gl.join(half_of(pairs, False, DTYPE), half_of(pairs, True, DTYPE))
    return halves.reshape([pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]])


@gluon.jit
def values_of_4(
    w, less, scale_pair, FLOAT: gl.constexpr, SCALED: gl.constexpr, DTYPE: gl.constexpr
):
    pairs = pairs_of(w, less, scale_pair, FLOAT, SCALED, DTYPE)
    S: gl.constexpr = w.shape[0]
    M: gl.constexpr = w.shape[1]
    pairs = pairs.reshape([S, M, 4, 4, 4]).permute([0, 1, 3, 4, 2]).reshape([S, M, 64])
    return from_pairs(pairs, DTYPE)


@gluon.jit
def values_of_6(w, scale_pair, ELEMENT: gl.constexpr, DTYPE: gl.constexpr):
    """[S, M, 128] values of six bits each, from three pairs of words. A pair is 64 bits."""
    a, b = w[0].to(gl.int32), (w[0] >> 32).to(gl.int32)
    c, d = w[1].to(gl.int32), (w[1] >> 32).to(gl.int32)
    e, f = w[2].to(gl.int32), (w[2] >> 32).to(gl.int32)
    left = joined_8(sixes_of(a, b, c, ELEMENT, DTYPE), scale_pair, DTYPE)
    right = joined_8(sixes_of(d, e, f, ELEMENT, DTYPE), scale_pair, DTYPE)
    S: gl.constexpr = w[0].shape[0]
    M: gl.constexpr = w[0].shape[1]
    pairs = gl.join(left, right).reshape([S, M, 4, 8, 2]).permute([0, 1, 4, 3, 2])
    return from_pairs(pairs.reshape([S, M, 64]), DTYPE)


@gluon.jit
def values_of_8(w, scale_pair, INT8: gl.constexpr, DTYPE: gl.constexpr):
    """[S, M, 128] values of eight bits each, times scales if there are any."""
    if INT8 and DTYPE == gl.float16:
        low, high = of_int8(w)
    elif INT8:
        first, last = pairs_of_bytes(w)
        low, high = bytes_of(first, 0, "int8", DTYPE), bytes_of(last, 0, "int8", DTYPE)
    else:
        low, high = of_float8(w, DTYPE)
    if scale_pair is not None:
        low = pair_fma(low, scale_pair, -0x7FFF8000, DTYPE)  # the halves of which are -0
        high = pair_fma(high, scale_pair, -0x7FFF8000, DTYPE)
    pairs = gl.join(low, high)
    S: gl.constexpr = w.shape[0]
    M: gl.constexpr = w.shape[1]
    pairs = pairs.reshape([S, M, 2, 4, 4, 2]).permute([0, 1, 2, 4, 5, 3]).reshape([S, M, 64])
    return from_pairs(pairs, DTYPE)


@gluon.jit
def operand_of(x, W: gl.constexpr, DTYPE: gl.constexpr, SIZES: gl.constexpr):
    """Tokens of a step as the unit's second operand [S, 128, N]."""
    S: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    BITS: gl.constexpr = W.bits
    INT8: gl.constexpr = W.element == "int8"
    if x.dtype == gl.int32:  # of four codes
        x = values_of_8(x, None, INT8, DTYPE).permute([0, 2, 1])
    elif BITS == 4:
        x = x.reshape([S, N, 4, 4, 2, 4]).permute([0, 3, 5, 2, 4, 1]).reshape([S, 128, N])
    elif BITS == 6:
        x = x.reshape([S, N, 4, 2, 2, 8]).permute([0, 3, 5, 2, 4, 1]).reshape([S, 128, N])
    else:
        x = x.reshape([S, N, 2, 4, 4, 2, 2]).permute([0, 2, 4, 5, 3, 6, 1]).reshape([S, 128, N])
    layout: gl.constexpr = gl.DotOperandLayout(1, unit_layout(SIZES), 2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def to_all_columns(words, SIZES: gl.constexpr):
    """[S, N, 32] in `tokens_layout` of words [S, 1, 32] of one token, of which a thread has one."""
    S: gl.constexpr = words.shape[0]
    words = words.reshape([S, 8, 4])
    first = 4 * gl.arange(0, 4, along(words.type.layout, 2))[None, None, :] + 0 * words
    left = gl.join(
        gl.join(from_lane(words, first), from_lane(words, first + 2)),
        gl.join(from_lane(words, first + 1), from_lane(words, first + 3)),
    )
    right = gl.join(
        gl.join(from_lane(words, first + 16), from_lane(words, first + 18)),
        gl.join(from_lane(words, first + 17), from_lane(words, first + 19)),
    )
    words = gl.join(left, right).permute([0, 1, 5, 2, 3, 4]).reshape([S, 8, 32])
    for i in gl.static_range(SIZES.NT.bit_length() - 1):
        N: gl.constexpr = 16 * 2**i
        words = gl.join(words, words).permute([0, 3, 1, 2]).reshape([S, N, 32])
    return gl.convert_layout(words, tokens_layout(SIZES, 8, 4), assert_trivial=True)


@gluon.jit
def from_lane(words, lane):
    """The words of other threads of a warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [words, lane],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def codes_of_step(x, t, factors, W: gl.constexpr, SIZES: gl.constexpr):
    """(words of the codes of one token of a step, for all columns of a tile; their scales, of rows
    anything), as `load_tokens` gives those of codes."""
    if by_row(W):
        _, inverse, rest = factors
        words = words_by(x, inverse[:, :, None], rest[:, :, None], W.element == "int8")
    else:
        words, scale = rounded_words(x)
        t = of_one(scale, gl.SliceLayout(1, unit_layout(SIZES)))
    return to_all_columns(words, SIZES), t


@gluon.jit
def of_one(t, layout: gl.constexpr):
    """Values [S, 1] of one token in another layout."""
    S: gl.constexpr = t.shape[0]
    return gl.convert_layout(t.reshape([S]), gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def masked(
    here_S, step, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr, layout: gl.constexpr,
    SOME: gl.constexpr,
):  # fmt: skip
    """[S, 1, X] of a layout: whether elements of a step exist, because their share has an expert
    and they lie inside the columns; True if all do."""
    S: gl.constexpr = layout.shape[0]
    X: gl.constexpr = layout.shape[2]
    EACH: gl.constexpr = COLUMNS_OF_STEP // X
    STEPS: gl.constexpr = steps_of(COLUMNS, C)
    mask = True
    if SOME:
        mask = gl.convert_layout(here_S, along(layout, 0))[:, None, None]
    if ragged(COLUMNS, C):
        s = gl.arange(0, S, along(layout, 0))
        left_S = COLUMNS - s % C * (STEPS * COLUMNS_OF_STEP)
        if W.element == "float8_e4m3fn":
            # Of a zero that it knows to be one, ptxas 12.8 makes NaN in the second half of a word.
            # It does not know that this is 0.
            left_S += gl.program_id(2)
        # Of 16 bytes the first says it for all, so that these are one load.
        RUN: gl.constexpr = 8 if EACH == 1 else 4 if EACH < 32 else 1
        column = step * COLUMNS_OF_STEP + gl.arange(0, X, along(layout, 2)) // RUN * (RUN * EACH)
        mask = mask & (column[None, None, :] < left_S[:, None, None])
    return mask


@gluon.jit
def load_step(
    at_SM, here_S, step, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
    layout: gl.constexpr, SOME: gl.constexpr, POLICY: gl.constexpr, OF: gl.constexpr = 1,
):  # fmt: skip
    """What a step has of rows at at_SM, of codes or of tokens; one OF those side by side."""
    X: gl.constexpr = layout.shape[2]
    at = at_SM[:, :, None] + ((step * X + gl.arange(0, X, along(layout, 2))) * OF)[None, None, :]
    if SOME or ragged(COLUMNS, C):
        mask = masked(here_S, step, COLUMNS, C, W, layout, SOME)
        return gl.load(at, mask=mask, other=0, eviction_policy=POLICY)
    else:
        return gl.load(at, eviction_policy=POLICY)


@gluon.jit
def load_scales(ptr, at, end, step, W: gl.constexpr, MASKED: gl.constexpr):
    """Scales or zero points of a step, at `at`: of rows where those of a step are one, else of
    groups; 0 at and past the end."""
    GROUP: gl.constexpr = W.across
    if GROUP != -1:
        at += step * (COLUMNS_OF_STEP // GROUP)
    if MASKED:
        return gl.load(ptr + at, mask=at < end, other=0)
    else:
        return gl.load(ptr + at)


@gluon.jit
def load_all(
    weights, step, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr,
    SOME: gl.constexpr,
):  # fmt: skip
    """(codes, scales, zero points) of a step; anything in place of what the format does not
    have."""
    w_SM, here_S, w_scale_ptr, w_zero_ptr, at, end = weights
    layout: gl.constexpr = words_layout(SIZES, W.bits)
    MASKED: gl.constexpr = SOME or ragged(COLUMNS, C)
    if W.bits == 6:
        w = ()
        for i in gl.static_range(3):
            third = load_step(w_SM + i, here_S, step, COLUMNS, C, W, layout, SOME, "evict_first", 3)
            w = w + (third,)  # noqa: RUF005
    else:
        w = load_step(w_SM, here_S, step, COLUMNS, C, W, layout, SOME, "evict_first")
    scale = at
    if not by_row(W):
        scale = load_scales(w_scale_ptr, at, end, step, W, MASKED)
    zero = scale
    if w_zero_ptr is not None:
        zero = load_scales(w_zero_ptr, at, end, step, W, MASKED)
    return w, scale, zero


@gluon.jit
def load_tokens(
    tokens, here_S, step, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
    SIZES: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """(tokens, their scales) of a step; anything for scales that there are none of."""
    x_SN, x_scale_ptr, t_at = tokens[0], tokens[1], tokens[2]
    EACH: gl.constexpr = 4 if x_SN.dtype.element_ty == gl.int32 else 1
    if W.inputs_8 and EACH == 1:
        layout: gl.constexpr = token_layout(SIZES)
    else:
        layout: gl.constexpr = tokens_layout(SIZES, W.bits, EACH)
    x = load_step(x_SN, here_S, step, COLUMNS, C, W, layout, SOME, "")
    t = t_at
    if x_scale_ptr is not None and not by_row(W):
        # The last part may have fewer steps than the others.
        s = gl.arange(0, layout.shape[0], gl.SliceLayout(1, t_at.type.layout))
        group_S = s % C * steps_of(COLUMNS, C) + step
        inside_S = group_S < gl.cdiv(COLUMNS, COLUMNS_OF_STEP)
        t = gl.load(x_scale_ptr + t_at + step, mask=(t_at >= 0) & inside_S[:, None], other=0.0)
    return x, t


@gluon.jit
def add_product(
    acc, weights, tokens, COLUMNS: gl.constexpr, C: gl.constexpr, W: gl.constexpr,
    DTYPE: gl.constexpr, P: gl.constexpr, SIZES: gl.constexpr, SOME: gl.constexpr,
    WAIT: gl.constexpr,
):  # fmt: skip
    """(acc and the products of all steps of a part; the scale of a token that is rounded by rows).
    Codes are loaded P steps ahead, tokens SIZES.X; codes of the first steps before this waits for
    the launch before it, if it does. Of many steps ptxas moves loads that are ahead of a product to
    where registers are free, which may be right before they are used; not those behind it."""
    L: gl.constexpr = steps_of(COLUMNS, C)
    X: gl.constexpr = SIZES.X
    LOOPED: gl.constexpr = (L - P) // P * P if L > P else 0
    here_S = weights[1]
    ring = (load_all(weights, 0, COLUMNS, C, W, SIZES, SOME),)
    for p in gl.static_range(1, P):
        if p < L:
            ring = ring + (load_all(weights, p, COLUMNS, C, W, SIZES, SOME),)  # noqa: RUF005
    take_turn(WAIT)
    factors = row_factors(tokens, here_S, COLUMNS, W, SIZES)
    x, t = load_tokens(tokens, here_S, 0, COLUMNS, C, W, SIZES, SOME)
    further = x
    if rounded_at_load(tokens[0].dtype.element_ty, W):
        x, t = codes_of_step(x, t, factors, W, SIZES)
        if L > 1:
            further, _ = load_tokens(tokens, here_S, 1, COLUMNS, C, W, SIZES, SOME)
    line = ((x, t),)
    for p in gl.static_range(1, X):
        if p < L:
            more = load_tokens(tokens, here_S, p, COLUMNS, C, W, SIZES, SOME)
            line = line + (more,)  # noqa: RUF005
    for first in range(0, LOOPED, P):
        for p in gl.static_range(P):
            x, t = line[0]
            now, step = (ring[0], x, t), first + p
            ring = ring[1:]
            if not SIZES.late:
                new = load_all(weights, step + P, COLUMNS, C, W, SIZES, SOME)
                ring = ring + (new,)  # noqa: RUF005
            x, t, further = next_tokens(
                further, tokens, here_S, factors, step + X, gl.minimum(step + X + 1, L - 1),
                COLUMNS, C, W, SIZES, SOME,
            )  # fmt: skip
            line = line[1:] + ((x, t),)  # noqa: RUF005
            acc = add_step(acc, now, W, DTYPE, SIZES)
            if SIZES.late:
                new = load_all(weights, step + P, COLUMNS, C, W, SIZES, SOME)
                ring = ring + (new,)  # noqa: RUF005
    for step in gl.static_range(LOOPED, L):
        x, t = line[0]
        now = (ring[0], x, t)
        ring, line = ring[1:], line[1:]
        if step + P < L and not SIZES.late:
            new = load_all(weights, step + P, COLUMNS, C, W, SIZES, SOME)
            ring = ring + (new,)  # noqa: RUF005
        if step + X < L:
            x, t, further = next_tokens(
                further, tokens, here_S, factors, step + X,
                step + (X + 1 if step + X + 1 < L else X), COLUMNS, C, W, SIZES, SOME,
            )  # fmt: skip
            line = line + ((x, t),)  # noqa: RUF005
        acc = add_step(acc, now, W, DTYPE, SIZES)
        if step + P < L and SIZES.late:
            new = load_all(weights, step + P, COLUMNS, C, W, SIZES, SOME)
            ring = ring + (new,)  # noqa: RUF005
    return acc, factors[0]


@gluon.constexpr_function
def rounded_at_load(element, W):
    """Whether tokens of these elements are rounded to codes where they are loaded."""
    return W.inputs_8 and element != gl.int32


@gluon.jit
def next_tokens(
    further, tokens, here_S, factors, step, behind, COLUMNS: gl.constexpr, C: gl.constexpr,
    W: gl.constexpr, SIZES: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """(tokens of a step, their scales; what is loaded of one that is rounded, of the step behind).
    It is rounded while the step before is multiplied."""
    if rounded_at_load(tokens[0].dtype.element_ty, W):
        ahead, t = load_tokens(tokens, here_S, behind, COLUMNS, C, W, SIZES, SOME)
        x, t = codes_of_step(further, t, factors, W, SIZES)
        return x, t, ahead
    else:
        x, t = load_tokens(tokens, here_S, step, COLUMNS, C, W, SIZES, SOME)
        return x, t, further


@gluon.jit
def row_factors(tokens, here_S, COLUMNS: gl.constexpr, W: gl.constexpr, SIZES: gl.constexpr):
    """(scales, their inverses in two halves) [S, 1] of a token that is rounded by rows, whose place
    is the last of `tokens`; nothing for others."""
    if not (by_row(W) and rounded_at_load(tokens[0].dtype.element_ty, W)):
        return (0, 0, 0)
    else:
        layout: gl.constexpr = row_layout(SIZES)
        S: gl.constexpr = layout.shape[0]
        EACH: gl.constexpr = layout.shape[2]
        row_ptr, row_S = tokens[3]
        at = row_ptr + gl.convert_layout(row_S, along(layout, 0))[:, None, None]
        here = gl.convert_layout(here_S, along(layout, 0))[:, None, None]
        column = gl.arange(0, EACH, along(layout, 2))[None, None, :]
        largest = gl.zeros([S, 1, EACH], gl.int32, layout)
        for first in range(0, COLUMNS, EACH):
            mask = here & (first + column // 8 * 8 < COLUMNS)
            x = gl.load(at + first + column, mask=mask, other=0).to(gl.float32)
            largest = gl.maximum(largest, magnitude(x))
        largest = gl.convert_layout(gl.max(largest, 2), gl.SliceLayout(2, token_layout(SIZES)))
        return factors_of(largest.to(gl.float32, bitcast=True), W.element == "int8")


@gluon.jit
def add_step(acc, loaded, W: gl.constexpr, DTYPE: gl.constexpr, SIZES: gl.constexpr):
    """acc and the product of what `load_all` and `next_tokens` gave."""
    codes, x, t = loaded
    w, s, z = codes
    ELEMENT: gl.constexpr = W.element
    KIND: gl.constexpr = W.kind
    IN_SUM: gl.constexpr = leaves_sum(W, SIZES)
    FLOAT: gl.constexpr = ELEMENT == "float4_e2m1"
    INT8: gl.constexpr = W.element == "int8"
    b = operand_of(x, W, DTYPE, SIZES)
    operand: gl.constexpr = gl.DotOperandLayout(0, unit_layout(SIZES), 2)
    if W.bits == 8:
        pair = None
        if not IN_SUM:
            pair = spread(scale_pairs(s, KIND, False, DTYPE), w)
        a = values_of_8(w, pair, INT8, DTYPE)
    elif W.bits == 6:
        a = values_of_6(w, scale_pairs(s, KIND, True, DTYPE), ELEMENT, DTYPE)
    else:
        less = less_zero(z, ELEMENT == "uint4", DTYPE)
        if IN_SUM:
            if ELEMENT == "uint4":
                # Zero points come where sums lie; codes have them in the same rows.
                less = gl.convert_layout(less, gl.SliceLayout(2, w.type.layout))[:, :, None]
            pair = 0x5F805F80  # 2**64 of bfloat16
        else:
            pair = spread(scale_pairs(s, KIND, FLOAT, DTYPE), w)
            if ELEMENT == "uint4":
                less = spread(less, w)
        SCALED: gl.constexpr = not IN_SUM or (FLOAT and DTYPE == gl.bfloat16)
        a = values_of_4(w, less, pair, FLOAT, SCALED, DTYPE)
    a = gl.convert_layout(a, operand, assert_trivial=True)
    if by_row(W):
        acc = mma_v2(a, b, acc)  # scales leave the sum
    elif IN_SUM:
        part = mma_v2(a, b, gl.zeros_like(acc))
        factor = finite(scale_of(s, KIND))[:, :, None]
        if W.inputs_8:
            factor = factor * t[:, None, :]
        acc += part * factor
    else:
        acc = mma_v2(a, b, acc)
    return acc


@gluon.jit
def spread(values, w):
    """[S, M, 4] for each of the four words that they are of, of 8 bits eight, or [S, M, 8] of the
    two."""
    many = gl.join(values, values)
    if values.shape[2] == 4:
        many = gl.join(many, many)
    if w.shape[2] == 32:
        many = gl.join(many, many).permute([0, 1, 5, 2, 3, 4])
    many = many.reshape([w.shape[0], w.shape[1], w.shape[2]])
    return gl.convert_layout(many, w.type.layout, assert_trivial=True)
