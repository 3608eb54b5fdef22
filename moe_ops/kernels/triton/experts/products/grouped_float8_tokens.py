"""The experts for many rows an expert of weights of four bits and tokens of float8, on Hopper
(sm_90): a persistent, warp-specialised kernel in Gluon that decodes weights to float8 where they
are multiplied.

As in `grouped_registers.py` weights are the first and tokens the second operand: a tile is 128 rows
of W by 32 or 128 tokens, and what it makes is stored transposed. Tokens are quantised ahead of each
product. Columns with one scale of W make a sum of their own, which is multiplied by it and added in
float32; so are 128 or 256 columns at most, as the unit adds with fewer bits. A scale of a token is
multiplied into the sum of its columns: all of them, or as many as share one of W.

    rows of x   in the order of experts, their columns in that of `order.in_float8_order`: so is h
    first       h: the gate and up values of one column are in one thread
    second      y, which is summed by token

What the functions below share is as in `skeleton.py`, and
    rings   stages of codes, of two boxes each; of tokens, of two halves, with the scales of their
            groups behind them, if they have these; barriers
    SCALED  what of tokens has a scale: "rows", "all" of them, or "groups" of columns of a row
    sizes   rows of W per expert; K; columns of the output, and those that it is stored with
    scales  scales and zero points of W; scales of rows of x, or None; `references` of W or None
    output  bias or None, static scale or None, pointer
    accs    sums of the tokens of a tile, in PARTS of so many
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels.triton import LINEAR, Act, Weight
from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.experts.call import Call, Operand, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.formats import to_float8
from moe_ops.kernels.triton.experts.operands.references import references
from moe_ops.kernels.triton.experts.products import fragments_float8 as fragments
from moe_ops.kernels.triton.experts.products import skeleton
from moe_ops.kernels.triton.experts.products.float8_sums import (
    FOLDED,
    multiply,
    multiply_folded,
)
from moe_ops.kernels.triton.experts.products.float8_tile import SCALES, Float8Tile
from moe_ops.kernels.triton.experts.products.fragments_float8 import (
    HALF,
    ROWS,
    STEP,
    sums_layout,
)
from moe_ops.kernels.triton.experts.products.grouped_wgmma import quotient
from moe_ops.kernels.triton.experts.products.hopper import as_held, tma_load
from moe_ops.kernels.triton.experts.products.skeleton import first_tile, specialize
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.experts.weights import Stack

SCALES_OF_STAGE = gl.constexpr(SCALES)


@gluon.constexpr_function
def box_of(tokens):
    """How many tokens of a tile one copy takes."""
    return tokens // 2


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
    codes, tokens = rings[0], rings[1][0]
    x_desc, left_desc, right_desc = source[0], source[1], source[2]
    left, right, filled = at
    TOKENS: gl.constexpr = HOW[1].tokens
    PART: gl.constexpr = box_of(TOKENS)
    SCALES: gl.constexpr = SCALES_OF_STAGE if HOW[2] == "groups" else 0
    CODES: gl.constexpr = ROWS * (STEP // 2) + SCALES * TOKENS * 4
    for b in gl.static_range(TOKENS // PART):
        mbarrier.expect(bar, CODES + (b + 1) * PART * STEP, pred=filled == b + 1)
    tma_load(left_desc, [left, i * 32], bar, codes.index(2 * stage))
    tma_load(right_desc, [right, i * 32], bar, codes.index(2 * stage + 1))
    if SCALES > 0:
        tma_load(source[3], [tile[2], i * SCALES], bar, rings[1][1].index(stage))
    for b in gl.static_range(TOKENS // PART):
        for half in gl.static_range(2):
            place = tokens.index(2 * stage + half).slice(b * PART, PART)
            place_at = [tile[2] + b * PART, i * STEP + half * HALF]
            tma_load(x_desc, place_at, bar, place, pred=b < filled)


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
def _store(sums, output, tile, sizes, LOWER: gl.constexpr, HELD: gl.constexpr, ACT: gl.constexpr):
    """Outputs of sums of some tokens, or their codes by a static scale, of what HELD holds of them;
    h in the order of `in_float8_order`."""
    expert, end, row, n = tile
    bias_ptr, static_ptr, out_ptr = output
    width = sizes[3]
    T: gl.constexpr = sums.shape[1]
    out = _activated(sums, bias_ptr, expert, n, sizes, LOWER, ACT)
    if static_ptr is not None:
        out = quotient(as_held(out, HELD), gl.load(static_ptr))
    out = out.to(out_ptr.dtype.element_ty)  # of codes the conversion saturates, and keeps NaN
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
def _scaled(sums, row_scale, x_scale_ptr, row, end, SCALED: gl.constexpr, ONE: gl.constexpr):
    """Sums of tokens from `row` on, times what is common to all their columns: scales of rows of W
    or None, those of tokens, unless their groups have them, and a constant."""
    T: gl.constexpr = sums.shape[1]
    if SCALED == "groups":
        sums = sums * ONE
    elif SCALED == "all":
        sums = sums * (gl.load(x_scale_ptr) * ONE)
    else:
        t = gl.arange(0, T, gl.SliceLayout(0, sums_layout(T)))
        x_scale = gl.load(x_scale_ptr + row + t, mask=row + t < end, other=0.0)
        sums = sums * (x_scale * ONE)[None, :]
    if row_scale is not None:
        sums = sums * fragments.of_rows(row_scale, T)
    return sums


@gluon.jit
def _store_all(
    accs, row_scale, output, tile, sizes, scales, LOWER: gl.constexpr, PARTS: gl.constexpr,
    ONE: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Store the outputs of all sums of a tile."""
    expert, end, row, n = tile
    for p in gl.static_range(len(PARTS)):
        sums = _scaled(accs[p], row_scale, scales[2], row, end, HOW[2], ONE)
        _store(sums, output, (expert, end, row, n), sizes, LOWER, HOW[3], HOW[-1])
        row += PARTS[p]


@gluon.jit
def _run_plain(
    LOWER: gl.constexpr, step, k_steps, tile, output, rings, sizes, scales, PARTS: gl.constexpr,
    HOW: gl.constexpr,
):  # fmt: skip
    """Multiply and store a consumer's rows of W of a tile with at most so many tokens."""
    W: gl.constexpr = HOW[0]
    ACT: gl.constexpr = HOW[-1]
    accs, seen = multiply(rings, step, k_steps, sizes, scales, tile, LOWER, PARTS, HOW)
    row_scale = None
    if W.across == -1:
        at = fragments.factors_at(tile, sizes, LOWER, W, ACT)
        stored = fragments.load_factors(scales[0], at, 0, W)
        row_scale = fragments.scale_at(stored, 0, 1, W)
    elif fragments.in_words(W):
        row_scale = gl.where((seen & -0x7F7F7F80) != 0, float("nan"), 1.0)
    ONE: gl.constexpr = to_float8.of_one(W)
    _store_all(accs, row_scale, output, tile, sizes, scales, LOWER, PARTS, ONE, HOW)


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
            accs = multiply_folded(
                rings, step, k_steps, sizes, scales, reference, tile, LOWER, PARTS, HOW
            )  # fmt: skip
            # 2**-127 is subnormal.
            bits = gl.maximum((reference - 1) << 23, 1 << 22)
            row_scale = bits.to(gl.float32, bitcast=True)
            _store_all(
                accs, row_scale, output, tile, sizes, scales, LOWER, PARTS, 2.0**-13, HOW
            )  # fmt: skip
        elif len(PARTS) == 2:
            # What is rarely taken leaves registers to the other way.
            _run_plain(
                LOWER, step, k_steps, tile, output, rings, sizes, scales, (32, 32, 32, 32), HOW
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
    elif row + TOKENS // 2 < end:
        _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (TOKENS,), HOW)
    else:
        _run_tile(LOWER, step, k_steps, tile, output, rings, sizes, scales, (TOKENS // 2,), HOW)
    return pending


@gluon.jit(do_not_specialize=["n_tiles"])
def _grouped_float8_tokens(
    x_desc, x_scale_desc, x_scale_ptr, w_desc, up_desc, w_scale_ptr, w_zero_ptr, reference_ptr,
    bias_ptr, static_ptr, out_ptr, tiles_ptr, N, K, n_tiles, out_n, width, W: gl.constexpr,
    SCALED: gl.constexpr, HELD: gl.constexpr, ACT: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = TILE.tokens
    STAGES: gl.constexpr = TILE.stages
    dealt = first_tile(tiles_ptr, n_tiles, TOKENS)
    tokens = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, TOKENS, HALF], x_desc.layout)
    codes = gl.allocate_shared_memory(gl.int32, [2 * STAGES, ROWS // 2, 32], w_desc.layout)
    source = (x_desc, w_desc, up_desc)
    read = (tokens,)
    if SCALED == "groups":
        source = (x_desc, w_desc, up_desc, x_scale_desc)
        shape: gl.constexpr = [STAGES, TOKENS, SCALES_OF_STAGE]
        read = (tokens, gl.allocate_shared_memory(gl.float32, shape, x_scale_desc.layout))
    specialize(
        dealt, (codes, read), source, (bias_ptr, static_ptr, out_ptr), (None, None),
        (N, K, out_n, width), (w_scale_ptr, w_zero_ptr, x_scale_ptr, reference_ptr),
        _boxes_of_tile, _copy, None, _product, TOKENS, STEP, 1, STAGES=STAGES, WARPS=1,
        AHEAD=(3, 2, 1), HOW=(W, TILE, SCALED, HELD, ACT), BLOCKS=TILE.blocks,
        LEAN=TOKENS == 128,
    )  # fmt: skip


def launch(
    x_RK: Tensor, x_scale: Tensor, w_ENW: Tensor, w_scale: Tensor, w_zero: Tensor | None,
    bias_EN: Tensor | None, out: Tensor, tiles: TileMap, tile: Float8Tile, weight: Weight, act: Act,
    *, reference_EN: Tensor | None = None, whole: bool = False, static: Tensor | None = None,
    held: gl.dtype | None = None,
) -> None:  # fmt: skip
    """Run one product over sorted rows of codes in the order of `in_float8_order`, by scales of
    rows [R] or one on the whole, or those of groups of their columns as `place_in_stages` has them.
    Its output is in that order if `act` has a kind, and codes by a static scale of what `held`
    holds if there is one. Of weights whose scales may become part of codes there are `references`.
    The backend says which layers it takes."""
    _, N, words = w_ENW.shape
    gated, width = act.gated, out.shape[1]
    grouped = x_scale.dim() == 2
    scaled = "groups" if grouped else "all" if whole else "rows"
    if weight.kind == "e8m0" and weight.across == 32:
        w_scale = as_long_words(w_scale)
    skeleton.launch(
        _grouped_float8_tokens, x_RK, skeleton.boxes(x_RK, box_of(tile.tokens), HALF.value),
        skeleton.boxes(x_scale, tile.tokens, SCALES) if grouped else None,
        None if grouped else x_scale,
        *_boxed(w_ENW, act.interleaved), w_scale, w_zero, reference_EN,
        None if bias_EN is None else bias_EN.contiguous(), static, out, tiles.table,
        N, words * 8, triton.cdiv(width, ROWS.value // 2 if gated else ROWS.value),
        N // 2 if gated else N, width, weight, scaled, held, act, tile, blocks=tile.blocks,
    )  # fmt: skip


def as_long_words(scale_ENG: Tensor) -> Tensor:
    """Scales of eight bits in the longest words that those of a row fill."""
    whole = math.gcd(scale_ENG.shape[2], scale_ENG.storage_offset())
    if whole % 8 == 0:
        return scale_ENG.view(torch.int64)
    return scale_ENG.view(torch.int32) if whole % 4 == 0 else scale_ENG


def _boxed(w_ENW: Tensor, interleaved: bool) -> list[TensorDescriptor]:
    """What the left and the right boxes of codes are copied from."""
    w = w_ENW.view(-1, w_ENW.shape[2])
    pair = (w[::2], w[1::2]) if interleaved else (w, w)
    bytes_128 = gl.NVMMASharedLayout(128, 32, rank=2)
    return [TensorDescriptor.from_tensor(t, [ROWS.value // 2, 32], bytes_128) for t in pair]


def _run_product(
    c: Call, x: Operand, stack: Stack, out: Tensor, act: Act, reference: Tensor | None, **how: Any
) -> None:
    w, scale, zero, _, bias = stack
    assert c.layer.codes is not None and x.scale is not None and scale is not None
    words, weight = w.view(torch.int32), c.layer.codes.weight
    how |= {"reference_EN": reference}
    launch(
        x.values, x.scale, words, scale, zero, bias, out, c.tile_map, c.tiles, weight, act, **how
    )


def _up(c: Call) -> None:
    codes = c.codes
    assert codes is not None
    if c.tiles.fold and folds(codes.weight) and codes.by_row:
        c.references = references(codes.w13_scale_EFG, codes.w2_scale_EDG, FOLDED.value)
    how = {"static": c.static, "held": c.rounded}
    _run_product(c, c.x, c.layer.stack13, c.h.values, c.layer.act, c.references[0], **how)


def _down(c: Call) -> None:
    whole = c.static is not None
    _run_product(c, c.h, c.layer.stack2, c.out, LINEAR, c.references[1], whole=whole)


def folds(weight: Weight) -> bool:
    """Whether scales of a weight can become part of its codes."""
    return weight.element == "float4_e2m1" and weight.kind == "e8m0" and weight.across == 32


run = Products(
    up=_up,
    down=_down,
    reads=Reads(gathered=True, float8=True, stores="static"),
    tile_rows=lambda c, _: c.tiles.tokens,
).run
