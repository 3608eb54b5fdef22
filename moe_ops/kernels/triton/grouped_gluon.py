"""The grouped products on Hopper (sm_90): one persistent, warp-specialised kernel in Gluon.

A block holds a ring of stages in shared memory. A producer fills it: W by TMA; the rows of the
left operand by TMA where they lie in order, by cp.async where they are gathered. Two consumer
warpgroups each multiply 64 rows of the 128-row tile by the same 256 rows of W, so that the lower
half of a tile with at most 64 rows left costs no arithmetic, and one warpgroup's epilogue runs
while the other still multiplies.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.grouped import Tiles

BLOCK_M = 128
BLOCK_N = 256  # rows of W in a tile
BLOCK_K = 64
HALF_M = BLOCK_M // 2
HALF_N = BLOCK_N // 2
CHUNK_N = 64  # columns that the epilogue stores at a time
STAGES = 4


@gluon.jit
def _look_up(sizes, tile):
    """The table's entry for a tile, garbage if there is none; `tile_map` writes the table.

    Loads only: `_decode` waits for them, a tile later.
    """
    tiles_ptr, capacity, _, _, n_tiles, total = sizes
    entry = tiles_ptr + gl.where(tile < total, tile // n_tiles, 0)
    return (
        gl.load(entry),
        gl.load(entry + capacity),
        gl.load(entry + 2 * capacity),
        gl.load(entry + 3 * capacity),
        gl.load(entry + 4 * capacity),
    )


@gluon.jit
def _decode(entry, sizes, tile, BLOCK_M: gl.constexpr):
    """(expert, one past its last row, first row, n) of a tile."""
    expert, group_row, end, group, size = entry
    within = tile - group * sizes[4]
    return expert, end, group_row + (within % size) * BLOCK_M, within // size


@gluon.jit
def _load_w(w_descs, expert, n, k, bar, stage, N, GATED: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Two boxes of 128 rows of W[expert], side by side: gate and up rows, if it has both."""
    left, right = w_descs
    half: gl.constexpr = stage.shape[0] // 2
    if INTERLEAVED:
        row = expert * (N // 2) + n * half
        tma.async_copy_global_to_shared(left, [row, k], bar, stage.slice(0, half))
        tma.async_copy_global_to_shared(right, [row, k], bar, stage.slice(half, half))
    else:
        row = expert * N + n * (half if GATED else 2 * half)
        tma.async_copy_global_to_shared(left, [row, k], bar, stage.slice(0, half))
        row += N // 2 if GATED else half
        tma.async_copy_global_to_shared(right, [row, k], bar, stage.slice(half, half))


@gluon.jit
def _produce_gathered(
    source,
    w_descs,
    rings,
    sizes,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    x_ptr, stride_x, rows_ptr = source
    a_bufs, b_bufs, full, empty = rings
    _, _, N, K, _, total = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    offs_k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    start = gl.program_id(0)
    programs = gl.num_programs(0)
    step = 0
    # Ahead of the tile that is being copied, the pairs of the next and the entry of the one after.
    expert, end, row, n = _decode(_look_up(sizes, start), sizes, start, BLOCK_M)
    in_1 = (row + offs_m < end) & (start < total)
    pair = gl.load(rows_ptr + row + offs_m, mask=in_1, other=0)
    entry = _look_up(sizes, start + programs)
    for tile in range(start, total, programs):
        valid = row + offs_m < end
        offset = (pair // TOP_K).to(gl.int64) * stride_x
        expert_2, end, row, n_2 = _decode(entry, sizes, tile + programs, BLOCK_M)
        in_2 = (row + offs_m < end) & (tile + programs < total)
        pair = gl.load(rows_ptr + row + offs_m, mask=in_2, other=0)
        entry = _look_up(sizes, tile + 2 * programs)
        pointers = x_ptr + offset[:, None] + offs_k[None, :]
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, b_bufs.index(0).numel * 2)
            _load_w(w_descs, expert, n, k, bar, b_bufs.index(stage), N, GATED, INTERLEAVED)
            if EVEN_K:
                mask = valid[:, None]
            else:
                # K is a multiple of 8, so eight neighbours are copied or left out together.
                mask = valid[:, None] & ((k + offs_k) // 8 < K // 8)[None, :]
            async_copy.async_copy_global_to_shared(a_bufs.index(stage), pointers, mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            pointers += BLOCK_K
            step += 1
        expert, n = expert_2, n_2


@gluon.jit
def _produce_rows(h_desc, w_descs, rings, sizes):
    a_bufs, b_bufs, full, empty = rings
    _, _, N, K, _, total = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    HALF_M: gl.constexpr = BLOCK_M // 2
    half_bytes: gl.constexpr = HALF_M * BLOCK_K * 2
    start = gl.program_id(0)
    programs = gl.num_programs(0)
    step = 0
    entry = _look_up(sizes, start)
    for tile in range(start, total, programs):
        expert, end, row, n = _decode(entry, sizes, tile, BLOCK_M)
        entry = _look_up(sizes, tile + programs)
        both = row + HALF_M < end
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, b_bufs.index(0).numel * 2 + half_bytes, pred=not both)
            mbarrier.expect(bar, b_bufs.index(0).numel * 2 + 2 * half_bytes, pred=both)
            _load_w(w_descs, expert, n, k, bar, b_bufs.index(stage), N, False, False)
            a = a_bufs.index(stage)
            tma.async_copy_global_to_shared(h_desc, [row, k], bar, a.slice(0, HALF_M))
            tma.async_copy_global_to_shared(
                h_desc, [row + HALF_M, k], bar, a.slice(HALF_M, HALF_M), pred=both
            )
            step += 1


@gluon.jit
def _halves(acc):
    """[M, N] into its left and right [M, N / 2]; each thread has columns of both."""
    M: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([M, 2, HALF]).permute([0, 2, 1]).split()


@gluon.jit
def _store_pending(i: gl.constexpr, pending, where, output, stages, N, GATED: gl.constexpr):
    """Store chunk i of the last tile, if there was one: rows at and after `end` are another's."""
    _, out_desc, out_ptr = output
    row, end, col = where
    stage = stages.index(i % 2)
    M: gl.constexpr = stage.shape[0]
    CHUNK: gl.constexpr = stage.shape[1]
    col += i * CHUNK
    # The copy that last read this stage is done: it is the last but one, or, where a tile that is
    # not copied came between, any.
    if row + M <= end:
        tma.store_wait(1)
        stage.store(pending[i])
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row, col], stage)
    elif row < end:
        tma.store_wait(0)
        stage.store(pending[i])
        out_n = N // 2 if GATED else N
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        rows = row + gl.arange(0, M, gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        pointers = out_ptr + rows.to(gl.int64)[:, None] * out_n + cols[None, :]
        mask = (rows < end)[:, None] & (cols < out_n)[None, :]
        gl.store(pointers, stage.load(layout), mask=mask)


@gluon.jit
def _add_bias(acc, bias_ptr, expert, col, N, STRIDE: gl.constexpr):
    """acc plus b[expert, col + STRIDE * j] for column j of acc."""
    if bias_ptr is not None:
        cols = col + STRIDE * gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + expert.to(gl.int64) * N + cols, mask=cols < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    return acc


@gluon.jit
def _gated_chunk(
    gate,
    up,
    bias_ptr,
    expert,
    col,
    N,
    layout: gl.constexpr,
    dtype: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    KIND: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_SHIFT: gl.constexpr,
):
    if INTERLEAVED:
        gate = _add_bias(gate, bias_ptr, expert, 2 * col, N, 2)
        up = _add_bias(up, bias_ptr, expert, 2 * col + 1, N, 2)
    else:
        gate = _add_bias(gate, bias_ptr, expert, col, N, 1)
        up = _add_bias(up, bias_ptr, expert, N // 2 + col, N, 1)
    h = activate_gated(gate, up, KIND, ALPHA, LIMIT, UP_SHIFT).to(dtype)
    return gl.convert_layout(h, layout, assert_trivial=True)


@gluon.jit
def _chunk(
    acc,
    bias_ptr,
    expert,
    col,
    N,
    layout: gl.constexpr,
    dtype: gl.constexpr,
    KIND: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    acc = _add_bias(acc, bias_ptr, expert, col, N, 1)
    if KIND is not None:
        acc = activate(acc, KIND, ALPHA, LIMIT)
    return gl.convert_layout(acc.to(dtype), layout, assert_trivial=True)


@gluon.jit
def _finish(
    acc,
    bias_ptr,
    expert,
    n,
    N,
    layout: gl.constexpr,
    dtype: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    KIND: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_SHIFT: gl.constexpr,
):
    """The tile's outputs in chunks of 64 columns, and their first column."""
    CHUNK: gl.constexpr = 64
    left, right = _halves(acc)
    a, b = _halves(left)
    c, d = _halves(right)
    if GATED:
        at = n * (2 * CHUNK)
        return (
            _gated_chunk(a, c, bias_ptr, expert, at, N, layout, dtype, INTERLEAVED, KIND, ALPHA, LIMIT, UP_SHIFT),
            _gated_chunk(b, d, bias_ptr, expert, at + CHUNK, N, layout, dtype, INTERLEAVED, KIND, ALPHA, LIMIT, UP_SHIFT),
        ), at
    else:
        at = n * (4 * CHUNK)
        return (
            _chunk(a, bias_ptr, expert, at, N, layout, dtype, KIND, ALPHA, LIMIT),
            _chunk(b, bias_ptr, expert, at + CHUNK, N, layout, dtype, KIND, ALPHA, LIMIT),
            _chunk(c, bias_ptr, expert, at + 2 * CHUNK, N, layout, dtype, KIND, ALPHA, LIMIT),
            _chunk(d, bias_ptr, expert, at + 3 * CHUNK, N, layout, dtype, KIND, ALPHA, LIMIT),
        ), at


@gluon.jit
def _multiply(acc, rings, step, use_acc, HALF: gl.constexpr, GATHERED: gl.constexpr):
    """Start acc += A @ W.T for the stage of this step, once it is full."""
    a_bufs, b_bufs, full, _ = rings
    STAGES: gl.constexpr = a_bufs.shape[0]
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    if GATHERED:
        fence_async_shared()  # cp.async writes by the generic proxy
    a = a_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
    b = b_bufs.index(stage).permute([1, 0])
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _consume(
    HALF: gl.constexpr,
    output,
    stages,
    rings,
    sizes,
    GATHERED: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    KIND: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_SHIFT: gl.constexpr,
):
    """Multiply and store rows 64 * HALF to 64 * HALF + 63 of every tile."""
    a_bufs, b_bufs, full, empty = rings
    _, _, N, K, _, total = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    HALF_M: gl.constexpr = BLOCK_M // 2
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    BLOCK_N: gl.constexpr = b_bufs.shape[1]
    CHUNK: gl.constexpr = stages.shape[2]
    CHUNKS: gl.constexpr = 2 if GATED else 4
    dtype: gl.constexpr = stages.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    chunk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    start = gl.program_id(0)
    programs = gl.num_programs(0)
    step = 0
    k_steps = gl.cdiv(K, BLOCK_K)
    # A tile's outputs wait in registers and are stored while the next one is multiplied.
    none = gl.zeros([HALF_M, CHUNK], dtype, chunk_layout)
    if GATED:
        pending = (none, none)
    else:
        pending = (none, none, none, none)
    pending_row = 0
    pending_end = 0
    pending_col = 0
    entry = _look_up(sizes, start)
    for tile in range(start, total, programs):
        expert, end, row, n = _decode(entry, sizes, tile, BLOCK_M)
        entry = _look_up(sizes, tile + programs)
        row += HALF * HALF_M
        if row < end:
            acc = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            where = (pending_row, pending_end, pending_col)
            for i in gl.static_range(CHUNKS):
                acc = _multiply(acc, rings, step + i, i > 0, HALF, GATHERED)
                _store_pending(i, pending, where, output, stages, N, GATED)
                acc = warpgroup_mma_wait(1, deps=[acc])
                # All but the last product are done, so the stage before is free.
                if i > 0:
                    mbarrier.arrive(empty.index((step + i - 1) % STAGES))
            for i in range(CHUNKS, k_steps):
                acc = _multiply(acc, rings, step + i, True, HALF, GATHERED)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((step + i - 1) % STAGES))
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step + k_steps - 1) % STAGES))
            bias_ptr = output[0]
            pending, pending_col = _finish(
                acc, bias_ptr, expert, n, N, chunk_layout, dtype, GATED, INTERLEAVED, KIND, ALPHA, LIMIT, UP_SHIFT
            )
            pending_row = row
            pending_end = end
        else:
            for i in range(k_steps):
                stage = (step + i) % STAGES
                mbarrier.wait(full.index(stage), (step + i) // STAGES & 1)
                mbarrier.arrive(empty.index(stage))
        step += k_steps
    where = (pending_row, pending_end, pending_col)
    for i in gl.static_range(CHUNKS):
        _store_pending(i, pending, where, output, stages, N, GATED)
    tma.store_wait(0)


@gluon.jit
def _grouped(
    a,
    stride_a,
    rows_ptr,
    w_desc,
    up_desc,
    bias_ptr,
    out_desc,
    out_ptr,
    tiles_ptr,
    capacity,
    N,
    K,
    n_tiles,
    TOP_K: gl.constexpr,
    GATED: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    KIND: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_SHIFT: gl.constexpr,
    EVEN_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`a` is x's pointer where TOP_K is given (rows gathered), else the descriptor of h."""
    GATHERED: gl.constexpr = TOP_K is not None
    PRODUCER_WARPS: gl.constexpr = 4 if GATHERED else 1
    dtype: gl.constexpr = w_desc.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], swizzled)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], swizzled)
    stages_0 = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, 64], swizzled)
    stages_1 = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, 64], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        # The W copy's one arrival, and where rows are gathered one of every producer thread.
        mbarrier.init(full.index(i), count=1 + 32 * PRODUCER_WARPS if GATHERED else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    w_descs = (w_desc, up_desc)
    rings = (a_bufs, b_bufs, full, empty)
    total = gl.load(tiles_ptr + 5 * capacity) * n_tiles
    sizes = (tiles_ptr, capacity, N, K, n_tiles, total)
    output = (bias_ptr, out_desc, out_ptr)
    if GATHERED:
        source = (a, stride_a, rows_ptr)
        gl.warp_specialize(
            [
                (_consume, (0, output, stages_0, rings, sizes, GATHERED, GATED, INTERLEAVED, KIND, ALPHA, LIMIT, UP_SHIFT)),
                (_consume, (1, output, stages_1, rings, sizes, GATHERED, GATED, INTERLEAVED, KIND, ALPHA, LIMIT, UP_SHIFT)),
                (_produce_gathered, (source, w_descs, rings, sizes, TOP_K, GATED, INTERLEAVED, EVEN_K)),
            ],
            [4, 4],
            [216, 72],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, output, stages_0, rings, sizes, GATHERED, GATED, INTERLEAVED, KIND, ALPHA, LIMIT, UP_SHIFT)),
                (_consume, (1, output, stages_1, rings, sizes, GATHERED, GATED, INTERLEAVED, KIND, ALPHA, LIMIT, UP_SHIFT)),
                (_produce_rows, (a, w_descs, rings, sizes)),
            ],
            [4, 1],
            [232, 40],
        )


def launch(
    a: Tensor,
    rows_R: Tensor | None,
    w_ENK: Tensor,
    bias_EN: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    top_k: int | None,
    activation: tuple,
) -> None:
    """Run the product; `runs_on_hopper` in grouped.py says for which operands this may be called."""
    E, N, K = w_ENK.shape
    swizzled = gl.NVMMASharedLayout(128, 16, rank=2)
    w_2d = w_ENK.view(E * N, K)
    interleaved = activation[1]
    w_desc, up_desc = (
        TensorDescriptor.from_tensor(rows, [HALF_N, BLOCK_K], swizzled)
        for rows in ((w_2d[::2], w_2d[1::2]) if interleaved else (w_2d, w_2d))
    )
    out_desc = TensorDescriptor.from_tensor(out, [HALF_M, CHUNK_N], swizzled)
    if top_k is None:
        a_arg, stride_a = TensorDescriptor.from_tensor(a, [HALF_M, BLOCK_K], swizzled), None
    else:
        a_arg, stride_a = a, a.stride(0)
    properties = torch.cuda.get_device_properties(a.device)
    _grouped[(properties.multi_processor_count,)](
        a_arg,
        stride_a,
        rows_R,
        w_desc,
        up_desc,
        bias_EN,
        out_desc,
        out,
        tiles.table,
        tiles.capacity,
        N,
        K,
        triton.cdiv(N, BLOCK_N),
        top_k,
        *activation,
        K % BLOCK_K == 0,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        num_warps=4,
        maxnreg=168,
    )
