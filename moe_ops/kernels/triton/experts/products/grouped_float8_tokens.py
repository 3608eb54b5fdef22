"""The experts for many rows an expert of weights of four bits and tokens of float8, on Hopper
(sm_90): a persistent, warp-specialised kernel in Gluon that decodes weights to float8_e4m3fn where
they are multiplied.

As in `grouped_registers.py` weights are the first and tokens the second operand: a tile is 128 rows
of W by up to 256 tokens, and what it makes is stored transposed. Tokens are quantised ahead of each
product. Columns with one scale of W make a sum of their own, which is multiplied by it and added in
float32; so are 128 columns at most, as the unit adds with fewer bits. The scale of a token is
multiplied into the sum of all columns; those of its groups of columns come with it, and are
multiplied into the sum of each.

    rows of x   in the order of experts, their columns in that of `order.in_float8_order`: so is h
    first       h: the gate and up values of one column are in one thread
    second      y, which is summed by token

What the functions below share is as in `skeleton.py`, and
    rings   stages of codes, of two boxes each; of tokens, and of scales that come with them;
            barriers
    sizes   rows of W per expert; K; columns of the output, and those that it is stored with
    scales  scales and zero points of W; scales of rows of x, if these leave the sum
    EACH    how many scales a token has in a stage; 0 if they leave the sum
    output  bias or None, pointer
    accs    sums of the tokens of a tile, so many at a time
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels.triton import LINEAR, Act, Weight
from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.experts.call import Call, Operand, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.formats import to_float8
from moe_ops.kernels.triton.experts.products import fragments_float8 as fragments
from moe_ops.kernels.triton.experts.operands.references import references
from moe_ops.kernels.triton.experts.products import skeleton
from moe_ops.kernels.triton.experts.products.float8_tile import Float8Tile
from moe_ops.kernels.triton.experts.products.fragments_float8 import HALF, ROWS, STEP, UNITS, sums_layout
from moe_ops.kernels.triton.experts.products.hopper import tma_load
from moe_ops.kernels.triton.experts.products.skeleton import first_tile, specialize
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.experts.weights import Stack


FOLDED = gl.constexpr(26)  # by how much exponents of a row may differ to be part of codes


@gluon.constexpr_function
def box_of(tokens):
    """How many tokens of a tile one copy takes."""
    return max(16, min(tokens // 2, 64))


@gluon.constexpr_function
def in_flight(parts, blocks):
    """Products that are under way at once, whose sums have room in registers."""
    return 4 if max(parts) <= 32 and blocks == 1 else 2


@gluon.jit
def _boxes_of_tile(slot, tile, source, rings, sizes, HOW: gl.constexpr):
    """The first rows of the boxes of codes, and how many boxes the tile's tokens fill."""
    expert, end, row, n = tile
    N, _, out_n, _ = sizes
    TOKENS: gl.constexpr = HOW[1].tokens
    ACT: gl.constexpr = HOW[-1]
    PART: gl.constexpr = box_of(TOKENS)
    if ACT.interleaved:  # of the even and of the odd rows
        left = expert * out_n + n * (ROWS // 2)
        right = left
    else:
        left = expert * N + n * (ROWS // 2 if ACT.gated else ROWS)
        right = left + (out_n if ACT.gated else ROWS // 2)
    return left, right, gl.minimum(gl.cdiv(end - row, PART), TOKENS // PART)


@gluon.jit
def _copy(i, bar, stage, tile, at, source, rings, sizes, HOW: gl.constexpr):
    """A step of codes and of tokens."""
    codes, of_tokens, _, _ = rings
    tokens = of_tokens[0]
    x_desc, x_scale_desc, left_desc, right_desc = source
    left, right, filled = at
    TOKENS: gl.constexpr = HOW[1].tokens
    EACH: gl.constexpr = HOW[2]
    PART: gl.constexpr = box_of(TOKENS)
    CODES: gl.constexpr = ROWS * (STEP // 2) + 4 * EACH * TOKENS
    for b in gl.static_range(TOKENS // PART):
        mbarrier.expect(bar, CODES + (b + 1) * PART * STEP, pred=filled == b + 1)
    tma_load(left_desc, [left, i * 32], bar, codes.index(2 * stage))
    tma_load(right_desc, [right, i * 32], bar, codes.index(2 * stage + 1))
    if EACH > 0:
        # What lies side by side begins at a multiple of 16 bytes, which rows do not.
        tma_load(x_scale_desc, [tile[2], i * EACH], bar, of_tokens[1].index(stage))
    for b in gl.static_range(TOKENS // PART):
        for half in gl.static_range(2):
            place = tokens.index(2 * stage + half).slice(b * PART, PART)
            place_at = [tile[2] + b * PART, i * STEP + half * HALF]
            tma_load(x_desc, place_at, bar, place, pred=b < filled)


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
def _decode(codes, stage, less, half: gl.constexpr, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
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
    """The first operands of half a stage [64, columns], one of each group of columns."""
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
        if GROUPS == 2:
            return left, right
        else:
            return (fragments.side_by_side(left, right, LAYOUT),)


@gluon.jit
def _load_zeros(w_zero_ptr, at, i, W: gl.constexpr):
    """The zero points of each group of stage i, as they are stored; nothing if there are none."""
    if w_zero_ptr is None:
        return ()
    else:
        return fragments.load_factors(w_zero_ptr, at, i, W)


@gluon.jit
def _add(accs, done, stored, of_tokens, stage, half: gl.constexpr, JOB: gl.constexpr, GROUPS: gl.constexpr, PARTS: gl.constexpr, W: gl.constexpr):
    """Add what a product made to the sums of its part of the tokens."""
    PART: gl.constexpr = JOB % len(PARTS)
    GROUP: gl.constexpr = half * GROUPS + JOB // len(PARTS)
    T: gl.constexpr = PARTS[PART]
    if W.across != -1:
        done = done * fragments.of_rows(fragments.scale_at(stored, GROUP, GROUPS, W), T)
    if len(of_tokens) == 2:
        of_x = of_tokens[1].index(stage).permute([1, 0]).slice(GROUP, 1)
        done = done * of_x.slice(first_of(PARTS, PART), T, dim=1).load(sums_layout(T))
    sums = ()
    for p in gl.static_range(len(PARTS)):
        sums = sums + ((accs[p] + done) if p == PART else accs[p],)  # noqa: RUF005
    return sums


@gluon.jit
def _add_stage(
    accs, bytes, stored, less, next_less, rings, step, last, LOWER: gl.constexpr, GROUPS: gl.constexpr,
    PARTS: gl.constexpr, BLOCKS: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Add the products of a stage to sums: those of each of its groups of columns, times its scale.

    While the unit multiplies, what comes next is decoded. After the last stage that is whatever
    lies there. Codes are integers from one stage to the next: Triton would take others apart, one
    by one.
    """
    codes, of_tokens, full, empty = rings
    STAGES: gl.constexpr = full.shape[0]
    JOBS: gl.constexpr = GROUPS * len(PARTS)
    DEPTH: gl.constexpr = min(2 * JOBS, in_flight(PARTS, BLOCKS))
    FIRST: gl.constexpr = min(JOBS, DEPTH)
    stage = step % STAGES
    operands = _operands(bytes, GROUPS, PARTS[0])
    place = of_tokens[0].index(2 * stage)
    begun = ()
    for j in gl.static_range(FIRST):
        begun = begun + (_start(operands, place, j, PARTS),)  # noqa: RUF005
    right_parts = _decode(codes, stage, less, 1, LOWER, W, ACT)
    right_operands = _operands(_bytes(right_parts, W), GROUPS, PARTS[0])
    right_place = of_tokens[0].index(2 * stage + 1)
    for j in gl.static_range(FIRST, DEPTH):
        begun = begun + (_start(right_operands, right_place, j - JOBS, PARTS),)  # noqa: RUF005
    next_stage = (step + 1) % STAGES
    parts = ()
    for j in gl.static_range(2 * JOBS):
        if j == 2 * JOBS - FIRST:
            mbarrier.wait(full.index(next_stage), (step + 1) // STAGES & 1, pred=step != last)
            parts = _decode(codes, next_stage, next_less, 0, LOWER, W, ACT)
        begun = _wait(begun)
        accs = _add(accs, begun[0], stored, of_tokens, stage, j // JOBS, j % JOBS, GROUPS, PARTS, W)
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
def _no_sums(PARTS: gl.constexpr):
    accs = ()
    for p in gl.static_range(len(PARTS)):
        accs = accs + (gl.zeros([ROWS // 2, PARTS[p]], gl.float32, sums_layout(PARTS[p])),)  # noqa: RUF005
    return accs


@gluon.jit
def _multiply(
    rings, step, steps, sizes, scales, tile, LOWER: gl.constexpr, PARTS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The sums of a consumer's rows of W with the tokens of a tile, in parts of so many; and what
    `nan_words` saw."""
    w_scale_ptr, w_zero_ptr, _, _ = scales
    codes, _, full, _ = rings
    W: gl.constexpr = HOW[0]
    ACT: gl.constexpr = HOW[-1]
    GROUPS: gl.constexpr = max(fragments.groups_of(W), HOW[2] // 2)
    accs = _no_sums(PARTS)
    at = fragments.factors_at(tile, sizes, LOWER, W, ACT)
    seen = at[1] * 0
    stored = fragments.load_factors(w_scale_ptr, at, 0, W)
    zeros = _load_zeros(w_zero_ptr, at, 0, W)
    mbarrier.wait(full.index(step % full.shape[0]), step // full.shape[0] & 1)
    bytes = _bytes(_decode(codes, step % full.shape[0], zeros, 0, LOWER, W, ACT), W)
    last = step + steps - 1
    for i in range(steps):
        further = fragments.load_factors(w_scale_ptr, at, i + 1, W)
        further_zeros = _load_zeros(w_zero_ptr, at, i + 1, W)
        words = fragments.as_words(stored, W)
        seen = fragments.nan_words(seen, words, W)
        accs, bytes = _add_stage(
            accs, bytes, words, zeros, further_zeros, rings, step + i, last, LOWER, GROUPS, PARTS,
            HOW[1].blocks, W, ACT,
        )  # fmt: skip
        stored, zeros = further, further_zeros
    return accs, seen


@gluon.jit
def _decode_folded(codes, stage, more, LOWER: gl.constexpr, ACT: gl.constexpr):
    """Of the units of a stage what `_signed` takes, of which scales are a part."""
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
    codes, of_tokens, full, empty = rings
    STAGES: gl.constexpr = full.shape[0]
    stage = step % STAGES
    left = _operands((bytes[0], bytes[1], bytes[2], bytes[3]), 1, PARTS[0], gl.float8e5)[0]
    right = _operands((bytes[4], bytes[5], bytes[6], bytes[7]), 1, PARTS[0], gl.float8e5)[0]
    begun = ()
    for p in gl.static_range(len(PARTS)):
        product = _start_half(None, left, of_tokens[0].index(2 * stage), p, PARTS)
        product = _start_half(product, right, of_tokens[0].index(2 * stage + 1), p, PARTS)
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
def _multiply_folded(
    rings, step, steps, sizes, scales, reference, tile, LOWER: gl.constexpr, PARTS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """The sums of `_multiply` where the scales of each row are near each other, without the last
    factor of the row: powers of two, which become part of the codes."""
    codes, _, full, _ = rings
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


@gluon.jit
def _biased(sums, bias_ptr, expert, row, inside, N):
    """Sums [rows, tokens] and the biases of their rows."""
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + expert.to(gl.int64) * N + row, mask=inside, other=0.0)
        sums += bias.to(gl.float32)[:, None]
    return sums


@gluon.jit
def _activated(sums, bias_ptr, expert, n, sizes, LOWER: gl.constexpr, ACT: gl.constexpr):
    """Outputs [columns, tokens] of sums [64, tokens], 0 in columns that are not there."""
    N, _, out_n, _ = sizes
    T: gl.constexpr = sums.shape[1]
    first = fragments.first_column(n, LOWER, ACT.gated)
    if ACT.gated:
        gate, up = sums.reshape([4, 2, 8, T]).permute([0, 2, 3, 1]).split()
        gate, up = gate.reshape([32, T]), up.reshape([32, T])
        column = first + gl.arange(0, 32, gl.SliceLayout(1, gate.type.layout))
        inside = column < out_n
        row = 2 * column if ACT.interleaved else column
        gate = _biased(gate, bias_ptr, expert, row, inside, N)
        up = _biased(up, bias_ptr, expert, row + (1 if ACT.interleaved else out_n), inside, N)
        out = activate_gated(gate, up, ACT)
    else:
        column = first + gl.arange(0, ROWS // 2, gl.SliceLayout(1, sums.type.layout))
        inside = column < out_n
        out = _biased(sums, bias_ptr, expert, column, inside, N)
        if ACT.kind is not None:
            out = activate(out, ACT)
    return gl.where(inside[:, None], out, 0.0)


@gluon.jit
def _store(sums, output, tile, sizes, LOWER: gl.constexpr, ACT: gl.constexpr):
    """Outputs of sums of some tokens; h in the order of `in_float8_order`."""
    expert, end, row, n = tile
    bias_ptr, out_ptr = output
    width = sizes[3]
    T: gl.constexpr = sums.shape[1]
    out = _activated(sums, bias_ptr, expert, n, sizes, LOWER, ACT).to(out_ptr.dtype.element_ty)
    C: gl.constexpr = out.shape[0]
    if ACT.kind is not None:
        out = out.reshape([C // 32, 16, 2, T]).permute([0, 2, 1, 3]).reshape([C, T])
    # A thread has eight places of a token.
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [C // 8, 256 // C], [1, gl.num_warps()], [0, 1])
    out = gl.convert_layout(out, layout)
    place = fragments.first_column(n, LOWER, ACT.gated)
    place += gl.arange(0, C, gl.SliceLayout(1, layout))
    t = gl.arange(0, T, gl.SliceLayout(0, layout))
    row_T = out_ptr + (row + t).to(gl.int64) * width
    # The width is a multiple of 16.
    mask = (place // 16 < width // 16)[:, None] & (row + t < end)[None, :]
    gl.store(row_T[None, :] + place[:, None], out, mask=mask)


@gluon.jit
def _scaled(sums, row_scale, x_scale_ptr, row, end, ONE: gl.constexpr):
    """Sums of tokens from `row` on, times what is common to all their columns: scales of rows of W
    or None, those of tokens, and a constant."""
    T: gl.constexpr = sums.shape[1]
    if x_scale_ptr is not None:
        t = gl.arange(0, T, gl.SliceLayout(0, sums_layout(T)))
        x_scale = gl.load(x_scale_ptr + row + t, mask=row + t < end, other=0.0)
        sums = sums * (x_scale * ONE)[None, :]
    elif ONE != 1.0:
        sums = sums * ONE
    if row_scale is not None:
        sums = sums * fragments.of_rows(row_scale, T)
    return sums


@gluon.jit
def _store_all(
    accs, row_scale, output, tile, sizes, scales, LOWER: gl.constexpr, PARTS: gl.constexpr,
    ONE: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Store the outputs of all sums of a tile."""
    expert, end, row, n = tile
    for p in gl.static_range(len(PARTS)):
        sums = _scaled(accs[p], row_scale, scales[2], row, end, ONE)
        _store(sums, output, (expert, end, row, n), sizes, LOWER, ACT)
        row += PARTS[p]


@gluon.jit
def _run_plain(
    LOWER: gl.constexpr, step, k_steps, tile, output, rings, sizes, scales, PARTS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """Multiply and store a consumer's rows of W of a tile with at most so many tokens."""
    W: gl.constexpr = HOW[0]
    ACT: gl.constexpr = HOW[-1]
    accs, seen = _multiply(rings, step, k_steps, sizes, scales, tile, LOWER, PARTS, HOW)
    row_scale = None
    if W.across == -1:
        at = fragments.factors_at(tile, sizes, LOWER, W, ACT)
        stored = fragments.load_factors(scales[0], at, 0, W)
        row_scale = fragments.scale_at(stored, 0, 1, W)
    elif fragments.in_words(W):
        row_scale = gl.where((seen & -0x7F7F7F80) != 0, float("nan"), 1.0)
    ONE: gl.constexpr = to_float8.of_one(W)
    _store_all(accs, row_scale, output, tile, sizes, scales, LOWER, PARTS, ONE, ACT)


@gluon.jit
def _run_tile(
    LOWER: gl.constexpr, step, k_steps, tile, output, rings, sizes, scales, PARTS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """`_run_plain`, or with scales that are part of codes where those of all rows can be."""
    ACT: gl.constexpr = HOW[-1]
    if scales[3] is None:
        _run_plain(LOWER, step, k_steps, tile, output, rings, sizes, scales, PARTS, HOW)
    else:
        reference = fragments.row_references(scales[3], tile, sizes, LOWER, ACT)
        if gl.min(reference, 0) > 0:
            accs = _multiply_folded(
                rings, step, k_steps, sizes, scales, reference, tile, LOWER, PARTS, HOW
            )  # fmt: skip
            # 2**-127 is subnormal.
            bits = gl.maximum((reference - 1) << 23, 1 << 22)
            row_scale = bits.to(gl.float32, bitcast=True)
            _store_all(
                accs, row_scale, output, tile, sizes, scales, LOWER, PARTS, 2.0**-13, ACT
            )  # fmt: skip
        else:
            _run_plain(LOWER, step, k_steps, tile, output, rings, sizes, scales, PARTS, HOW)


@gluon.jit
def _product(
    LOWER: gl.constexpr, step, k_steps, tile, pending, output, buffers, rings, sizes, scales,
    HOW: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of W of a tile, with those quarters, halves or all of its tokens that have
    rows."""
    _, end, row, _ = tile
    TOKENS: gl.constexpr = HOW[1].tokens
    if TOKENS == 128:
        if row + 96 < end:
            _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (64, 64), HOW)
        elif row + 64 < end:
            _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (64, 32), HOW)
        elif row + 32 < end:
            _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (64,), HOW)
        else:
            _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (32,), HOW)
    elif TOKENS > 16:
        PART: gl.constexpr = TOKENS // 2
        if row + PART < end:
            _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (TOKENS,), HOW)
        else:
            _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (PART,), HOW)
    else:
        _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (TOKENS,), HOW)
    return pending


@gluon.jit(do_not_specialize=["n_tiles"])
def _grouped_float8_tokens(
    x_desc, x_scale_desc, x_scale_ptr, w_desc, up_desc, w_scale_ptr, w_zero_ptr, reference_ptr,
    bias_ptr, out_ptr, tiles_ptr, N, K, n_tiles, out_n, width, W: gl.constexpr, EACH: gl.constexpr,
    ACT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    dealt = first_tile(tiles_ptr, n_tiles, TOKENS)
    tokens = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, TOKENS, HALF], x_desc.layout)
    of_tokens = (tokens,)
    if EACH > 0:
        of_scales: gl.constexpr = x_scale_desc.layout
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, EACH], of_scales)
        of_tokens = (tokens, x_scales)
    codes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, ROWS // 2, 32], w_desc.layout)
    source = (x_desc, x_scale_desc, w_desc, up_desc)
    specialize(
        dealt, (codes, of_tokens), source, (bias_ptr, out_ptr), (None, None),
        (N, K, out_n, width), (w_scale_ptr, w_zero_ptr, x_scale_ptr, reference_ptr), _boxes_of_tile, _copy, None,
        _product, TOKENS, STEP, 1, STAGES=STAGES, WARPS=1, AHEAD=(3, 2, 1),
        HOW=(W, TILE, EACH, ACT), BLOCKS=TILE.blocks,
    )  # fmt: skip


def launch(
    x_RK: Tensor, x_scale: Tensor, w_ENW: Tensor, w_scale: Tensor, w_zero: Tensor | None,
    bias_EN: Tensor | None, out: Tensor, tiles: TileMap, tile: Float8Tile, weight: Weight, act: Act,
) -> None:  # fmt: skip
    """Run one product over sorted rows of codes in the order of `in_float8_order`, by scales of
    rows [R], or of each 32 columns [R, multiple of 8]; its output is in that order if `act` has a
    kind. The backend says which layers it takes."""
    _, N, words = w_ENW.shape
    gated, width, x_scale_desc, each = act.gated, out.shape[1], None, 0
    reference_EN = None
    if weight.kind == "e8m0" and weight.across == 32:
        if tile.fold and x_scale.dim() == 1:
            reference_EN = references(w_scale)
        w_scale = as_long_words(w_scale)
    if x_scale.dim() == 2:
        each, plain = 2 * UNITS.value, gl.NVMMASharedLayout(0, 32, rank=2)
        x_scale_desc = TensorDescriptor.from_tensor(x_scale, [tile.tokens, each], plain)
    skeleton.launch(
        _grouped_float8_tokens, x_RK, skeleton.boxes(x_RK, box_of(tile.tokens), HALF.value),
        x_scale_desc, None if each else x_scale, *_boxed(w_ENW, act.interleaved), w_scale, w_zero,
        reference_EN, None if bias_EN is None else bias_EN.contiguous(), out, tiles.table, N,
        words * 8, triton.cdiv(width, ROWS.value // 2 if gated else ROWS.value),
        N // 2 if gated else N, width, weight, each, act, tile, blocks=tile.blocks,
    )  # fmt: skip


def as_long_words(scale_ENG: Tensor) -> Tensor:
    """Scales of eight bits in the longest words that those of a row fill."""
    groups = scale_ENG.shape[2]
    if groups % 8 == 0:
        return scale_ENG.view(torch.int64)
    return scale_ENG.view(torch.int32) if groups % 4 == 0 else scale_ENG


def _boxed(w_ENW: Tensor, interleaved: bool) -> list[TensorDescriptor]:
    """What the left and the right boxes of codes are copied from."""
    w = w_ENW.view(-1, w_ENW.shape[2])
    pair = (w[::2], w[1::2]) if interleaved else (w, w)
    bytes_128 = gl.NVMMASharedLayout(128, 32, rank=2)
    return [TensorDescriptor.from_tensor(t, [ROWS.value // 2, 32], bytes_128) for t in pair]


def _run_product(c: Call, x: Operand, stack: Stack, out: Tensor, act: Act) -> None:
    w, scale, zero, _, bias = stack
    assert c.layer.codes is not None and x.scale is not None and scale is not None
    words, weight = w.view(torch.int32), c.layer.codes.weight
    launch(x.values, x.scale, words, scale, zero, bias, out, c.tile_map, c.tiles, weight, act)


run = Products(
    up=lambda c: _run_product(c, c.x, c.layer.stack13, c.h.values, c.layer.act),
    down=lambda c: _run_product(c, c.h, c.layer.stack2, c.out, LINEAR),
    reads=Reads(gathered=True, float8=True),
    tile_rows=lambda c, _: c.tiles.tokens,
).run
