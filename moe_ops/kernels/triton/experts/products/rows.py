"""Expert products for few rows an expert: weights stream past, the routed rows are the columns.

A program holds one block of an expert's weight rows and up to BN of its routed rows. With tokens
as columns a matrix unit's tile is filled by weights, so that few rows an expert waste none of it,
and a weight is read from memory once: units of work with the same weights are neighbours.

    rows_up    h[r] = weight * activate(W13[e] x[token of r] + b13[e]), rows sorted by expert
    rows_down  y[r] = W2[e] h[r] + weight * b2[e]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.experts.formats.codes import Codes, by_row, floats_of
from moe_ops.kernels.triton.experts.formats.order import column_of, stored
from moe_ops.kernels.triton.experts.formats.scales import rescaled, under_global, under_globals
from moe_ops.kernels.triton.experts.operands.fake_quantized import emulated_hidden, emulated_tokens
from moe_ops.kernels.triton.experts.operands.group_scales import quantize_tokens
from moe_ops.kernels.triton.experts.operands.row_scales import (
    by_expert,
    codes_of_h,
    quantize_h,
    quantize_x,
)
from moe_ops.kernels.triton.experts.operands.tokens import tokens_for
from moe_ops.kernels.triton.experts.products.block_steps import add_product
from moe_ops.kernels.triton.experts.products.register_stream import DTYPES
from moe_ops.kernels.triton.experts.schedule.combine import sum_rows
from moe_ops.kernels.triton.experts.schedule.sort import most_units, sort_pairs, unit_of
from moe_ops.kernels.triton.experts.weights import Experts, activated, bias_stride, rows_at, up_rows
from moe_ops.kernels.triton.launch import on_its_device, pdl_options, shared_memory, stages_within
from moe_ops.kernels.triton.replay import launch

HOPPER_MEMORY = 200 * 1024  # bytes of shared memory; GPUs before Hopper have less
DECODED = 16 * 1024  # bytes of it through which these move decoded values to their matrix units
MOST_OF_TILE = {16: 10, 32: 40, 64: 160}  # rows an expert on average, by the rows of a tile
LONG = 8192  # columns of W2, from which on few programs have much to read


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows of weights (columns of h for the first product), their columns a step, routed rows."""

    rows: int
    step: int
    BN: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsTiles:
    up: Tile
    down: Tile


def _tiles(BN: int, up: tuple[int, ...], down: tuple[int, ...]) -> RowsTiles:
    return RowsTiles(
        up=Tile(rows=up[0], step=up[1], BN=BN, stages=up[2], warps=up[3]),
        down=Tile(rows=down[0], step=down[1], BN=BN, stages=down[2], warps=down[3]),
    )


# By the most rows an expert on average and the most columns of W2 (short rows of it are soon read,
# and finding its place weighs on a program): the fastest of about ten for each product on an H200,
# over six layers.
TILES: tuple[tuple[float, float, RowsTiles], ...] = (
    (8, 1024, _tiles(16, (64, 128, 3, 4), (128, 64, 3, 4))),
    (8, math.inf, _tiles(16, (32, 128, 4, 4), (64, 128, 4, 4))),
    (24, 1024, _tiles(32, (32, 128, 3, 4), (128, 64, 3, 4))),
    (24, math.inf, _tiles(32, (32, 128, 4, 4), (64, 128, 4, 4))),
    (48, math.inf, _tiles(64, (64, 64, 4, 8), (128, 64, 4, 4))),
    (math.inf, math.inf, _tiles(128, (64, 64, 3, 8), (128, 64, 3, 8))),
)


def tiles_for(rows_per_expert: float, width: int) -> RowsTiles:
    return next(
        tiles for rows, columns, tiles in TILES if rows_per_expert <= rows and width <= columns
    )


def code_tiles(rows_per_expert: float, width: int, codes: Codes, memory: int) -> RowsTiles:
    """Steps of 128 columns, the group of most formats. The fastest of about six on an H200 for the
    layers of Qwen3-30B and Mixtral, in MXFP4 of up to thirteen for four."""
    sums = codes.in_words and codes.one_a_step
    BN = next((n for n, most in MOST_OF_TILE.items() if rows_per_expert <= most), 128)
    if not codes.in_words or sums or memory < HOPPER_MEMORY:
        BN = min(BN, 64)
    if codes.quantizes:
        return _tiles(BN, (64, 128, 4, 8), (128, 128, 4, 8))
    if sums:
        return _tiles(BN, (64, 128, 4, 4), (128, 128, 4, 4))
    if BN <= 32:
        mxfp4 = codes.weight.element == "float4_e2m1" and codes.weight.across == 32
        down = (128, 128, 3, 8) if mxfp4 and width >= LONG else (64, 128, 4, 4)
        return _tiles(BN, (32, 128, 4, 4), down)
    return _tiles(BN, (64, 128, 3, 8), (128, 128, 3, 8))


@functools.cache
def fitting(tiles: RowsTiles, gated: bool, bits: int, memory: int) -> RowsTiles:
    """The tiles with as many stages as fit into `memory` bytes of shared memory, for weights of
    `bits` bits."""

    def fit(tile: Tile, weights: int) -> Tile:
        stage = tile.step * (weights * bits // 8 + 2 * tile.BN)
        return replace(tile, stages=stages_within(memory, stage, tile.stages))

    up, down = tiles.up, tiles.down
    return RowsTiles(up=fit(up, (2 if gated else 1) * up.rows), down=fit(down, down.rows))


def tiles_of(x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> RowsTiles:
    """The tiles of a call by the tables, with stages that fit."""
    codes, memory, (E, _, I) = layer.codes, shared_memory(x_TD), layer.sizes
    per_expert = ids_TK.numel() / (E if expert_map is None else expert_map.shape[0])
    if codes is None:
        return fitting(tiles_for(per_expert, I), layer.act.gated, 16, memory)
    tiles = code_tiles(per_expert, I, codes, memory)
    if memory < HOPPER_MEMORY:
        memory -= DECODED
    return fitting(tiles, layer.act.gated, codes.bits, memory)


@triton.jit
def rows_up(
    x_ptr, scale_ptr, rows_ptr, ends_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, g_ptr, b_ptr,
    static_ptr, h_ptr, h_scale_ptr, stride_x, stride_we, stride_wf, stride_wd, stride_be,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr,
    ACT: tl.constexpr, W: tl.constexpr, SHARED: tl.constexpr, EACH: tl.constexpr,
    DTYPE: tl.constexpr, BE: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BI columns of h for up to BN rows of one expert. With static scales, EACH says
    whether each expert has one, and DTYPE what h is rounded to first."""
    GATED: tl.constexpr = ACT.gated
    BF: tl.constexpr = 2 * BI if GATED else BI
    blocks: tl.constexpr = (H + BI - 1) // BI
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    e, block, first, count = unit_of(ends_ptr, tl.program_id(0), blocks, tl.arange(0, BE), E, BN)
    if e >= E:
        return
    e = e.to(tl.int64)
    n = tl.arange(0, BN)
    pair_N = tl.load(rows_ptr + first + n, mask=n < count, other=0)
    x_1N = (x_ptr + (pair_N // K).to(tl.int64) * stride_x)[None, :]
    row_F, inside_F = up_rows(block, I, BI, ACT)
    w_F1 = rows_at(w_ptr, e, row_F, stride_we, stride_wf, 2 * I if GATED else I, D, W)
    d = tl.arange(0, BD)
    acc_FN = tl.zeros((BF, BN), tl.float32)
    if W is None:
        for start in range(0, D, BD):
            inside_D = start + d < D
            w_FD = tl.load(
                w_F1 + ((start + d).to(tl.int64) * stride_wd)[None, :],
                mask=inside_F[:, None] & inside_D[None, :], other=0.0,
            )  # fmt: skip
            x_DN = tl.load(
                x_1N + (start + d)[:, None],
                mask=inside_D[:, None] & (n < count)[None, :], other=0.0,
            )  # fmt: skip
            acc_FN = tl.dot(w_FD, x_DN, acc_FN)
    else:
        ROWS: tl.constexpr = 2 * I if GATED else I
        acc_FN = add_product(
            acc_FN, w_F1, s_ptr, z_ptr, e, row_F, inside_F, x_1N, scale_ptr, pair_N // K, n < count,
            ROWS, D, BD, W, "",
        )  # fmt: skip
        acc_FN = under_globals(
            rescaled(acc_FN, W, x_ptr.dtype.element_ty), g_ptr, e, row_F, inside_F, ROWS, SHARED
        )  # fmt: skip
    h_IN = activated(acc_FN, b_ptr, e * stride_be, row_F, inside_F, BI, BN, ACT)
    if weights_ptr is not None:
        weight_N = tl.load(weights_ptr + pair_N, mask=n < count, other=0.0).to(tl.float32)
        if static_ptr is not None:
            h_IN, scale = codes_of_h(h_IN, static_ptr, e, EACH, DTYPE, W.element == "int8")
            mine_N = n < tl.where(block == 0, count, 0)  # one program of these rows is enough
            tl.store(h_scale_ptr + first + n, scale * weight_N, mask=mine_N)
        elif not by_row(W):
            h_IN = h_IN * weight_N[None, :]
    i = block * BI + tl.arange(0, BI)
    if H > I:
        h_IN = tl.where((i < I)[:, None], h_IN, 0.0)
    tl.store(
        h_ptr + (first + n).to(tl.int64)[None, :] * H + column_of(i, W)[:, None],
        h_IN.to(h_ptr.dtype.element_ty),
        mask=(i < H)[:, None] & (n < count)[None, :],
    )


@triton.jit
def rows_down(
    h_ptr, scale_ptr, rows_ptr, ends_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, g_ptr, b_ptr, y_ptr,
    stride_we, stride_wd, stride_wi, stride_be,
    E: tl.constexpr, D: tl.constexpr, I: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    BE: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (D + BD - 1) // BD
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    e, block, first, count = unit_of(ends_ptr, tl.program_id(0), blocks, tl.arange(0, BE), E, BN)
    if e >= E:
        return
    e = e.to(tl.int64)
    d = block * BD + tl.arange(0, BD)
    n = tl.arange(0, BN)
    row_1N = (first + n).to(tl.int64)[None, :]
    inside_D = d < D
    w_D1 = rows_at(w_ptr, e, d, stride_we, stride_wd, D, I, W)
    i = tl.arange(0, BI)
    acc_DN = tl.zeros((BD, BN), tl.float32)
    if W is None:
        for start in range(0, I, BI):
            inside_I = start + i < I
            w_DI = tl.load(
                w_D1 + ((start + i).to(tl.int64) * stride_wi)[None, :],
                mask=inside_D[:, None] & inside_I[None, :], other=0.0,
            )  # fmt: skip
            h_IN = tl.load(
                h_ptr + row_1N * H + (start + i)[:, None],
                mask=inside_I[:, None] & (n < count)[None, :], other=0.0,
            )  # fmt: skip
            acc_DN = tl.dot(w_DI, h_IN, acc_DN)
    else:
        acc_DN = add_product(
            acc_DN, w_D1, s_ptr, z_ptr, e, d, inside_D, h_ptr + row_1N * H, scale_ptr, first + n,
            n < count, D, I, BI, W, "",
        )  # fmt: skip
        acc_DN = under_global(rescaled(acc_DN, W, h_ptr.dtype.element_ty), g_ptr, e)
    if b_ptr is not None:
        bias_D = tl.load(b_ptr + e * stride_be + d, mask=inside_D, other=0.0).to(tl.float32)
        if weights_ptr is None:
            acc_DN += bias_D[:, None]
        else:
            pair_N = tl.load(rows_ptr + first + n, mask=n < count, other=0)
            weight_N = tl.load(weights_ptr + pair_N, mask=n < count, other=0.0).to(tl.float32)
            acc_DN += bias_D[:, None] * weight_N[None, :]
    tl.store(
        y_ptr + row_1N * D + d[:, None],
        acc_DN.to(y_ptr.dtype.element_ty),
        mask=inside_D[:, None] & (n < count)[None, :],
    )


@on_its_device
def run(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    layer: Experts,
    expert_map: Tensor | None,
    residual_TD: Tensor | None = None,
    tiles: RowsTiles | None = None,
) -> Tensor:
    """The `experts` op, each weight read once for every BN rows of its expert, added to a
    contiguous residual if there is one; without `tiles` by those of `tiles_of`."""
    (T, K), (E, D, I) = ids_TK.shape, layer.sizes
    R, codes = T * K, layer.codes
    x_TD = emulated_tokens(x_TD, codes)
    tiles = tiles or tiles_of(x_TD, ids_TK, layer, expert_map)
    rows_R, inverse_R, ends_E = sort_pairs(ids_TK, E, expert_map)
    H = stored(I, layer.weight)
    dtype = floats_of(x_TD, codes)
    h_RI, y_RD = (x_TD.new_empty(R, width, dtype=dtype) for width in (H, D))
    h_scale_RG = None
    static, rounded, tokens_K = None, None, K
    if codes is not None and codes.by_row:
        static = codes.h_scale
        if static is not None:
            h_RI, rounded = h_RI.new_empty(R, H, dtype=codes.dtype), DTYPES[dtype]
            h_scale_RG = x_TD.new_empty(R, dtype=torch.float32)
        x_TD, x_scale_TG = quantize_x(x_TD, codes, ids_TK, expert_map)
        if by_expert(codes.x_scale):
            tokens_K = 1  # each pair has a row of its own
    else:
        x_TD, x_scale_TG = tokens_for(x_TD, codes)
    # Codes are those of h, not of h times its weight.
    early_TK, late_TK = (weights_TK, None) if codes is None else codes.weigh(weights_TK)
    BE = max(2, triton.next_power_of_2(E))
    pdl, options = pdl_options(x_TD)
    up, down = tiles.up, tiles.down
    launch(
        rows_up, (most_units(R, E, up.BN) * triton.cdiv(H, up.rows),),
        x_TD, x_scale_TG, rows_R, ends_E, early_TK, layer.w13_EFD, *layer.scales13,
        layer.b13_EF, static, h_RI, h_scale_RG, x_TD.stride(0), *layer.strides13,
        bias_stride(layer.b13_EF),
        E=E, K=tokens_K, D=D, I=I, H=H, ACT=layer.act, W=layer.weight, SHARED=layer.shared13,
        EACH=by_expert(static), DTYPE=rounded, BE=BE, BI=up.rows, BD=up.step, BN=up.BN, PDL=pdl,
        num_warps=up.warps, num_stages=up.stages, **options,
    )  # fmt: skip
    if codes is not None and codes.by_row and static is None:
        h_RI, h_scale_RG = quantize_h(h_RI, codes, ends_E, weights_TK, rows_R)
    elif codes is not None and codes.quantizes and not codes.by_row:
        h_RI, h_scale_RG = quantize_tokens(h_RI, codes.weight)
    in_words = codes is not None and codes.in_words
    h_RI = emulated_hidden(h_RI, I, codes, ends_E, arranged=in_words)
    launch(
        rows_down, (most_units(R, E, down.BN) * triton.cdiv(D, down.rows),),
        h_RI, h_scale_RG, rows_R, ends_E, early_TK, layer.w2_EDI, *layer.scales2,
        layer.b2_ED, y_RD, *layer.strides2, bias_stride(layer.b2_ED),
        E=E, D=D, I=I, H=H, W=layer.weight, BE=BE, BD=down.rows, BI=down.step,
        BN=down.BN, PDL=pdl, num_warps=down.warps, num_stages=down.stages, **options,
    )  # fmt: skip
    return sum_rows(y_RD, inverse_R, late_TK, K, residual_TD)
