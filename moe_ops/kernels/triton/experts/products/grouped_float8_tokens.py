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
from moe_ops.kernels.triton.experts.products import skeleton
from moe_ops.kernels.triton.experts.products.float8_tile import Float8Tile
from moe_ops.kernels.triton.experts.products.fragments_float8 import ROWS, STEP, UNITS, sums_layout
from moe_ops.kernels.triton.experts.products.hopper import tma_load
from moe_ops.kernels.triton.experts.products.skeleton import first_tile, specialize
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.experts.weights import Stack


@gluon.constexpr_function
def box_of(tokens):
    """How many tokens of a tile one copy takes."""
    return max(16, tokens // 2)


@gluon.constexpr_function
def in_flight(tokens):
    """Products of so many tokens that are under way at once, whose sums have room in registers."""
    return 2 if tokens == 64 else 4


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
    tma_load(left_desc, [left, i * 16], bar, codes.index(2 * stage))
    tma_load(right_desc, [right, i * 16], bar, codes.index(2 * stage + 1))
    if EACH > 0:
        # What lies side by side begins at a multiple of 16 bytes, which rows do not.
        tma_load(x_scale_desc, [tile[2], i * EACH], bar, of_tokens[1].index(stage))
    for b in gl.static_range(TOKENS // PART):
        place = tokens.index(stage).slice(b * PART, PART)
        tma_load(x_desc, [tile[2] + b * PART, i * STEP], bar, place, pred=b < filled)


@gluon.jit
def _start(operands, tokens, JOB: gl.constexpr, CHUNKS: gl.constexpr, T: gl.constexpr):
    """Start the product of a group of columns and T tokens."""
    GROUP: gl.constexpr = JOB // CHUNKS
    COLUMNS: gl.constexpr = operands[0].shape[1]
    b = tokens.slice(JOB % CHUNKS * T, T).slice(GROUP * COLUMNS, COLUMNS, dim=1).permute([1, 0])
    none = gl.zeros([ROWS // 2, T], gl.float32, sums_layout(T))
    return warpgroup_mma(operands[GROUP], b, none, use_acc=False, is_async=True)


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
def _bytes(parts, W: gl.constexpr):
    """Codes of e4m3 of a stage, four in each int32, of what `parted` gave of its words."""
    found = ()
    for u in gl.static_range(UNITS):
        first, last = parts[u]
        both = (to_float8.joined(first, W), to_float8.joined(last, W))
        found = found + (both,)  # noqa: RUF005
    return found


@gluon.jit
def _operands(codes, GROUPS: gl.constexpr, T: gl.constexpr):
    """The first operands of a stage [64, columns], one of each group of columns."""
    LAYOUT: gl.constexpr = sums_layout(T)
    first = fragments.operand_of(codes[0], LAYOUT)
    second = fragments.operand_of(codes[1], LAYOUT)
    third = fragments.operand_of(codes[2], LAYOUT)
    fourth = fragments.operand_of(codes[3], LAYOUT)
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
def _decode_first(rings, step, less, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
    """The codes of a tile's first stage, as `_add_stage` takes them."""
    codes, _, full, _ = rings
    stage = step % full.shape[0]
    mbarrier.wait(full.index(stage), step // full.shape[0] & 1)
    words = fragments.load_words(codes, stage, LOWER, ACT.gated)
    parts = ()
    for u in gl.static_range(UNITS):
        parts = parts + (fragments.parted_unit(words, less, u, W),)  # noqa: RUF005
    return _bytes(parts, W)


@gluon.jit
def _add_stage(
    accs, bytes, stored, less, rings, step, last, LOWER: gl.constexpr, GROUPS: gl.constexpr,
    T: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """Add the products of a stage to sums: those of each of its groups of columns, times its scale.

    While the unit multiplies, the next stage is decoded, but for what writes to the unit's
    operands: see `grouped_registers.py`. After the last stage that is whatever lies there. Codes
    are integers from one stage to the next: Triton would take others apart, one by one.
    """
    codes, of_tokens, full, empty = rings
    tokens = of_tokens[0]
    STAGES: gl.constexpr = full.shape[0]
    EACH: gl.constexpr = of_tokens[1].shape[2] if len(of_tokens) == 2 else 0
    CHUNKS: gl.constexpr = len(accs)
    JOBS: gl.constexpr = GROUPS * CHUNKS
    # What is rarely taken leaves registers to the other way: it decodes when all sums are done.
    RARE: gl.constexpr = FOLD and GROUPS == UNITS
    DEPTH: gl.constexpr = 1 if (FOLD and CHUNKS > 2) or (RARE and T == 64) else min(JOBS, in_flight(T))
    SCALED: gl.constexpr = W.across != -1
    operands = _operands(bytes, GROUPS, T)
    place = tokens.index(step % STAGES)
    begun = ()
    for j in gl.static_range(DEPTH):
        begun = begun + (_start(operands, place, j, CHUNKS, T),)  # noqa: RUF005
    next_stage = (step + 1) % STAGES
    mbarrier.wait(full.index(next_stage), (step + 1) // STAGES & 1, pred=step != last)
    words = fragments.load_words(codes, next_stage, LOWER, ACT.gated)
    parts = ()
    for j in gl.static_range(JOBS):
        for u in gl.static_range(UNITS):
            if u * JOBS // UNITS == j and not RARE:
                parts = parts + (fragments.parted_unit(words, less, u, W),)  # noqa: RUF005
        begun = _wait(begun)
        done = begun[0]
        if SCALED:
            done = done * fragments.scale_at(stored, j // CHUNKS, GROUPS, W)[:, None]
        if EACH > 0:
            of_x = of_tokens[1].index(step % STAGES).permute([1, 0]).slice(j // CHUNKS, 1)
            done = done * of_x.slice(j % CHUNKS * T, T, dim=1).load(sums_layout(T))
        sums = ()
        for c in gl.static_range(CHUNKS):
            sums = sums + ((accs[c] + done) if c == j % CHUNKS else accs[c],)  # noqa: RUF005
        accs = sums
        rest = ()
        for s in gl.static_range(1, len(begun)):
            rest = rest + (begun[s],)  # noqa: RUF005
        if j + DEPTH < JOBS:
            rest = rest + (_start(operands, place, j + DEPTH, CHUNKS, T),)  # noqa: RUF005
        begun = rest
    mbarrier.arrive(empty.index(step % STAGES))
    if RARE:
        for u in gl.static_range(UNITS):
            parts = parts + (fragments.parted_unit(words, less, u, W),)  # noqa: RUF005
    return accs, _bytes(parts, W)


@gluon.jit
def _no_sums(CHUNKS: gl.constexpr, T: gl.constexpr):
    accs = ()
    for _ in gl.static_range(CHUNKS):
        accs = accs + (gl.zeros([ROWS // 2, T], gl.float32, sums_layout(T)),)  # noqa: RUF005
    return accs


@gluon.jit
def _multiply(
    rings, step, steps, sizes, scales, tile, LOWER: gl.constexpr, CHUNKS: gl.constexpr,
    T: gl.constexpr, W: gl.constexpr, EACH: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """The sums of a consumer's rows of W with the tokens of a tile, T at a time."""
    w_scale_ptr, w_zero_ptr, _ = scales
    GROUPS: gl.constexpr = max(fragments.groups_of(W), EACH)
    accs = _no_sums(CHUNKS, T)
    layout: gl.constexpr = gl.SliceLayout(1, sums_layout(T))
    at = fragments.factors_at(tile, sizes, LOWER, W, ACT, layout)
    stored = fragments.load_factors(w_scale_ptr, at, 0, W)
    bytes = _decode_first(rings, step, _load_zeros(w_zero_ptr, at, 0, W), LOWER, W, ACT)
    zeros = _load_zeros(w_zero_ptr, at, 1, W)
    last = step + steps - 1
    for i in range(steps):
        further = fragments.load_factors(w_scale_ptr, at, i + 1, W)
        further_zeros = _load_zeros(w_zero_ptr, at, i + 2, W)
        accs, bytes = _add_stage(
            accs, bytes, stored, zeros, rings, step + i, last, LOWER, GROUPS, T, W, ACT, False
        )  # fmt: skip
        stored, zeros = further, further_zeros
    return accs


@gluon.jit
def _multiply_folded(
    rings, step, steps, sizes, scales, tile, LOWER: gl.constexpr, CHUNKS: gl.constexpr,
    T: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """The sums of `_multiply`, of weights whose scales are powers of two. Where those of a stage are
    near each other in all rows of a consumer, they are part of the codes, but for one of each row,
    and the stage makes one sum; else it is multiplied as there. Scales are loaded three stages
    ahead, so that two ahead it is known which."""
    w_scale_ptr, _, _ = scales
    accs = _no_sums(CHUNKS, T)
    layout: gl.constexpr = gl.SliceLayout(1, sums_layout(T))
    at = fragments.factors_at(tile, sizes, LOWER, W, ACT, layout)
    first = fragments.four_scales(w_scale_ptr, at, 0, W)
    second = fragments.four_scales(w_scale_ptr, at, 1, W)
    third = fragments.four_scales(w_scale_ptr, at, 2, W)
    largest, next_largest = fragments.largest_of(first), fragments.largest_of(second)
    near = fragments.are_near(first, largest)
    next_near = fragments.are_near(second, next_largest)
    tables = fragments.tables_of(first, largest, near)
    bytes = _decode_first(rings, step, tables, LOWER, W, ACT)
    last = step + steps - 1
    for i in range(steps):
        fourth = fragments.four_scales(w_scale_ptr, at, i + 3, W)
        tables = fragments.tables_of(second, next_largest, next_near)
        if near:
            accs, bytes = _add_stage(
                accs, bytes, (first, largest), tables, rings, step + i, last, LOWER, 1, T, W, ACT,
                True,
            )  # fmt: skip
        else:
            accs, bytes = _add_stage(
                accs, bytes, (first, largest), tables, rings, step + i, last, LOWER, UNITS, T, W,
                ACT, True,
            )  # fmt: skip
        near, largest = next_near, next_largest
        next_largest = fragments.largest_of(third)
        next_near = fragments.are_near(third, next_largest)
        first, second, third = second, third, fourth
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
        out = out.reshape([C // 32, 4, 2, 4, T]).permute([0, 2, 1, 3, 4]).reshape([C, T])
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
def _run_tile(
    LOWER: gl.constexpr, step, k_steps, tile, output, rings, sizes, scales, CHUNKS: gl.constexpr,
    T: gl.constexpr, W: gl.constexpr, EACH: gl.constexpr, ACT: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    """Multiply and store a consumer's rows of W of a tile with at most so many tokens."""
    expert, end, row, n = tile
    w_scale_ptr, _, x_scale_ptr = scales
    if fragments.folds(W) and FOLD and EACH < UNITS:
        accs = _multiply_folded(
            rings, step, k_steps, sizes, scales, tile, LOWER, CHUNKS, T, W, ACT
        )  # fmt: skip
    else:
        accs = _multiply(
            rings, step, k_steps, sizes, scales, tile, LOWER, CHUNKS, T, W, EACH, ACT
        )  # fmt: skip
    LAYOUT: gl.constexpr = sums_layout(T)
    t = gl.arange(0, T, gl.SliceLayout(0, LAYOUT))
    for c in gl.static_range(CHUNKS):
        sums = accs[c]
        if x_scale_ptr is not None:
            x_scale = gl.load(x_scale_ptr + row + t, mask=row + t < end, other=0.0)
            sums = sums * (x_scale * to_float8.of_one(W))[None, :]
        elif to_float8.of_one(W) != 1.0:
            sums = sums * to_float8.of_one(W)
        if W.across == -1:
            at = fragments.factors_at(tile, sizes, LOWER, W, ACT, gl.SliceLayout(1, LAYOUT))
            stored = fragments.load_factors(w_scale_ptr, at, 0, W)
            sums = sums * fragments.scale_at(stored, 0, 1, W)[:, None]
        _store(sums, output, (expert, end, row, n), sizes, LOWER, ACT)
        row += T


@gluon.jit
def _product(
    LOWER: gl.constexpr, step, k_steps, tile, pending, output, buffers, rings, sizes, scales,
    HOW: gl.constexpr,
):  # fmt: skip
    """A consumer's rows of W of a tile."""
    _, end, row, _ = tile
    W: gl.constexpr = HOW[0]
    TOKENS: gl.constexpr = HOW[1].tokens
    ACT: gl.constexpr = HOW[-1]
    EACH: gl.constexpr = HOW[2]
    FOLD: gl.constexpr = HOW[1].fold
    T: gl.constexpr = min(TOKENS, 64)
    CHUNKS: gl.constexpr = TOKENS // T
    PART: gl.constexpr = box_of(TOKENS)
    if row + PART < end or TOKENS == PART:
        _run_tile(
            LOWER, step, k_steps, tile, output, rings, sizes, scales, CHUNKS, T, W, EACH, ACT, FOLD
        )  # fmt: skip
    elif CHUNKS > 1:
        HALF: gl.constexpr = CHUNKS // 2
        _run_tile(
            LOWER, step, k_steps, tile, output, rings, sizes, scales, HALF, T, W, EACH, ACT, FOLD
        )  # fmt: skip
    else:
        _run_tile(
            LOWER, step, k_steps, tile, output, rings, sizes, scales, 1, PART, W, EACH, ACT, FOLD
        )  # fmt: skip
    return pending


@gluon.jit(do_not_specialize=["n_tiles"])
def _grouped_float8_tokens(
    x_desc, x_scale_desc, x_scale_ptr, w_desc, up_desc, w_scale_ptr, w_zero_ptr, bias_ptr, out_ptr,
    tiles_ptr, N, K, n_tiles, out_n, width, W: gl.constexpr, EACH: gl.constexpr,
    ACT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    dealt = first_tile(tiles_ptr, n_tiles, TOKENS)
    tokens = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, STEP], x_desc.layout)
    of_tokens = (tokens,)
    if EACH > 0:
        of_scales: gl.constexpr = x_scale_desc.layout
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, TOKENS, EACH], of_scales)
        of_tokens = (tokens, x_scales)
    codes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, ROWS // 2, 16], w_desc.layout)
    source = (x_desc, x_scale_desc, w_desc, up_desc)
    specialize(
        dealt, (codes, of_tokens), source, (bias_ptr, out_ptr), (None, None),
        (N, K, out_n, width), (w_scale_ptr, w_zero_ptr, x_scale_ptr), _boxes_of_tile, _copy, None,
        _product, TOKENS, STEP, 1, STAGES=STAGES, WARPS=1, AHEAD=(3, 2, 1),
        HOW=(W, TILE, EACH, ACT), BLOCKS=TILE.blocks,
    )  # fmt: skip


def launch(
    x_RK: Tensor, x_scale: Tensor, w_ENW: Tensor, w_scale: Tensor, w_zero: Tensor | None,
    bias_EN: Tensor | None, out: Tensor, tiles: TileMap, tile: Float8Tile, weight: Weight, act: Act,
) -> None:  # fmt: skip
    """Run one product over sorted rows of codes in the order of `in_float8_order`, by scales of
    rows [R], or of each 32 columns [R, multiple of 4]; its output is in that order if `act` has a
    kind. The backend says which layers it takes."""
    _, N, words = w_ENW.shape
    gated, width, x_scale_desc, each = act.gated, out.shape[1], None, 0
    if weight.kind == "e8m0" and weight.across == 32 and w_scale.shape[2] % 4 == 0:
        w_scale = w_scale.view(torch.int32)
    if x_scale.dim() == 2:
        each, plain = UNITS.value, gl.NVMMASharedLayout(0, 32, rank=2)
        x_scale_desc = TensorDescriptor.from_tensor(x_scale, [tile.tokens, each], plain)
    skeleton.launch(
        _grouped_float8_tokens, x_RK, skeleton.boxes(x_RK, box_of(tile.tokens), STEP.value),
        x_scale_desc, None if each else x_scale, *_boxed(w_ENW, act.interleaved), w_scale, w_zero,
        None if bias_EN is None else bias_EN.contiguous(), out, tiles.table, N, words * 8,
        triton.cdiv(width, ROWS.value // 2 if gated else ROWS.value), N // 2 if gated else N, width,
        weight, each, act, tile, blocks=tile.blocks,
    )  # fmt: skip


def _boxed(w_ENW: Tensor, interleaved: bool) -> list[TensorDescriptor]:
    """What the left and the right boxes of codes are copied from."""
    w = w_ENW.view(-1, w_ENW.shape[2])
    pair = (w[::2], w[1::2]) if interleaved else (w, w)
    bytes_64 = gl.NVMMASharedLayout(64, 32, rank=2)
    return [TensorDescriptor.from_tensor(t, [ROWS.value // 2, 16], bytes_64) for t in pair]


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
