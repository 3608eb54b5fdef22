"""The experts for many rows an expert of float8 weights and inputs on Hopper (sm_90).

Weights have a scale for some rows by 128 columns, inputs one for each row and 128 columns, so every
128 columns make a sum of their own, which is multiplied by both scales and added in float32. A
consumer's 64 rows by 256 of a tile are two such sums of 128 columns each: while one consumer adds
the one it has made, the matrix unit makes the other's.

    rows of x   quantised once a token and written to each of its rows, in the order of experts
    first       h, whose tiles have whole groups of 128 columns of a row, and so quantise it
    second      y, which is summed by token

What the functions below share is as in `skeleton.py`, and
    scales  pointer of the scales of A [groups, stride], the stride; those of W, row groups of an
            expert
    output  and the scales that are made of it or None, as those of A
    W       the format of the weight, as in `block_steps.py`
    at      of the tile and the consumer: rows, the last one instead of those past the end; the
            first scale of W of each 64 columns
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

from moe_ops.kernels.triton import LINEAR, Act, Weight
from moe_ops.kernels.triton.experts.call import Call, Operand, Reads
from moe_ops.kernels.triton.experts.driver import Products
from moe_ops.kernels.triton.experts.formats.float8 import LARGEST_CODE, SMALLEST_SCALE
from moe_ops.kernels.triton.experts.formats.scales import finite, scale_of
from moe_ops.kernels.triton.experts.products import hopper, skeleton
from moe_ops.kernels.triton.experts.products.hopper import CHUNK_LAYOUT
from moe_ops.kernels.triton.experts.products.skeleton import first_tile, skip, specialize
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.experts.weights import Stack

BLOCK_K = 128
STAGES = 4  # 48 KiB each, beside at most 32 KiB of outputs: all that a block has
STEP = gl.constexpr(BLOCK_K)
ROWS, SUM, CHUNK = (gl.constexpr(n) for n in (hopper.HALF_M, hopper.HALF_N, hopper.CHUNK_N))


@gluon.jit
def _group(row, N, W: gl.constexpr):
    """Where the scales of a row of W are among the scales of its expert; anywhere for a row that is
    not there."""
    DOWN: gl.constexpr = W.down
    if DOWN == -1:
        return row * 0
    else:
        return gl.minimum(row, N - 1) // DOWN


@gluon.jit
def _at(scales, tile, N, K, W: gl.constexpr, ACT: gl.constexpr):
    """Where the scales of a tile lie, for one consumer. A chunk's 64 rows of W share theirs."""
    _, _, _, down = scales
    expert, end, row, n = tile
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, CHUNK_LAYOUT))
    rows = gl.minimum(rows, end - 1)
    if ACT.interleaved:  # rows 2 i of the gate and 2 i + 1 of up
        row_0 = n * 2 * SUM
        row_1, row_2, row_3 = row_0 + 2 * CHUNK, row_0 + 1, row_0 + 2 * CHUNK + 1
    else:
        row_0 = n * SUM if ACT.gated else n * 2 * SUM
        row_2 = N // 2 + row_0 if ACT.gated else row_0 + SUM
        row_1, row_3 = row_0 + CHUNK, row_2 + CHUNK
    across = gl.cdiv(K, STEP)
    first = expert * down
    return (
        rows,
        (first + _group(row_0, N, W)) * across, (first + _group(row_1, N, W)) * across,
        (first + _group(row_2, N, W)) * across, (first + _group(row_3, N, W)) * across,
    )  # fmt: skip


@gluon.jit
def _stored(scales, at, i):
    """The scales of step i as they are stored: of rows, and of each 64 columns. Only loads."""
    a_scale_ptr, stride, w_scale_ptr, _ = scales
    rows, at_0, at_1, at_2, at_3 = at
    w_scale_ptr += i
    return (
        gl.load(a_scale_ptr + i * stride + rows),
        gl.load(w_scale_ptr + at_0), gl.load(w_scale_ptr + at_1), gl.load(w_scale_ptr + at_2),
        gl.load(w_scale_ptr + at_3),
    )  # fmt: skip


@gluon.jit
def _start(rings, stage, RIGHT: gl.constexpr, LOWER: gl.constexpr):
    """Start the product of a consumer's rows of A with the left or right 128 rows of W."""
    a_bufs, w_bufs, _, _ = rings
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SUM, 32])
    a = a_bufs.index(stage).slice(LOWER * ROWS, ROWS)
    w = w_bufs.index(stage).slice(RIGHT * SUM, SUM).permute([1, 0])
    none = gl.zeros([ROWS, SUM], gl.float32, layout)
    return warpgroup_mma(a, w, none, use_acc=False, is_async=True)


@gluon.jit
def _factors(stored, KIND: gl.constexpr):
    """What sums of each 64 columns are to be multiplied by, for rows."""
    factors = ()
    for i in gl.static_range(1, 5):
        factor = stored[0] * finite(scale_of(stored[i], KIND))
        factors = factors + (factor[:, None],)  # noqa: RUF005
    return factors


@gluon.jit
def _sums(part):
    """The left and the right 64 columns of a product, once it is done."""
    left, right = hopper.halves(warpgroup_mma_wait(0, deps=[part]))
    left = gl.convert_layout(left, CHUNK_LAYOUT, assert_trivial=True)
    right = gl.convert_layout(right, CHUNK_LAYOUT, assert_trivial=True)
    return left, right


@gluon.jit
def _multiply(
    rings, step, k_steps, scales, at, pending, output, buffers, out_n, LOWER: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """A consumer's part of a tile, in chunks of 64 columns. The pending one is stored behind its
    first step, and scales are loaded a step ahead.
    """
    _, _, full, empty = rings
    STAGES: gl.constexpr = full.shape[0]
    KIND: gl.constexpr = W.kind
    EACH: gl.constexpr = len(pending[0]) // 2
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    part = _start(rings, stage, 0, LOWER)
    stored = _stored(scales, at, 0)
    for i in gl.static_range(EACH):
        hopper.store_chunk(i, pending, output, buffers, out_n)
    factors = _factors(stored, KIND)
    stored = _stored(scales, at, 1)
    left, right = _sums(part)
    acc_0, acc_1 = left * factors[0], right * factors[1]
    part = _start(rings, stage, 1, LOWER)
    for i in gl.static_range(EACH, 2 * EACH):
        hopper.store_chunk(i, pending, output, buffers, out_n)
    left, right = _sums(part)
    mbarrier.arrive(empty.index(stage))
    acc_2, acc_3 = left * factors[2], right * factors[3]
    for i in range(1, k_steps):
        stage = (step + i) % STAGES
        mbarrier.wait(full.index(stage), (step + i) // STAGES & 1)
        part = _start(rings, stage, 0, LOWER)
        factors = _factors(stored, KIND)
        stored = _stored(scales, at, gl.minimum(i + 1, k_steps - 1))
        left, right = _sums(part)
        acc_0 += left * factors[0]
        acc_1 += right * factors[1]
        part = _start(rings, stage, 1, LOWER)
        left, right = _sums(part)
        mbarrier.arrive(empty.index(stage))
        acc_2 += left * factors[2]
        acc_3 += right * factors[3]
    return acc_0, acc_1, acc_2, acc_3


@gluon.jit
def _quantized(left, right, output, tile, col, out_n, DTYPE: gl.constexpr):
    """Codes of 128 columns of h from column `col`, rounded first as h is; stores their scales.

    As `to_float8` of `group_scales.py`, but that a division by a scale is a product with its
    inverse.
    """
    _, _, _, scale_ptr, stride = output
    _, end, row, _ = tile
    cols = col + gl.arange(0, CHUNK, gl.SliceLayout(0, CHUNK_LAYOUT))
    left = gl.where((cols < out_n)[None, :], hopper.as_held(left, DTYPE), 0.0)
    right = gl.where((cols + CHUNK < out_n)[None, :], hopper.as_held(right, DTYPE), 0.0)
    largest = gl.max(gl.maximum(gl.abs(left), gl.abs(right)), 1)
    scale = gl.maximum(largest / LARGEST_CODE, SMALLEST_SCALE)
    scale = gl.where(largest < float("inf"), scale, float("nan"))
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, CHUNK_LAYOUT))
    mask = (rows < end) & (col < out_n)
    gl.store(scale_ptr + col // STEP * stride + rows, scale, mask=mask)
    inverse = (1.0 / scale)[:, None]
    # The conversion saturates, and keeps NaN.
    return (left * inverse).to(gl.float8e4nv), (right * inverse).to(gl.float8e4nv)


@gluon.jit
def _finish(accs, output, tile, sizes, DTYPE: gl.constexpr, ACT: gl.constexpr):
    """The outputs in chunks of 64 columns, and the first column."""
    a, b, c, d = accs
    N, _, out_n = sizes
    expert, _, _, n = tile
    if ACT.gated:
        col = n * SUM
        left = hopper.gated_columns(a, c, output, expert, col, N, ACT)
        right = hopper.gated_columns(b, d, output, expert, col + CHUNK, N, ACT)
        return _quantized(left, right, output, tile, col, out_n, DTYPE), col
    else:
        col = n * 2 * SUM
        a = hopper.columns(a, output, expert, col, N, ACT)
        b = hopper.columns(b, output, expert, col + CHUNK, N, ACT)
        c = hopper.columns(c, output, expert, col + SUM, N, ACT)
        d = hopper.columns(d, output, expert, col + SUM + CHUNK, N, ACT)
        if output[3] is None:
            return (a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)), col
        else:
            a, b = _quantized(a, b, output, tile, col, out_n, DTYPE)
            c, d = _quantized(c, d, output, tile, col + SUM, out_n, DTYPE)
            return (a, b, c, d), col


@gluon.jit
def _product(
    LOWER: gl.constexpr, step, k_steps, tile, pending, output, buffers, rings, sizes, scales,
    HOW: gl.constexpr,
):  # fmt: skip
    """The upper or the lower 64 rows of a tile."""
    N, K, out_n = sizes
    DTYPE: gl.constexpr = HOW[0]
    W: gl.constexpr = HOW[1]
    ACT: gl.constexpr = HOW[2]
    expert, end, row, n = tile
    row += LOWER * ROWS
    if row < end:
        mine = (expert, end, row, n)
        at = _at(scales, mine, N, K, W, ACT)
        accs = _multiply(
            rings, step, k_steps, scales, at, pending, output, buffers, out_n, LOWER, W
        )
        chunks, col = _finish(accs, output, mine, sizes, DTYPE, ACT)
        pending = (chunks, (row, end, col))
    else:
        skip(step, k_steps, rings)
    return pending


@gluon.jit
def _grouped_float8(
    a_desc, a_scale_ptr, w_desc, up_desc, w_scale_ptr, bias_ptr, out_desc, out_ptr, out_scale_ptr,
    tiles_ptr, N, K, n_tiles, stride, down, DTYPE: gl.constexpr, W: gl.constexpr,
    ACT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scales of the output are made if they have a place; DTYPE is that of the layer."""
    dealt = first_tile(tiles_ptr, n_tiles, 2 * ROWS)
    stages, buffers = hopper.allocate(w_desc, out_desc, STEP, STAGES, True)
    source = (a_desc, w_desc, up_desc)
    output = (bias_ptr, out_desc, out_ptr, out_scale_ptr, stride)
    scales = (a_scale_ptr, stride, w_scale_ptr, down)
    specialize(
        dealt, stages, source, output, buffers, (N, K), scales, hopper.both_halves,
        hopper.copy_rows, None, _product, 2 * ROWS, STEP, TURNS=1, STAGES=STAGES, WARPS=1,
        AHEAD=(5, 3, 1), HOW=(DTYPE, W, ACT),
    )  # fmt: skip


def launch(
    a: Tensor, a_scale_GR: Tensor, w_ENK: Tensor, w_scale: Tensor, bias_EN: Tensor | None,
    out: Tensor, out_scale_GR: Tensor | None, tiles: TileMap, weight: Weight, dtype: torch.dtype,
    act: Act,
) -> None:  # fmt: skip
    """Run one product over sorted rows. Its output is of `dtype`, or is quantised from it if there
    is a place for its scales; the backend refuses weights that it does not take."""
    _, N, K = w_ENK.shape
    skeleton.launch(
        _grouped_float8, a, skeleton.boxes(a, hopper.HALF_M, BLOCK_K), a_scale_GR,
        *skeleton.boxes_of_pair(w_ENK, BLOCK_K, act), w_scale,
        None if bias_EN is None else bias_EN.contiguous(),
        skeleton.boxes(out, hopper.HALF_M, hopper.CHUNK_N), out, out_scale_GR, tiles.table, N, K,
        triton.cdiv(N, hopper.BLOCK_N), a_scale_GR.stride(0), w_scale.shape[1],
        gl.bfloat16 if dtype == torch.bfloat16 else gl.float16, weight, act, STAGES,
    )  # fmt: skip


def _run_product(c: Call, a: Operand, stack: Stack, out: Operand, act: Act) -> None:
    w, w_scale, *_, bias = stack
    assert a.scale is not None and w_scale is not None and c.layer.weight is not None
    launch(
        a.values, a.scale, w, w_scale, bias, out.values, out.scale, c.tile_map, c.layer.weight,
        c.dtype, act,
    )  # fmt: skip


run = Products(
    up=lambda c: _run_product(c, c.x, c.layer.stack13, c.h, c.layer.act),
    down=lambda c: _run_product(c, c.h, c.layer.stack2, Operand(c.out), LINEAR),
    reads=Reads(gathered=True, stores="group"),
    tile_rows=lambda *_: hopper.BLOCK_M,
).run
