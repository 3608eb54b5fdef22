"""The grouped products on Hopper (sm_90): one persistent, warp-specialised kernel in Gluon.

A block holds a ring of stages in shared memory. A producer fills it: W by TMA; the rows of A by
TMA where they lie in order, by cp.async where they are gathered. Two consumer warpgroups each
multiply 64 rows of a 128-row tile by the same 256 rows of W, so the lower half of a tile with at
most 64 rows costs no arithmetic. All of them walk over the same tiles, each at its own pace:
outputs stay in registers and are stored, and the next tile is looked up, behind the products of
the tile at hand.

What the functions below share:
    rings   stages of A [128, 64] and of W [256, 64]; barriers: stage full, stage read
    sizes   table of tiles, its capacity, N rows of W per expert, K, tiles along N, slots of this
            block, and which tiles they hold (`_schedule`)
    output  bias or None, descriptor and pointer of the output
    ACT     (kind or None, gated, interleaved, alpha, limit, up_shift)
"""

from __future__ import annotations

import functools

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
from moe_ops.kernels.triton.tile_map import Tiles

# Named so from Triton 3.8 on; before that, longer.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

BLOCK_M = 128
BLOCK_N = 256
BLOCK_K = 64
HALF_M = BLOCK_M // 2
HALF_N = BLOCK_N // 2
CHUNK_N = 64  # columns that one copy stores: a row of 128 bytes, as shared memory is swizzled
STAGES = 4  # 48 KiB each, beside 32 KiB of outputs: all that a block has
REGISTERS = 168  # of a thread at the start, for three warpgroups; then moved to the consumers
CHUNK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16]))


@gluon.jit
def _schedule(tiles_ptr, capacity, n_tiles):
    """This block's share of the work: how many slots it has, and what `_tile_of` needs.

    Blocks are dealt the long tiles in turn, then the short ones from where those ended, so that all
    have equally many of both. If long tiles would give at most half of the blocks one more, those
    tiles are split into upper and lower 64 rows, which are dealt after the short ones.
    """
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    tiles = gl.load(tiles_ptr + 5 * capacity) * n_tiles
    long_tiles = gl.load(tiles_ptr + 5 * capacity + 1) * n_tiles
    split = long_tiles % blocks
    if 2 * split > blocks:
        split = 0
    longs = long_tiles - split
    shorts = tiles - long_tiles + 2 * split
    first_short = (block + blocks - longs % blocks) % blocks
    my_longs = (longs - block + blocks - 1) // blocks
    my_shorts = (shorts - first_short + blocks - 1) // blocks
    return my_longs + my_shorts, (my_shorts, first_short, longs, long_tiles, tiles)


@gluon.jit
def _tile_of(slot, slots, share):
    """(tile, half or -1) of one of this block's slots.

    Short tiles are spread evenly over a block's slots and, by the block's phase, over the blocks at
    any time, so that blocks reach long and short tiles of an expert at nearly the same time.
    """
    my_shorts, first_short, longs, long_tiles, tiles = share
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    phase = (blocks - 1 - first_short) * slots // blocks
    before = (slot * my_shorts + phase) // gl.maximum(slots, 1)
    after = ((slot + 1) * my_shorts + phase) // gl.maximum(slots, 1)
    tile = block + (slot - before) * blocks
    half = -1
    if after > before:
        tile = long_tiles + first_short + before * blocks
        if tile >= tiles:
            half = (tile - tiles) % 2
            tile = longs + (tile - tiles) // 2
    return tile, half


@gluon.jit
def _look_up(slot, sizes):
    """A slot's tile and the table's entry for it, anything if there is none; `tile_map` writes it.

    Only loads: `_decode` waits for them, a slot later.
    """
    tiles_ptr, capacity, _, _, n_tiles, slots, share = sizes
    tile, half = _tile_of(slot, slots, share)
    entry = tiles_ptr + gl.where(slot < slots, tile // n_tiles, 0)
    return (
        tile,
        half,
        gl.load(entry),
        gl.load(entry + capacity),
        gl.load(entry + 2 * capacity),
        gl.load(entry + 3 * capacity),
        gl.load(entry + 4 * capacity),
    )


@gluon.jit
def _decode(entry, sizes, BLOCK_M: gl.constexpr):
    """(expert, one past the last row, first row, tile along N) of a slot that was looked up."""
    n_tiles = sizes[4]
    tile, half, expert, group_row, end, group, size = entry
    within = tile - group * n_tiles
    row = group_row + within % size * BLOCK_M
    if half >= 0:
        row += half * (BLOCK_M // 2)
        end = gl.minimum(end, row + BLOCK_M // 2)
    return expert, end, row, within // size


@gluon.jit
def _copy_w(w_descs, expert, n, k, full, stage, N, GATED: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Two boxes of 128 rows of W[expert]: gate rows and up rows, if it has both."""
    left, right = w_descs
    HALF: gl.constexpr = stage.shape[0] // 2
    if INTERLEAVED:  # the descriptors are of the even and of the odd rows
        row = expert * (N // 2) + n * HALF
        right_row = row
    elif GATED:
        row = expert * N + n * HALF
        right_row = row + N // 2
    else:
        row = expert * N + n * (2 * HALF)
        right_row = row + HALF
    tma_load(left, [row, k], full, stage.slice(0, HALF))
    tma_load(right, [right_row, k], full, stage.slice(HALF, HALF))


@gluon.jit
def _produce_gathered(
    source,
    w_descs,
    rings,
    sizes,
    TOP_K: gl.constexpr,
    ACT: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Fill the ring with rows of x and of W, by four warps."""
    x_ptr, stride_x, rows_ptr = source
    a_bufs, w_bufs, full, empty = rings
    _, _, N, K, _, slots, _ = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    W_BYTES: gl.constexpr = w_bufs.shape[1] * BLOCK_K * 2
    GATED: gl.constexpr = ACT[1]
    INTERLEAVED: gl.constexpr = ACT[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ms = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    step = 0
    # Ahead of the tile that is being copied: the pairs of the next, the entry of the one after.
    expert, end, row, n = _decode(_look_up(0, sizes), sizes, BLOCK_M)
    valid = (row + ms < end) & (slots > 0)
    pair = gl.load(rows_ptr + row + ms, mask=valid, other=0)
    entry = _look_up(1, sizes)
    for slot in range(0, slots):
        pointers = x_ptr + ((pair // TOP_K).to(gl.int64) * stride_x)[:, None] + ks[None, :]
        valid_now, expert_now, n_now = valid, expert, n
        expert, end, row, n = _decode(entry, sizes, BLOCK_M)
        valid = (row + ms < end) & (slot + 1 < slots)
        pair = gl.load(rows_ptr + row + ms, mask=valid, other=0)
        entry = _look_up(slot + 2, sizes)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, W_BYTES)
            w_buf = w_bufs.index(stage)
            _copy_w(w_descs, expert_now, n_now, k, bar, w_buf, N, GATED, INTERLEAVED)
            if EVEN_K:
                mask = valid_now[:, None]
            else:
                # K is a multiple of 8, so the 16 bytes of one copy are all inside or all outside.
                mask = valid_now[:, None] & ((k + ks) // 8 < K // 8)[None, :]
            cp_async(a_bufs.index(stage), pointers, mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            pointers += BLOCK_K
            step += 1


@gluon.jit
def _produce_rows(a_desc, w_descs, rings, sizes):
    """Fill the ring with consecutive rows of A and rows of W, by one warp."""
    a_bufs, w_bufs, full, empty = rings
    _, _, N, K, _, slots, _ = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    HALF_M: gl.constexpr = BLOCK_M // 2
    W_BYTES: gl.constexpr = w_bufs.shape[1] * BLOCK_K * 2
    HALF_BYTES: gl.constexpr = HALF_M * BLOCK_K * 2
    step = 0
    entry = _look_up(0, sizes)
    for slot in range(0, slots):
        expert, end, row, n = _decode(entry, sizes, BLOCK_M)
        entry = _look_up(slot + 1, sizes)
        both = row + HALF_M < end
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(bar, W_BYTES + HALF_BYTES, pred=not both)
            mbarrier.expect(bar, W_BYTES + 2 * HALF_BYTES, pred=both)
            _copy_w(w_descs, expert, n, k, bar, w_bufs.index(stage), N, False, False)
            upper = a_bufs.index(stage).slice(0, HALF_M)
            lower = a_bufs.index(stage).slice(HALF_M, HALF_M)
            tma_load(a_desc, [row, k], bar, upper)
            tma_load(a_desc, [row + HALF_M, k], bar, lower, pred=both)
            step += 1


@gluon.jit
def _multiply(acc, rings, step, use_acc, HALF: gl.constexpr, GATHERED: gl.constexpr):
    """Start acc += A @ W.T on the stage of this step, once it is full."""
    a_bufs, w_bufs, full, _ = rings
    STAGES: gl.constexpr = a_bufs.shape[0]
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    if GATHERED:
        fence_async_shared()  # cp.async writes through the generic proxy
    a = a_bufs.index(stage).slice(HALF * HALF_M, HALF_M)
    w = w_bufs.index(stage).permute([1, 0])
    return warpgroup_mma(a, w, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _halves(acc):
    """[M, N] into its left and right [M, N / 2]; a thread has the same columns of both."""
    M: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([M, 2, HALF]).permute([0, 2, 1]).split()


@gluon.jit
def _add_bias(acc, bias_ptr, expert, col, N, STRIDE: gl.constexpr):
    """acc plus bias[expert, col + STRIDE * j] for column j of acc."""
    if bias_ptr is not None:
        cols = col + STRIDE * gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + expert.to(gl.int64) * N + cols, mask=cols < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    return acc


@gluon.jit
def _gated_chunk(gate, up, output, expert, col, N, ACT: gl.constexpr):
    """64 columns of the output, from column `col`, rounded."""
    bias_ptr, out_desc, _ = output
    if ACT[2]:
        gate = _add_bias(gate, bias_ptr, expert, 2 * col, N, 2)
        up = _add_bias(up, bias_ptr, expert, 2 * col + 1, N, 2)
    else:
        gate = _add_bias(gate, bias_ptr, expert, col, N, 1)
        up = _add_bias(up, bias_ptr, expert, N // 2 + col, N, 1)
    h = activate_gated(gate, up, ACT)
    return gl.convert_layout(h.to(out_desc.dtype), CHUNK_LAYOUT, assert_trivial=True)


@gluon.jit
def _chunk(acc, output, expert, col, N, ACT: gl.constexpr):
    """64 columns of the output, from column `col`, rounded."""
    bias_ptr, out_desc, _ = output
    acc = _add_bias(acc, bias_ptr, expert, col, N, 1)
    if ACT[0] is not None:
        acc = activate(acc, ACT)
    return gl.convert_layout(acc.to(out_desc.dtype), CHUNK_LAYOUT, assert_trivial=True)


@gluon.jit
def _finish(acc, output, expert, n, N, ACT: gl.constexpr):
    """The outputs in chunks of 64 columns, and the first column."""
    CHUNK: gl.constexpr = acc.shape[1] // 4
    left, right = _halves(acc)
    a, b = _halves(left)
    c, d = _halves(right)
    if ACT[1]:
        col = n * (2 * CHUNK)
        return (
            _gated_chunk(a, c, output, expert, col, N, ACT),
            _gated_chunk(b, d, output, expert, col + CHUNK, N, ACT),
        ), col
    else:
        col = n * (4 * CHUNK)
        return (
            _chunk(a, output, expert, col, N, ACT),
            _chunk(b, output, expert, col + CHUNK, N, ACT),
            _chunk(c, output, expert, col + 2 * CHUNK, N, ACT),
            _chunk(d, output, expert, col + 3 * CHUNK, N, ACT),
        ), col


@gluon.jit
def _store(i: gl.constexpr, pending, where, output, buffers, out_n):
    """Store chunk i of the pending tile, if there is one; rows from `end` on belong to others."""
    _, out_desc, out_ptr = output
    row, end, col = where
    buffer = buffers.index(i % 2)
    M: gl.constexpr = buffer.shape[0]
    CHUNK: gl.constexpr = buffer.shape[1]
    col += i * CHUNK
    # The copy that last read this buffer has to be done. It is the last but one, unless tiles that
    # were not stored by copies came between.
    if row + M <= end:
        tma.store_wait(1)
        buffer.store(pending[i])
        fence_async_shared()
        tma_store(out_desc, [row, col], buffer)
    elif row < end:
        tma.store_wait(0)
        buffer.store(pending[i])
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        rows = row + gl.arange(0, M, gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        pointers = out_ptr + rows.to(gl.int64)[:, None] * out_n + cols[None, :]
        mask = (rows < end)[:, None] & (cols < out_n)[None, :]
        gl.store(pointers, buffer.load(layout), mask=mask)


@gluon.jit
def _consume(
    HALF: gl.constexpr,
    output,
    buffers,
    rings,
    sizes,
    GATHERED: gl.constexpr,
    ACT: gl.constexpr,
):
    """Multiply and store rows 64 * HALF to 64 * HALF + 63 of every tile, by one warpgroup."""
    a_bufs, w_bufs, full, empty = rings
    _, _, N, K, _, slots, _ = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_M: gl.constexpr = a_bufs.shape[1]
    HALF_M: gl.constexpr = BLOCK_M // 2
    BLOCK_N: gl.constexpr = w_bufs.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    no_chunk = gl.zeros([HALF_M, BLOCK_N // 4], output[1].dtype, CHUNK_LAYOUT)
    CHUNKS: gl.constexpr = 2 if ACT[1] else 4
    out_n = N // 2 if ACT[1] else N
    pending = (no_chunk, no_chunk) if ACT[1] else (no_chunk, no_chunk, no_chunk, no_chunk)
    pending_row = 0
    pending_end = 0
    pending_col = 0
    k_steps = gl.cdiv(K, a_bufs.shape[2])
    step = 0
    expert, end, row, n = _decode(_look_up(0, sizes), sizes, BLOCK_M)
    for slot in range(0, slots):
        row += HALF * HALF_M
        if row < end:
            acc = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            where = (pending_row, pending_end, pending_col)
            for i in gl.static_range(CHUNKS):
                acc = _multiply(acc, rings, step + i, i > 0, HALF, GATHERED)
                if i == 0:
                    entry = _look_up(slot + 1, sizes)
                _store(i, pending, where, output, buffers, out_n)
                # Once all but the last product are done, the stage before is free.
                acc = warpgroup_mma_wait(1, deps=[acc])
                if i > 0:
                    mbarrier.arrive(empty.index((step + i - 1) % STAGES))
            next_expert, next_end, next_row, next_n = _decode(entry, sizes, BLOCK_M)
            for i in range(CHUNKS, k_steps):
                acc = _multiply(acc, rings, step + i, True, HALF, GATHERED)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((step + i - 1) % STAGES))
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((step + k_steps - 1) % STAGES))
            pending, pending_col = _finish(acc, output, expert, n, N, ACT)
            pending_row = row
            pending_end = end
        else:
            entry = _look_up(slot + 1, sizes)
            for i in range(step, step + k_steps):
                mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
                mbarrier.arrive(empty.index(i % STAGES))
            next_expert, next_end, next_row, next_n = _decode(entry, sizes, BLOCK_M)
        expert, end, row, n = next_expert, next_end, next_row, next_n
        step += k_steps
    where = (pending_row, pending_end, pending_col)
    for i in gl.static_range(CHUNKS):
        _store(i, pending, where, output, buffers, out_n)
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
    ACT: gl.constexpr,
    EVEN_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """`a` is a pointer if TOP_K is given, which says that rows are gathered, else a descriptor."""
    GATHERED: gl.constexpr = TOP_K is not None
    dtype: gl.constexpr = w_desc.dtype
    swizzled: gl.constexpr = w_desc.layout
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], swizzled)
    w_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], swizzled)
    buffers_0 = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, BLOCK_N // 4], swizzled)
    buffers_1 = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, BLOCK_N // 4], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        # One arrival for the TMA copies; where rows are gathered, one more of every thread.
        mbarrier.init(full.index(i), count=129 if GATHERED else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (a_bufs, w_bufs, full, empty)
    w_descs = (w_desc, up_desc)
    output = (bias_ptr, out_desc, out_ptr)
    slots, share = _schedule(tiles_ptr, capacity, n_tiles)
    sizes = (tiles_ptr, capacity, N, K, n_tiles, slots, share)
    # Registers of the second consumer and of the producer; what is left goes to the first consumer.
    if GATHERED:
        x = (a, stride_a, rows_ptr)
        gl.warp_specialize(
            [
                (_consume, (0, output, buffers_0, rings, sizes, GATHERED, ACT)),
                (_consume, (1, output, buffers_1, rings, sizes, GATHERED, ACT)),
                (_produce_gathered, (x, w_descs, rings, sizes, TOP_K, ACT, EVEN_K)),
            ],
            [4, 4],
            [216, 72],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, output, buffers_0, rings, sizes, GATHERED, ACT)),
                (_consume, (1, output, buffers_1, rings, sizes, GATHERED, ACT)),
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
    act: tuple,
) -> None:
    """Run the product; `runs_on_hopper` in grouped.py says which operands it takes."""
    E, N, K = w_ENK.shape
    interleaved = act[2]
    w_2d = w_ENK.view(E * N, K)
    swizzled = gl.NVMMASharedLayout(128, 16, rank=2)
    w_desc, up_desc = (
        TensorDescriptor.from_tensor(w, [HALF_N, BLOCK_K], swizzled)
        for w in ((w_2d[::2], w_2d[1::2]) if interleaved else (w_2d, w_2d))
    )
    out_desc = TensorDescriptor.from_tensor(out, [HALF_M, CHUNK_N], swizzled)
    if top_k is None:
        source, stride = TensorDescriptor.from_tensor(a, [HALF_M, BLOCK_K], swizzled), None
    else:
        source, stride = a, a.stride(0)
    _grouped[(_processors(a.device),)](
        source,
        stride,
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
        act,
        K % BLOCK_K == 0,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        STAGES,
        num_warps=4,
        maxnreg=REGISTERS,
    )


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
