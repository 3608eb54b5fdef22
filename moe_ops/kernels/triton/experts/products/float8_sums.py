"""The sums of a tile of `grouped_float8_tokens.py`: codes of a consumer's rows of W, decoded stage
by stage, times those of tokens. Where scales of W are part of codes, a stage makes one sum; else
each group of columns does, which is multiplied by its scale.

    accs    sums of the tokens of a tile, in PARTS of so many
    begun   products that are under way
    SCALED  what of tokens has a scale, as in `grouped_float8_tokens.py`
    parts   codes of units of W but for the last instruction of decoding them; bytes: all of it
    more    how much the exponents of scales are above the least that their row may have
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_ops.kernels.triton.experts.formats import to_float8
from moe_ops.kernels.triton.experts.products import fragments_float8 as fragments
from moe_ops.kernels.triton.experts.products.fragments_float8 import ROWS, UNITS, sums_layout

FOLDED = gl.constexpr(26)  # by how much exponents of a row may differ to be part of codes


@gluon.constexpr_function
def in_flight(parts):
    """Products that are under way at once, whose sums have room in registers."""
    return 4 if max(parts) <= 32 and len(parts) == 1 else 2


@gluon.constexpr_function
def first_of(parts, p):
    """The first token of a part."""
    return sum(parts[:p])


@gluon.jit
def _start(operands, tokens, JOB: gl.constexpr, PARTS: gl.constexpr):
    """Start a product of half a stage: of a group of columns and a part of the tokens."""
    PART: gl.constexpr = JOB % len(PARTS)
    GROUP: gl.constexpr = JOB // len(PARTS)
    T: gl.constexpr = PARTS[PART]
    COLUMNS: gl.constexpr = operands[0].shape[1]
    a = gl.convert_layout(
        operands[GROUP], gl.DotOperandLayout(0, sums_layout(T), 4), assert_trivial=True
    )
    b = tokens.slice(first_of(PARTS, PART), T).slice(GROUP * COLUMNS, COLUMNS, dim=1)
    none = gl.zeros([ROWS // 2, T], gl.float32, sums_layout(T))
    return warpgroup_mma(a, b.permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def _wait(started):
    """The sum of the first product, once it is done, and the others."""
    if len(started) == 1:
        return (warpgroup_mma_wait(0, deps=[started[0]]),)
    elif len(started) == 2:
        return warpgroup_mma_wait(1, deps=[started[0], started[1]])
    elif len(started) == 3:
        return warpgroup_mma_wait(2, deps=[started[0], started[1], started[2]])
    else:
        return warpgroup_mma_wait(3, deps=[started[0], started[1], started[2], started[3]])


@gluon.jit
def _decode(
    codes, stage, less, half: gl.constexpr, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr
):
    """Codes of half a stage as what `to_float8.joined` takes."""
    words = fragments.load_words(codes, stage, half, LOWER, ACT.gated)
    parts = ()
    for u in gl.static_range(UNITS):
        parts = parts + (fragments.parted_unit(words, less, u, half, W),)  # noqa: RUF005
    return parts


@gluon.jit
def _bytes(parts, W: gl.constexpr):
    """Codes of e4m3 of half a stage, four in each int32, of what `_decode` gave."""
    found = ()
    for u in gl.static_range(UNITS):
        first, last = parts[u]
        both = (to_float8.joined(first, W), to_float8.joined(last, W))
        found = found + (both,)  # noqa: RUF005
    return found


@gluon.jit
def _operands(codes, GROUPS: gl.constexpr, T: gl.constexpr, DTYPE: gl.constexpr = gl.float8e4nv):
    """The first operands of half a stage [64, columns], of each of its one or four groups."""
    LAYOUT: gl.constexpr = sums_layout(T)
    first = fragments.operand_of(codes[0], LAYOUT, DTYPE)
    second = fragments.operand_of(codes[1], LAYOUT, DTYPE)
    third = fragments.operand_of(codes[2], LAYOUT, DTYPE)
    fourth = fragments.operand_of(codes[3], LAYOUT, DTYPE)
    if GROUPS == UNITS:
        return first, second, third, fourth
    else:
        left = fragments.side_by_side(first, second, LAYOUT)
        right = fragments.side_by_side(third, fourth, LAYOUT)
        return (fragments.side_by_side(left, right, LAYOUT),)


@gluon.jit
def _load_zeros(w_zero_ptr, at, i, W: gl.constexpr):
    """The zero points of each group of stage i, as they are stored; nothing if there are none."""
    if w_zero_ptr is None:
        return ()
    else:
        return fragments.load_factors(w_zero_ptr, at, i, W)


@gluon.jit
def _of_tokens(
    rings, stage, half: gl.constexpr, JOB: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr,
    SCALED: gl.constexpr,
):  # fmt: skip
    """[1, T]: the scales that the tokens of a product have for its columns; 0 if they have none."""
    if SCALED == "groups":
        PART: gl.constexpr = JOB % len(PARTS)
        GROUP: gl.constexpr = half * GROUPS + JOB // len(PARTS)
        T: gl.constexpr = PARTS[PART]
        place = rings[1][1].index(stage).slice(first_of(PARTS, PART), T)
        return place.slice(GROUP, 1, dim=1).permute([1, 0]).load(sums_layout(T))
    else:
        return 0


@gluon.jit
def _add(
    accs, done, stored, of_tokens, half: gl.constexpr, JOB: gl.constexpr, GROUPS: gl.constexpr,
    PARTS: gl.constexpr, W: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Add what a product made to the sums of its part of the tokens."""
    PART: gl.constexpr = JOB % len(PARTS)
    GROUP: gl.constexpr = half * GROUPS + JOB // len(PARTS)
    T: gl.constexpr = PARTS[PART]
    if SCALED == "groups":
        done = done * of_tokens
    if W.across != -1:
        done = done * fragments.of_rows(fragments.scale_at(stored, GROUP, GROUPS, W), T)
    sums = ()
    for p in gl.static_range(len(PARTS)):
        sums = sums + ((accs[p] + done) if p == PART else accs[p],)  # noqa: RUF005
    return sums


@gluon.jit
def _add_stage(
    accs, bytes, stored, less, next_less, rings, step, last, LOWER: gl.constexpr,
    GROUPS: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr, SCALED: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """Add the products of a stage to sums: those of each of its groups of columns, times its scale.

    While the unit multiplies, what comes next is decoded. After the last stage that is whatever
    lies there. Codes are integers from one stage to the next: Triton would take others apart, one
    by one.
    """
    codes, tokens, full, empty = rings[0], rings[1][0], rings[2], rings[3]
    STAGES: gl.constexpr = full.shape[0]
    JOBS: gl.constexpr = GROUPS * len(PARTS)
    DEPTH: gl.constexpr = min(2 * JOBS, in_flight(PARTS))
    FIRST: gl.constexpr = min(JOBS, DEPTH)
    stage = step % STAGES
    operands = _operands(bytes, GROUPS, PARTS[0])
    place = tokens.index(2 * stage)
    begun = ()
    for j in gl.static_range(FIRST):
        begun = begun + (_start(operands, place, j, PARTS),)  # noqa: RUF005
    right_parts = _decode(codes, stage, less, 1, LOWER, W, ACT)
    right_operands = _operands(_bytes(right_parts, W), GROUPS, PARTS[0])
    right_place = tokens.index(2 * stage + 1)
    for j in gl.static_range(FIRST, DEPTH):
        begun = begun + (_start(right_operands, right_place, j - JOBS, PARTS),)  # noqa: RUF005
    next_stage = (step + 1) % STAGES
    parts = ()
    for j in gl.static_range(2 * JOBS):
        if j == 2 * JOBS - FIRST:
            mbarrier.wait(full.index(next_stage), (step + 1) // STAGES & 1, pred=step != last)
            parts = _decode(codes, next_stage, next_less, 0, LOWER, W, ACT)
        of_tokens = _of_tokens(rings, stage, j // JOBS, j % JOBS, GROUPS, PARTS, SCALED)
        begun = _wait(begun)
        accs = _add(
            accs, begun[0], stored, of_tokens, j // JOBS, j % JOBS, GROUPS, PARTS, W, SCALED
        )
        rest = ()
        for s in gl.static_range(1, len(begun)):
            rest = rest + (begun[s],)  # noqa: RUF005
        if j + DEPTH < JOBS:
            rest = rest + (_start(operands, place, j + DEPTH, PARTS),)  # noqa: RUF005
        elif j + DEPTH < 2 * JOBS:
            rest = rest + (_start(right_operands, right_place, j + DEPTH - JOBS, PARTS),)  # noqa: RUF005
        begun = rest
    mbarrier.arrive(empty.index(stage))
    return accs, _bytes(parts, W)


@gluon.jit
def _add_stage_in_turn(
    accs, stored, less, rings, step, LOWER: gl.constexpr, GROUPS: gl.constexpr,
    PARTS: gl.constexpr, W: gl.constexpr, SCALED: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """`_add_stage` of few registers: nothing is decoded ahead. While a warp waits for products,
    those of the other block that shares the processor decode."""
    codes, tokens, full, empty = rings[0], rings[1][0], rings[2], rings[3]
    STAGES: gl.constexpr = full.shape[0]
    JOBS: gl.constexpr = GROUPS * len(PARTS)
    DEPTH: gl.constexpr = min(JOBS, 2)
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    for half in gl.static_range(2):
        parts = _decode(codes, stage, less, half, LOWER, W, ACT)
        operands = _operands(_bytes(parts, W), GROUPS, PARTS[0])
        place = tokens.index(2 * stage + half)
        begun = ()
        for j in gl.static_range(DEPTH):
            begun = begun + (_start(operands, place, j, PARTS),)  # noqa: RUF005
        for j in gl.static_range(JOBS):
            of_tokens = _of_tokens(rings, stage, half, j, GROUPS, PARTS, SCALED)
            begun = _wait(begun)
            accs = _add(accs, begun[0], stored, of_tokens, half, j, GROUPS, PARTS, W, SCALED)
            rest = ()
            for s in gl.static_range(1, len(begun)):
                rest = rest + (begun[s],)  # noqa: RUF005
            if j + DEPTH < JOBS:
                rest = rest + (_start(operands, place, j + DEPTH, PARTS),)  # noqa: RUF005
            begun = rest
    mbarrier.arrive(empty.index(stage))
    return accs


@gluon.jit
def _no_sums(PARTS: gl.constexpr):
    accs = ()
    for p in gl.static_range(len(PARTS)):
        accs = accs + (gl.zeros([ROWS // 2, PARTS[p]], gl.float32, sums_layout(PARTS[p])),)  # noqa: RUF005
    return accs


@gluon.jit
def multiply(
    rings, step, steps, sizes, scales, tile, LOWER: gl.constexpr, PARTS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The sums of a consumer's rows of W with the tokens of a tile, in parts of so many; and what
    `nan_words` saw."""
    w_scale_ptr, w_zero_ptr, _, _ = scales
    codes, full = rings[0], rings[2]
    W: gl.constexpr = HOW[0]
    SCALED: gl.constexpr = HOW[2]
    ACT: gl.constexpr = HOW[-1]
    GROUPS: gl.constexpr = fragments.groups_of(W)
    accs = _no_sums(PARTS)
    at = fragments.factors_at(tile, sizes, LOWER, W, ACT)
    seen = at[1] * 0
    stored = fragments.load_factors(w_scale_ptr, at, 0, W)
    zeros = _load_zeros(w_zero_ptr, at, 0, W)
    AHEAD: gl.constexpr = HOW[1].blocks == 1  # whether there is room to decode ahead
    if AHEAD:
        mbarrier.wait(full.index(step % full.shape[0]), step // full.shape[0] & 1)
        bytes = _bytes(_decode(codes, step % full.shape[0], zeros, 0, LOWER, W, ACT), W)
    last = step + steps - 1
    for i in range(steps):
        further = fragments.load_factors(w_scale_ptr, at, i + 1, W)
        further_zeros = _load_zeros(w_zero_ptr, at, i + 1, W)
        words = fragments.as_words(stored, W)
        seen = fragments.nan_words(seen, words, W)
        if AHEAD:
            accs, bytes = _add_stage(
                accs, bytes, words, zeros, further_zeros, rings, step + i, last, LOWER, GROUPS,
                PARTS, W, SCALED, ACT,
            )  # fmt: skip
        else:
            accs = _add_stage_in_turn(
                accs, words, zeros, rings, step + i, LOWER, GROUPS, PARTS, W, SCALED, ACT
            )  # fmt: skip
        stored, zeros = further, further_zeros
    return accs, seen


@gluon.jit
def _decode_folded(codes, stage, more, LOWER: gl.constexpr, ACT: gl.constexpr):
    """Decode the units of a stage, with their scales folded in, as far as `_signed` takes them."""
    found = ()
    for half in gl.static_range(2):
        words = fragments.load_words(codes, stage, half, LOWER, ACT.gated)
        for u in gl.static_range(UNITS):
            found = found + (fragments.folded_unit(words, more[half], u),)  # noqa: RUF005
    return found


@gluon.jit
def _signed(parts):
    """Codes of units, four in each int32."""
    found = ()
    for u in gl.static_range(len(parts)):
        found = found + (to_float8.signed(parts[u][0], parts[u][1]),)  # noqa: RUF005
    return found


@gluon.jit
def _start_half(begun, operand, tokens, PART: gl.constexpr, PARTS: gl.constexpr):
    """Start the product of half a stage with a part of the tokens, onto what is begun of it."""
    T: gl.constexpr = PARTS[PART]
    a = gl.convert_layout(operand, gl.DotOperandLayout(0, sums_layout(T), 4), assert_trivial=True)
    b = tokens.slice(first_of(PARTS, PART), T).permute([1, 0])
    if begun is None:
        none = gl.zeros([ROWS // 2, T], gl.float32, sums_layout(T))
        return warpgroup_mma(a, b, none, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(a, b, begun, is_async=True)


@gluon.jit
def _wait_halves(started):
    """`_wait` for products of two halves each."""
    if len(started) == 1:
        return (warpgroup_mma_wait(0, deps=[started[0]]),)
    else:
        return warpgroup_mma_wait(2, deps=[started[0], started[1]])


@gluon.jit
def _add_folded(
    accs, bytes, next_more, rings, step, last, LOWER: gl.constexpr, PARTS: gl.constexpr,
    ACT: gl.constexpr,
):  # fmt: skip
    """Add the products of a stage, of which scales are a part, to sums: see `_add_stage`. What
    writes to operands is ahead of the products of both halves: else ptxas waits for each of them.
    """
    codes, tokens, full, empty = rings[0], rings[1][0], rings[2], rings[3]
    STAGES: gl.constexpr = full.shape[0]
    stage = step % STAGES
    left = _operands((bytes[0], bytes[1], bytes[2], bytes[3]), 1, PARTS[0], gl.float8e5)[0]
    right = _operands((bytes[4], bytes[5], bytes[6], bytes[7]), 1, PARTS[0], gl.float8e5)[0]
    begun = ()
    for p in gl.static_range(len(PARTS)):
        product = _start_half(None, left, tokens.index(2 * stage), p, PARTS)
        product = _start_half(product, right, tokens.index(2 * stage + 1), p, PARTS)
        begun = begun + (product,)  # noqa: RUF005
    next_stage = (step + 1) % STAGES
    mbarrier.wait(full.index(next_stage), (step + 1) // STAGES & 1, pred=step != last)
    parts = _decode_folded(codes, next_stage, next_more, LOWER, ACT)
    sums = ()
    for p in gl.static_range(len(PARTS)):
        begun = _wait_halves(begun)
        sums = sums + (accs[p] + begun[0],)  # noqa: RUF005
        rest = ()
        for r in gl.static_range(1, len(begun)):
            rest = rest + (begun[r],)  # noqa: RUF005
        begun = rest
    mbarrier.arrive(empty.index(stage))
    return sums, _signed(parts)


@gluon.jit
def _above(stored, least, W: gl.constexpr):
    """How much the exponents of scales are above the least that rows may have, in bytes."""
    left, right = fragments.as_words(stored, W)
    return left - least, right - least


@gluon.jit
def multiply_folded(
    rings, step, steps, sizes, scales, reference, tile, LOWER: gl.constexpr, PARTS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The sums of `multiply` where the scales of each row are near each other, without the last
    factor of the row: powers of two, which become part of the codes."""
    codes, full = rings[0], rings[2]
    W: gl.constexpr = HOW[0]
    ACT: gl.constexpr = HOW[-1]
    accs = _no_sums(PARTS)
    at = fragments.factors_at(tile, sizes, LOWER, W, ACT)
    least = (reference - 1 - FOLDED) * 0x01010101
    more = _above(fragments.load_factors(scales[0], at, 0, W), least, W)
    stored = fragments.load_factors(scales[0], at, 1, W)
    mbarrier.wait(full.index(step % full.shape[0]), step // full.shape[0] & 1)
    bytes = _signed(_decode_folded(codes, step % full.shape[0], more, LOWER, ACT))
    last = step + steps - 1
    for i in range(steps):
        further = fragments.load_factors(scales[0], at, i + 2, W)
        more = _above(stored, least, W)
        accs, bytes = _add_folded(accs, bytes, more, rings, step + i, last, LOWER, PARTS, ACT)
        stored = further
    return accs
