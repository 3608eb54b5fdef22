"""The experts for many rows an expert of weights of four to eight bits, with inputs of 16, on
Hopper (sm_90): a persistent, warp-specialised kernel in Gluon that decodes weights where they are
multiplied.

The matrix unit takes its first operand from registers, so weights are the first and tokens the
second one: a tile is 128 rows of W by 16 to 256 tokens (`CodesTile`), and what it makes is stored
transposed. A stage has one or two halves of 64 columns. Each consumer decodes 64 rows of W and
multiplies them by all tokens: while the unit multiplies one half of a stage, the next one is
decoded. Arithmetic is spent on whole 64 tokens of a tile of 256, and on halves of one of 64 or 128.

Few tokens leave room for many stages, that is for many codes on their way from memory; or for two
blocks on a processor, of which one decodes while the other waits. A row is multiplied and added up
in the same order whatever the tile, so its bits depend neither on that nor on other rows.

    rows of x   in the order of experts, their columns in that of `column_at`: so is h
    first       h: the gate and up values of one column are in one thread
    second      y, which is summed by token

A box of codes has 16 rows of W of each of four groups, of 16 rows, or 32 of codes of four bits.
Warp a of a consumer has rows of group a: 8 of the gates and the same of the up values, or where
there are no gates 16. So h comes in runs of at least 32 places. Codes of six bits come without
boxes (`fragments.py`), of rows as those of four.

What the functions below share is as in `skeleton.py`, and
    rings   stages of codes (two boxes each; of six bits a pointer), halves of stages of tokens;
            barriers
    sizes   rows of W per expert; K; columns of the output, and those that it is stored with
    scales  scales and zero points of W
    output  global scales of experts or None, those of up where it has others than the gate, bias
            or None, pointer
    tile    has tokens for rows
    W       the format of the weight, as in `block_steps.py`
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
from moe_ops.kernels.triton.experts.formats.scales import rescaled, under_global
from moe_ops.kernels.triton.experts.products import fragments, skeleton
from moe_ops.kernels.triton.experts.products.fragments import ROWS
from moe_ops.kernels.triton.experts.products.grouped_tile import CodesTile
from moe_ops.kernels.triton.experts.products.hopper import cut, tma_load
from moe_ops.kernels.triton.experts.products.skeleton import first_tile, specialize
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.experts.weights import Stack

BOX = gl.constexpr(64)  # columns that one copy of tokens takes


@gluon.constexpr_function
def box_of(tokens):
    """How many tokens of a tile one copy takes."""
    return 64 if tokens == 256 else min(tokens, 32)


@gluon.constexpr_function
def sums_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.jit
def _boxes(expert, n, sizes, W: gl.constexpr, ACT: gl.constexpr):
    """Where the boxes of a tile's rows of W begin: group and row in it, of the left and the right
    one."""
    groups = sizes[0] // fragments.group_of(W)
    if ACT.gated:
        # The up values of a tile's gates are beside them.
        group = expert * (groups // 2 if ACT.interleaved else groups)
        if W.bits == 4:
            group += n // 2 * 4
            row = n % 2 * 16
        else:
            group += n * 4
            row = 0 * n
        return group, row, group if ACT.interleaved else group + groups // 2, row
    elif W.bits == 4:
        group = expert * groups + n * 4
        return group, 0, group, 16
    else:
        group = expert * groups + n * 8
        return group, 0, group + 4, 0


@gluon.jit
def boxes_of_tile(slot, tile, source, rings, sizes, HOW: gl.constexpr):
    """The boxes of a tile's rows of W, and how many its tokens fill."""
    expert, end, row, n = tile
    W: gl.constexpr = HOW[0]
    TOKENS: gl.constexpr = HOW[1].tokens
    PART: gl.constexpr = box_of(TOKENS)
    of_codes = ()
    if W.bits != 6:
        of_codes = _boxes(expert, n, sizes, W, HOW[-1])
    return of_codes, gl.minimum(gl.cdiv(end - row, PART), TOKENS // PART)


@gluon.jit
def copy(i, bar, stage, tile, at, source, rings, sizes, HOW: gl.constexpr):
    """A step of codes and of tokens."""
    codes, tokens, _, _ = rings
    x_desc, left, right = source
    of_codes, filled = at
    W: gl.constexpr = HOW[0]
    TOKENS: gl.constexpr = HOW[1].tokens
    PART: gl.constexpr = box_of(TOKENS)
    STEP: gl.constexpr = fragments.columns_of(W)
    HALVES: gl.constexpr = fragments.halves_of(W)
    BOXED: gl.constexpr = W.bits != 6
    CODES: gl.constexpr = ROWS * 64 if BOXED else 0
    X: gl.constexpr = 2 * PART * STEP
    for b in gl.static_range(TOKENS // PART):
        mbarrier.expect(bar, CODES + (b + 1) * X, pred=filled == b + 1)
    if BOXED:
        group, sub, right_group, right_sub = of_codes
        tma_load(left, [group, sub, i * 16], bar, codes.index(2 * stage))
        tma_load(right, [right_group, right_sub, i * 16], bar, codes.index(2 * stage + 1))
    for b in gl.static_range(TOKENS // PART):
        for half in gl.static_range(HALVES):
            place = tokens.index(HALVES * stage + half).slice(b * PART, PART)
            place_at = [tile[2] + b * PART, i * STEP + half * BOX]
            tma_load(x_desc, place_at, bar, place, pred=b < filled)


@gluon.jit
def _no_sums(COUNT: gl.constexpr):
    HALF: gl.constexpr = ROWS // 2
    return gl.zeros([HALF, COUNT], gl.float32, sums_layout(COUNT))


@gluon.jit
def _start_part(acc, values, tokens, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Start the product with COUNT tokens of half a stage, from the first of them on."""
    operand: gl.constexpr = gl.DotOperandLayout(0, sums_layout(COUNT), 2)
    a = gl.convert_layout(values, operand, assert_trivial=True)
    b = tokens.slice(FIRST, COUNT).permute([1, 0])
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def _start(accs, values, rings, half, PARTS: gl.constexpr):
    """Start the products of half a stage with all parts of the tokens."""
    tokens = rings[1].index(half)
    first = _start_part(accs[0], values, tokens, 0, PARTS[0])
    if len(PARTS) == 1:
        return (first,)
    else:
        return first, _start_part(accs[1], values, tokens, PARTS[0], PARTS[1])


@gluon.jit
def _wait(accs, HALVES: gl.constexpr):
    """Wait until the products of at most HALVES halves of a stage are still running."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(HALVES, deps=[accs[0]]),)
    else:
        return warpgroup_mma_wait(2 * HALVES, deps=[accs[0], accs[1]])


@gluon.jit
def _multiply(
    rings, step, steps, sizes, scales, tile, LOWER: gl.constexpr, PARTS: gl.constexpr,
    W: gl.constexpr, ACT: gl.constexpr, begin,
):  # fmt: skip
    """The sums of a consumer's rows of W with the tokens of a tile, in parts of so many tokens;
    over so many steps of columns, from `begin` on."""
    codes, tokens, full, empty = rings
    STAGES: gl.constexpr = full.shape[0]
    DTYPE: gl.constexpr = tokens.dtype
    BOXED: gl.constexpr = W.bits != 6
    GATED: gl.constexpr = ACT.gated
    HALVES: gl.constexpr = fragments.halves_of(W)
    accs = (_no_sums(PARTS[0]),)
    if len(PARTS) == 2:
        accs = accs + (_no_sums(PARTS[1]),)  # noqa: RUF005
    at = fragments.factors_at(tile, sizes, LOWER, W, ACT)
    first_stored = fragments.load_factors(scales, at, begin, W)
    less, pair, right_pair = fragments.factor_pairs(first_stored, W, DTYPE)
    stage = step % STAGES
    if BOXED:
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        words = fragments.load_words(rings, stage, LOWER, W, GATED)
    else:
        codes_at = fragments.sixes_at(codes, tile, sizes, LOWER, W, ACT)
        first = fragments.load_sixes(codes_at, begin)
        ahead = fragments.load_sixes(codes_at, begin + 1)
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        words = fragments.words_of_sixes(first)
    values = fragments.operand_of(fragments.unscaled(words[0], less, W, DTYPE), pair, W, DTYPE)
    for first_step in range(0, steps, fragments.at_once(W)):
        for turn in gl.static_range(fragments.at_once(W)):
            i = first_step + turn
            stored = fragments.load_factors(scales, at, begin + i + 1, W)
            if HALVES == 2:
                accs = _wait(_start(accs, values, rings, 2 * stage, PARTS), 1)
                right_values = fragments.unscaled(words[1], less, W, DTYPE)
                values = fragments.operand_of(right_values, right_pair, W, DTYPE)
            started = _start(accs, values, rings, HALVES * stage + HALVES - 1, PARTS)
            if not BOXED:
                further = fragments.load_sixes(codes_at, begin + i + 2)
            # While the unit multiplies this stage, the next one is decoded, but for what writes to
            # the unit's operands: else the ptxas of Triton 3.6 waits for every instruction of the
            # unit, as any does if products are under way at the end of the loop. After the last
            # stage that is whatever lies there, and not used: to leave it out would double the
            # code.
            less, pair, right_pair = fragments.factor_pairs(stored, W, DTYPE)
            next_stage = (step + i + 1) % STAGES
            phase = (step + i + 1) // STAGES & 1
            mbarrier.wait(full.index(next_stage), phase, pred=i + 1 < steps)
            if BOXED:
                words = fragments.load_words(rings, next_stage, LOWER, W, GATED)
            else:
                words = fragments.words_of_sixes(ahead)
                ahead = further
            started_values = fragments.unscaled(words[0], less, W, DTYPE)
            accs = _wait(started, 0)
            mbarrier.arrive(empty.index(stage))
            values = fragments.operand_of(started_values, pair, W, DTYPE)
            stage = next_stage
    return accs


@gluon.jit
def _biased(sums, bias_ptr, expert, row, inside, N):
    """Sums [rows, tokens] and the biases of their rows."""
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + expert.to(gl.int64) * N + row, mask=inside, other=0.0)
        sums += bias.to(gl.float32)[:, None]
    return sums


@gluon.jit
def _activated(
    sums, output, expert, n, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr
):
    """Outputs [columns, tokens] of sums [64, tokens], 0 in columns that are not there."""
    global_scale_ptr, up_global_scale_ptr, bias_ptr, _ = output
    N, _, out_n, _ = sizes
    T: gl.constexpr = sums.shape[1]
    GROUP: gl.constexpr = fragments.group_of(W)
    first = fragments.first_column(n, LOWER, W, ACT.gated)
    if up_global_scale_ptr is None:
        sums = under_global(sums, global_scale_ptr, expert)
    if ACT.gated:
        gate, up = sums.reshape([4, 2, 8, T]).permute([0, 2, 3, 1]).split()
        gate, up = gate.reshape([32, T]), up.reshape([32, T])
        if up_global_scale_ptr is not None:
            gate = under_global(gate, global_scale_ptr, 2 * expert)
            up = under_global(up, up_global_scale_ptr, 2 * expert)
        m = gl.arange(0, 32, gl.SliceLayout(1, gate.type.layout))
        column = first + m // 8 * GROUP + fragments.column_in(m % 8, W, ACT)
        inside = column < out_n
        row = 2 * column if ACT.interleaved else column
        gate = _biased(gate, bias_ptr, expert, row, inside, N)
        up = _biased(up, bias_ptr, expert, row + (1 if ACT.interleaved else out_n), inside, N)
        out = activate_gated(gate, up, ACT)
    else:
        m = gl.arange(0, ROWS // 2, gl.SliceLayout(1, sums.type.layout))
        column = first + m // 16 * GROUP + fragments.column_in(m % 16, W, ACT)
        inside = column < out_n
        out = _biased(sums, bias_ptr, expert, column, inside, N)
        if ACT.kind is not None:
            out = activate(out, ACT)
    return gl.where(inside[:, None], out, 0.0)


@gluon.jit
def _store(sums, output, tile, sizes, LOWER: gl.constexpr, W: gl.constexpr, ACT: gl.constexpr):
    """Outputs of sums of some tokens; h in the order of `column_at`."""
    expert, end, row, n = tile
    _, _, _, out_ptr = output
    width = sizes[3]
    T: gl.constexpr = sums.shape[1]
    out = _activated(sums, output, expert, n, sizes, LOWER, W, ACT).to(out_ptr.dtype.element_ty)
    C: gl.constexpr = out.shape[0]
    LINEAR: gl.constexpr = ACT.kind is None
    if LINEAR:
        place = fragments.first_column(n, LOWER, W, False)
    else:
        # Groups, eight rows of them, and within these bits, in the order of places.
        out = out.reshape([4, C // 32, 2, 2, 2, T])
        if W.bits == 8:  # noqa: SIM108  (known when this is compiled)
            out = out.permute([1, 2, 3, 0, 4, 5])
        else:
            out = out.permute([1, 3, 4, 0, 2, 5])
        place = n * (2 * C) + C * LOWER
    # Runs of places side by side, in a layout in which a thread has eight of a token.
    RUN: gl.constexpr = 16 if LINEAR and W.bits != 8 else C
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8, 1], [C // RUN, RUN // 8, 256 // C], [1, 1, gl.num_warps()], [1, 0, 2]
    )
    out = gl.convert_layout(out.reshape([C // RUN, RUN, T]), layout)
    run = gl.arange(0, C // RUN, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    c = gl.arange(0, RUN, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    t = gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    place += run[:, None] * 32 + c[None, :]
    row_T = out_ptr + (row + t).to(gl.int64) * width
    # The width is a multiple of 16.
    mask = (place // 16 < width // 16)[:, :, None] & (row + t < end)[None, None, :]
    gl.store(row_T[None, None, :] + place[:, :, None], out, mask=mask)


@gluon.jit
def _run_tile(LOWER: gl.constexpr, given, PARTS: gl.constexpr, HOW: gl.constexpr, begin):
    """Multiply and store a consumer's rows of W of a tile with at most so many tokens."""
    step, k_steps, tile, output, rings, sizes, scales = given
    expert, end, row, n = tile
    W: gl.constexpr = HOW[0]
    ACT: gl.constexpr = HOW[-1]
    # Outputs of so many tokens at a time take the shared memory that is left.
    AT_ONCE: gl.constexpr = 64 if ACT.gated else 32
    accs = _multiply(rings, step, k_steps, sizes, scales, tile, LOWER, PARTS, W, ACT, begin)
    for p in gl.static_range(len(PARTS)):
        pieces = (accs[p],)
        for _ in gl.static_range(3):
            if len(pieces) * AT_ONCE < PARTS[p]:
                pieces = cut(pieces)
        for i in gl.static_range(len(pieces)):
            sums = rescaled(pieces[i], W, rings[1].dtype)
            _store(sums, output, (expert, end, row, n), sizes, LOWER, W, ACT)
            row += AT_ONCE


@gluon.jit
def product(
    LOWER: gl.constexpr, step, k_steps, tile, pending, output, buffers, rings, sizes, scales,
    HOW: gl.constexpr, begin=0,
):  # fmt: skip
    """A consumer's rows of W of a tile, by the steps of columns from `begin` on."""
    _, end, row, _ = tile
    given = step, k_steps, tile, output, rings, sizes, scales
    TOKENS: gl.constexpr = HOW[1].tokens
    if TOKENS == 256:
        if row + 192 < end:
            _run_tile(LOWER, given, (256,), HOW, begin)
        elif row + 128 < end:
            _run_tile(LOWER, given, (128, 64), HOW, begin)
        elif row + 64 < end:
            _run_tile(LOWER, given, (128,), HOW, begin)
        else:
            _run_tile(LOWER, given, (64,), HOW, begin)
    elif TOKENS > 32:
        HALF: gl.constexpr = TOKENS // 2
        if row + HALF < end:
            _run_tile(LOWER, given, (TOKENS,), HOW, begin)
        else:
            _run_tile(LOWER, given, (HALF,), HOW, begin)
    else:
        _run_tile(LOWER, given, (TOKENS,), HOW, begin)
    return pending


@gluon.jit
def _grouped_codes(
    x_desc, w_desc, up_desc, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr, out_ptr,
    tiles_ptr, N, K, n_tiles,
    out_n, width, W: gl.constexpr, ACT: gl.constexpr, TWO: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    dealt = first_tile(tiles_ptr, n_tiles, TOKENS)
    of_x: gl.constexpr = x_desc.layout
    HALVES: gl.constexpr = fragments.halves_of(W)
    tokens = gl.allocate_shared_memory(x_desc.dtype, [HALVES * STAGES, TOKENS, BOX], of_x)
    if W.bits == 6:
        codes = w_desc
    else:
        codes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, 4, 16, 16], w_desc.layout)
    source = (x_desc, w_desc, up_desc)
    output = (global_scale_ptr, global_scale_ptr + 1 if TWO else None, bias_ptr, out_ptr)
    specialize(
        dealt, (codes, tokens), source, output, (None, None), (N, K, out_n, width),
        (w_scale_ptr, w_zero_ptr), boxes_of_tile, copy, None, product, TOKENS,
        fragments.columns_of(W), fragments.at_once(W), STAGES=STAGES, WARPS=1, AHEAD=(3, 2, 1),
        HOW=(W, TILE, ACT), BLOCKS=TILE.blocks,
    )  # fmt: skip


def launch(
    x_RK: Tensor, w_ENW: Tensor, w_scale: Tensor | None, w_zero: Tensor | None,
    global_scale_E: Tensor | None, bias_EN: Tensor | None, out: Tensor, tiles: TileMap,
    tile: CodesTile, weight: Weight, act: Act,
) -> None:  # fmt: skip
    """Run one product over sorted, arranged rows; its output is arranged if `act` has a kind. The
    backend says which layers it takes."""
    _, N, words = w_ENW.shape
    gated, bits, width = act.gated, weight.bits, out.shape[1]
    w_desc, up_desc = (w_ENW.view(torch.int64), None)
    if bits != 6:
        w_desc, up_desc = boxed(w_ENW, act.interleaved, fragments.group_of(weight))
    x_desc = skeleton.boxes(x_RK, box_of(tile.tokens), BOX.value)
    bias_EN = None if bias_EN is None else bias_EN.contiguous()
    n_tiles = triton.cdiv(width, ROWS.value // 2 if gated else ROWS.value)
    two = global_scale_E is not None and global_scale_E.dim() == 2
    skeleton.launch(
        _grouped_codes, x_RK, x_desc, w_desc, up_desc, w_scale, w_zero, global_scale_E, bias_EN,
        out, tiles.table, N, words * 32 // bits, n_tiles, N // 2 if gated else N, width, weight,
        act, two, tile, blocks=tile.blocks,
    )  # fmt: skip


def boxed(w_ENW: Tensor, interleaved: bool, group: int) -> list[TensorDescriptor]:
    """What the left and the right boxes of codes are copied from."""
    E, N, words = w_ENW.shape
    if interleaved:
        pairs = w_ENW.view(E * N // (2 * group), group, 2, words)
        w, up = pairs[:, :, 0], pairs[:, :, 1]
    else:
        w = up = w_ENW.view(E * N // group, group, words)
    bytes_64 = gl.NVMMASharedLayout(64, 32, rank=3)
    return [TensorDescriptor.from_tensor(t, [4, 16, 16], bytes_64) for t in (w, up)]


def _run_product(c: Call, x: Operand, stack: Stack, out: Tensor, act: Act) -> None:
    w, scale, zero, common, bias = stack
    assert c.layer.weight is not None
    words = w.view(torch.int32)
    weight, tile = c.layer.weight, c.tiles
    launch(x.values, words, scale, zero, common, bias, out, c.tile_map, tile, weight, act)


# Rows of x are gathered once for all: copies by TMA then take both products' tokens.
run = Products(
    up=lambda c: _run_product(c, c.x, c.layer.stack13, c.h.values, c.layer.act),
    down=lambda c: _run_product(c, c.h, c.layer.stack2, c.out, LINEAR),
    reads=Reads(gathered=True, arranged=(4, 6, 8)),
    tile_rows=lambda c, _: c.tiles.tokens,
).run
