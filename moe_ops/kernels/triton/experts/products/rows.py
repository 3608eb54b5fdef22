"""Expert products for few rows an expert: weights stream past, the routed rows are the columns.

A program holds one block of an expert's weight rows and up to BN of its routed rows. With tokens
as columns a matrix unit's tile is filled by weights, so that few rows an expert waste none of it,
and a weight is read from memory once: units of work with the same weights are neighbours.

    rows_up    h[r] = weight * activate(W13[e] x[token of r] + b13[e]), rows sorted by expert
    rows_down  y[r] = W2[e] h[r] + weight * b2[e]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from moe_ops.kernels.triton.experts.adapters import Added, add_adapter
from moe_ops.kernels.triton.experts.call import Call, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.formats.codes import by_row
from moe_ops.kernels.triton.experts.formats.order import column_of
from moe_ops.kernels.triton.experts.formats.scales import rescaled, under_global, under_globals
from moe_ops.kernels.triton.experts.operands.row_scales import by_expert, codes_of_h
from moe_ops.kernels.triton.experts.products.block_steps import add_product
from moe_ops.kernels.triton.experts.schedule.sort import unit_of
from moe_ops.kernels.triton.experts.weights import activated, rows_at, strides, up_rows
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows of weights (columns of h for the first product), their columns a step, routed rows."""

    rows: int
    step: int
    BN: int
    stages: int
    warps: int


# Of a thread of eight warps, so that two programs fit a processor. Kernels that loop would take
# more, and spill nothing with as many: without the limit both products of float8 blocks with BN=32
# took 121 µs on an H200, where those that do not loop take 92.
MOST_REGISTERS, LEAST_WARPS, MOST_TOKENS = 128, 8, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsTiles:
    up: Tile
    down: Tile


@triton.jit
def rows_up(
    x_ptr, x_scale_ptr, rows_ptr, ends_ptr, M, weights_ptr, w_ptr, w_scale_ptr, w_zero_ptr,
    global_scale_ptr, bias_ptr, h_scale_ptr, h_ptr, h_row_scale_ptr, stride_x, stride_we, stride_wf,
    stride_wd, stride_be, narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr,
    ACT: tl.constexpr, W: tl.constexpr, SHARED: tl.constexpr, EACH: tl.constexpr,
    DTYPE: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr,
    BE: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CHAIN: tl.constexpr,
    LOOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a unit of work; of more units than programs, every so many, if it LOOPS. With
    static scales, EACH says whether each expert has one, and DTYPE what h is rounded to first."""
    blocks: tl.constexpr = (H + BI - 1) // BI
    tokens = (x_ptr, x_scale_ptr, rows_ptr, weights_ptr, stride_x)
    layer = (
        w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr, stride_we, stride_wf, stride_wd,
        stride_be,
    )  # fmt: skip
    adapters = (narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br)
    to = (h_scale_ptr, h_ptr, h_row_scale_ptr)
    if narrow_ptr is None:
        take_turn(PDL)
    unit = tl.program_id(0)
    e, block, first, count = unit_of(ends_ptr, unit, blocks, tl.arange(0, BE), E, BN, M)
    if LOOPS:
        while e < E:
            up_of_unit(
                e, block, first, count, tokens, layer, adapters, to, E, K, D, I, H, ACT, W, SHARED,
                EACH, DTYPE, ADAPTERS, RANK, TR, BI, BD, BN, CHAIN, PDL,
            )  # fmt: skip
            unit += tl.num_programs(0)
            e, block, first, count = unit_of(ends_ptr, unit, blocks, tl.arange(0, BE), E, BN, M)
    else:
        if e >= E:
            if narrow_ptr is not None:
                take_turn(PDL)
            return
        up_of_unit(
            e, block, first, count, tokens, layer, adapters, to, E, K, D, I, H, ACT, W, SHARED,
            EACH, DTYPE, ADAPTERS, RANK, TR, BI, BD, BN, CHAIN, PDL,
        )  # fmt: skip


@triton.jit
def up_of_unit(
    e, block, first, count, tokens, layer, adapters, to,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr,
    ACT: tl.constexpr, W: tl.constexpr, SHARED: tl.constexpr, EACH: tl.constexpr,
    DTYPE: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr,
    BI: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, CHAIN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BI columns of h for up to BN rows of one expert."""
    x_ptr, x_scale_ptr, rows_ptr, weights_ptr, stride_x = tokens
    w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr = layer[:5]
    stride_we, stride_wf, stride_wd, stride_be = layer[5:]
    narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br = adapters
    h_scale_ptr, h_ptr, h_row_scale_ptr = to
    GATED: tl.constexpr = ACT.gated
    BF: tl.constexpr = 2 * BI if GATED else BI
    e = e.to(tl.int64)
    n = tl.arange(0, BN)
    if rows_ptr is None:  # slots of an expert, of which those past its count are not read
        pair_N = first + tl.minimum(n, count - 1)
    else:
        pair_N = tl.load(rows_ptr + first + n, mask=n < count, other=0)
    x_1N = (x_ptr + (pair_N // K).to(tl.int64) * stride_x)[None, :]
    row_F, inside_F = up_rows(block, I, BI, ACT)
    ROWS: tl.constexpr = 2 * I if GATED else I
    w_F1 = rows_at(w_ptr, e, row_F, stride_we, stride_wf, ROWS, D, W)
    acc_FN = tl.zeros((BF, BN), tl.float32)
    acc_FN = add_product(
        acc_FN, w_F1, stride_wd, w_scale_ptr, w_zero_ptr, e, row_F, inside_F, x_1N, x_scale_ptr,
        pair_N // K, n < count, ROWS, D, BD, W, "", CHAIN,
    )  # fmt: skip
    acc_FN = under_globals(
        rescaled(acc_FN, W, x_ptr.dtype.element_ty), global_scale_ptr, e, row_F, inside_F, ROWS,
        SHARED,
    )  # fmt: skip
    if narrow_ptr is not None:
        take_turn(PDL)  # what is added is made by the launch before, and nothing else
        acc_FN = add_adapter(
            acc_FN, e, row_F, inside_F, first + n, first + n, n < count, narrow_ptr, wide_ptr,
            index_ptr, stride_bg, stride_bf, stride_br, E, ADAPTERS, RANK, TR, False,
        )  # fmt: skip
    h_IN = activated(acc_FN, bias_ptr, e * stride_be, row_F, inside_F, BI, BN, ACT)
    if weights_ptr is not None:
        weight_N = tl.load(weights_ptr + pair_N, mask=n < count, other=0.0).to(tl.float32)
        if h_scale_ptr is not None:
            h_IN, scale = codes_of_h(h_IN, h_scale_ptr, e, EACH, DTYPE, W.element == "int8")
            mine_N = n < tl.where(block == 0, count, 0)  # one program of these rows is enough
            tl.store(h_row_scale_ptr + first + n, scale * weight_N, mask=mine_N)
        elif not by_row(W):
            h_IN = h_IN * weight_N[None, :]
    i = block * BI + tl.arange(0, BI)
    if H > I:
        h_IN = tl.where((i < I)[:, None], h_IN, 0.0)
    at_IN = h_ptr + (first + n).to(tl.int64)[None, :] * H + column_of(i, W)[:, None]
    h_IN = h_IN.to(h_ptr.dtype.element_ty)
    tl.store(at_IN, h_IN, mask=(i < H)[:, None] & (n < count)[None, :])


@triton.jit
def rows_down(
    h_ptr, h_scale_ptr, rows_ptr, ends_ptr, M, weights_ptr, w_ptr, w_scale_ptr, w_zero_ptr,
    global_scale_ptr, bias_ptr, y_ptr, stride_we, stride_wd, stride_wi, stride_be, narrow_ptr,
    wide_ptr, index_ptr, stride_bg, stride_bf, stride_br,
    E: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr, BE: tl.constexpr,
    BD: tl.constexpr, BI: tl.constexpr, BN: tl.constexpr, CHAIN: tl.constexpr,
    LOOPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a unit of work; of more units than programs, every so many, if it LOOPS."""
    blocks: tl.constexpr = (D + BD - 1) // BD
    rows = (h_ptr, h_scale_ptr, rows_ptr, weights_ptr)
    layer = (
        w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr, stride_we, stride_wd, stride_wi,
        stride_be,
    )  # fmt: skip
    adapters = (narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br)
    if narrow_ptr is None:
        take_turn(PDL)
    unit = tl.program_id(0)
    e, block, first, count = unit_of(ends_ptr, unit, blocks, tl.arange(0, BE), E, BN, M)
    if LOOPS:
        while e < E:
            down_of_unit(
                e, block, first, count, rows, layer, adapters, y_ptr, E, D, I, H, W, ADAPTERS, RANK,
                TR, BD, BI, BN, CHAIN, PDL,
            )  # fmt: skip
            unit += tl.num_programs(0)
            e, block, first, count = unit_of(ends_ptr, unit, blocks, tl.arange(0, BE), E, BN, M)
    else:
        if e >= E:
            if narrow_ptr is not None:
                take_turn(PDL)
            return
        down_of_unit(
            e, block, first, count, rows, layer, adapters, y_ptr, E, D, I, H, W, ADAPTERS, RANK, TR,
            BD, BI, BN, CHAIN, PDL,
        )  # fmt: skip


@triton.jit
def down_of_unit(
    e, block, first, count, rows, layer, adapters, y_ptr,
    E: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr, BD: tl.constexpr,
    BI: tl.constexpr, BN: tl.constexpr, CHAIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BD columns of y for up to BN rows of one expert."""
    h_ptr, h_scale_ptr, rows_ptr, weights_ptr = rows
    w_ptr, w_scale_ptr, w_zero_ptr, global_scale_ptr, bias_ptr = layer[:5]
    stride_we, stride_wd, stride_wi, stride_be = layer[5:]
    narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br = adapters
    e = e.to(tl.int64)
    d = block * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)
    row_1N = (first + n).to(tl.int64)[None, :]
    inside_D = d < D
    w_D1 = rows_at(w_ptr, e, d, stride_we, stride_wd, D, I, W)
    acc_DN = tl.zeros((BD, BN), tl.float32)
    acc_DN = add_product(
        acc_DN, w_D1, stride_wi, w_scale_ptr, w_zero_ptr, e, d, inside_D, h_ptr + row_1N * H,
        h_scale_ptr, first + n, n < count, D, I, BI, W, "", CHAIN,
    )  # fmt: skip
    acc_DN = under_global(rescaled(acc_DN, W, h_ptr.dtype.element_ty), global_scale_ptr, e)
    if narrow_ptr is not None:
        take_turn(PDL)
        acc_DN = add_adapter(
            acc_DN, e, d, inside_D, first + n, first + n, n < count, narrow_ptr, wide_ptr,
            index_ptr, stride_bg, stride_bf, stride_br, E, ADAPTERS, RANK, TR, False,
        )  # fmt: skip
    if bias_ptr is not None:
        bias_D = tl.load(bias_ptr + e * stride_be + d, mask=inside_D, other=0.0).to(tl.float32)
        if weights_ptr is None:
            acc_DN += bias_D[:, None]
        else:
            pair_N = tl.load(rows_ptr + first + n, mask=n < count, other=0)
            weight_N = tl.load(weights_ptr + pair_N, mask=n < count, other=0.0).to(tl.float32)
            acc_DN += bias_D[:, None] * weight_N[None, :]
    mask_DN = inside_D[:, None] & (n < count)[None, :]
    tl.store(y_ptr + row_1N * D + d[:, None], acc_DN.to(y_ptr.dtype.element_ty), mask=mask_DN)


def _with_room(tile: Tile, added: Added) -> Tile:
    """A tile that leaves registers for sums with adapters that differ from row to row."""
    return tile if added.index is None else replace(tile, BN=min(tile.BN, 64))


def _options(c: Call, tile: Tile) -> dict[str, Any]:
    """The options of a launch."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages, **pdl_options(c.ids_TK)}
    if c.loops and tile.warps >= LEAST_WARPS and tile.BN <= MOST_TOKENS:
        options["maxnreg"] = MOST_REGISTERS
    return options


def _up(c: Call) -> None:
    layer, (E, D, I), H = c.layer, c.sizes, c.h.values.shape[1]
    tile = _with_room(c.tiles.up, c.added13)
    w13 = layer.stack13
    launch(
        rows_up, (c.units(tile.BN) * triton.cdiv(H, tile.rows),),
        c.x.values, c.x.scale, *c.order, c.slots, c.weights, *w13, c.static, c.h.values, c.h.scale,
        c.x.values.stride(0), *strides(w13), *c.added13.arguments,
        E=E, K=c.x.choices, D=D, I=I, H=H, ACT=layer.act, W=layer.weight, SHARED=layer.shared13,
        EACH=by_expert(c.static), DTYPE=c.rounded, **c.added13.constants,
        BE=c.BE, BI=tile.rows, BD=tile.step, BN=tile.BN, CHAIN=c.invariant,
        LOOPS=c.loops,
        **_options(c, tile),
    )  # fmt: skip


def _down(c: Call) -> None:
    w2, tile, (E, D, I) = c.layer.stack2, _with_room(c.tiles.down, c.added2), c.sizes
    launch(
        rows_down, (c.units(tile.BN) * triton.cdiv(D, tile.rows),),
        c.h.values, c.h.scale, *c.order, c.slots, c.weights, *w2, c.out, *strides(w2),
        *c.added2.arguments,
        E=E, D=D, I=I, H=c.h.values.shape[1], W=c.layer.weight, **c.added2.constants,
        BE=c.BE, BD=tile.rows, BI=tile.step, BN=tile.BN, CHAIN=c.invariant,
        LOOPS=c.loops,
        **_options(c, tile),
    )  # fmt: skip


# Each weight is read once for every BN rows of its expert.
run = Products(up=_up, down=_down, reads=Reads(arranged=(4, 6), stores="static", weighs=True)).run
