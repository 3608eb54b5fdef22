"""The grouped products on Hopper (sm_90): one persistent, warp-specialised kernel in Gluon.

A block holds a ring of stages in shared memory. A producer fills it: W by TMA; the rows of A by
TMA where they lie in order, by cp.async where they are gathered. Two consumer warpgroups each
multiply 64 rows of a 128-row tile by the same 256 rows of W, so the lower half of a tile with at
most 64 rows costs no arithmetic. A block's first tile is dealt; each of the others the producer
draws from a queue while it copies the one before, and tells the consumers in shared memory: tiles
cost too unequal times to be dealt evenly ahead of time. Each walks over the block's tiles at its
own pace: outputs stay in registers and are stored behind the products of the next tile.

What the functions below share:
    rings   stages of A [128, 64] and of W [256, 64]; barriers: stage full, stage read
    sizes   N rows of W per expert, K
    queue   table of tiles, tiles along N, whole tiles of the queue, items of it
    tile    expert or -1 if there is none, one past the last row, first row, tile along N
    notes   where the producer writes the tile of a slot: one place for even, one for odd slots
    tokens  the same for the rows of x of a slot's tile, -1 past its end: registers are short
    relay   where one thread of a producer leaves a number for the others
    output  bias or None, descriptor and pointer of the output
    ACT     (kind or None, gated, interleaved, alpha, limit, up_shift)
"""

from __future__ import annotations

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

from moe_ops.kernels.triton import replay
from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.experts.tile_map import ENTRY, TileMap
from moe_ops.kernels.triton.launch import processors

# Named so from Triton 3.7 or 3.8 on; before that, longer.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
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
def _queue(tiles_ptr, n_tiles):
    """The queue of this product, for `_look_up` and `_draw`: its items are tiles in the order of
    the table, those of a group that share W side by side, and the last few of them as upper and
    lower 64 rows, so that blocks end at nearly the same time.
    """
    blocks = gl.num_programs(0)
    row_tiles = gl.load(tiles_ptr)
    long_tiles = gl.load(tiles_ptr + 1)
    tiles = row_tiles * n_tiles
    cut = blocks // 4
    if tiles < blocks:
        cut = gl.where(2 * tiles <= blocks, tiles, 0)
    if 4 * long_tiles < row_tiles:
        cut = 0  # most of what is cut would have no lower half
    return tiles_ptr, n_tiles, tiles - cut, tiles + cut


@gluon.jit
def _look_up(item, queue):
    """An item and the table's entry for it, anything if there is none; `tile_map` writes it.

    Only loads: `_decode` waits for them.
    """
    tiles_ptr, n_tiles, whole, items = queue
    tile = gl.where(item < whole, item, whole + (item - whole) // 2)
    entry = tiles_ptr + ENTRY * (1 + gl.where(item < items, tile // n_tiles, 0))
    return (
        item,
        tile,
        gl.load(entry),
        gl.load(entry + 1),
        gl.load(entry + 2),
        gl.load(entry + 3),
        gl.load(entry + 4),
    )


@gluon.jit
def _decode(entry, queue, BLOCK_M: gl.constexpr):
    """The tile of an item that was looked up."""
    _, n_tiles, whole, items = queue
    item, tile, expert, group_row, end, group, size = entry
    within = tile - group * n_tiles
    row = group_row + within % size * BLOCK_M
    if item >= whole:
        row += (item - whole) % 2 * (BLOCK_M // 2)
        end = gl.minimum(end, row + BLOCK_M // 2)
    return gl.where(item < items, expert, -1), end, row, within // size


@gluon.jit
def _draw(queue):
    """Begin to take the next number of the queue; `_item` waits for it."""
    tiles_ptr, _, _, _ = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    thread = gl.arange(0, 32 * gl.num_warps(), layout)
    none = thread * 0
    counter = tiles_ptr + 2 + none
    return gl.atomic_add(counter, none + 1, mask=thread == 0, sem="relaxed", scope="gpu")


@gluon.jit
def _item(drawn, queue, relay):
    """The item of a number that was drawn; no such item if the queue is empty.

    The first items are dealt, one a block, and a block draws once for each item that it had: so
    whoever draws the last of as many numbers as there are items leaves the queue as it was.
    """
    tiles_ptr, _, _, items = queue
    relay.slice(0, drawn.shape[0]).store(drawn)
    number = gl.max(relay.slice(0, 1).load(drawn.type.layout), 0)
    if number == items - 1:
        gl.store(tiles_ptr + 2, 0)
    return number + gl.num_programs(0)


@gluon.jit
def _next_tile(entry, queue, relay, BLOCK_M: gl.constexpr):
    """`_decode`, or where that is the lower half of a short tile, of the next item with rows."""
    expert, end, row, n = _decode(entry, queue, BLOCK_M)
    while (row >= end) & (expert >= 0):
        entry = _look_up(_item(_draw(queue), queue, relay), queue)
        expert, end, row, n = _decode(entry, queue, BLOCK_M)
    return expert, end, row, n


@gluon.jit
def _tell(tile, notes, slot):
    """Write down the tile of a slot, by the producer, ahead of the last stage of the slot before.

    Two or more steps of that slot are under way. With at least four steps a slot and as many stages
    consumers have then begun with the slot before that one, so they have read its tile, the one
    that is overwritten.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(4):
        note = notes.index(slot % 2 * 4 + i)
        note.store(gl.full([1], tile[i], gl.int32, layout))
    # One thread arrives at the stage's barrier: what all have written comes before.
    barrier()


@gluon.jit
def _told(notes, slot):
    """The tile of a slot, for consumers that have waited for all stages of the slot before."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = slot % 2 * 4
    expert = gl.max(notes.index(at).load(layout), 0)
    end = gl.max(notes.index(at + 1).load(layout), 0)
    row = gl.max(notes.index(at + 2).load(layout), 0)
    n = gl.max(notes.index(at + 3).load(layout), 0)
    return expert, end, row, n


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
def _note_tokens(tile, rows_ptr, tokens, TOP_K: gl.constexpr):
    """Write down which rows of x a tile gathers, -1 for those past its end."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = tile[2] + gl.arange(0, tokens.shape[0], layout)
    valid = (rows < tile[1]) & (tile[0] >= 0)
    pair = gl.load(rows_ptr + rows, mask=valid, other=0)
    tokens.store(gl.where(valid, pair // TOP_K, -1))


@gluon.jit
def _copy_gathered(
    first,
    last,
    x_ptr,
    stride_x,
    tokens,
    tile,
    w_descs,
    rings,
    sizes,
    step,
    ACT: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Steps `first` to `last` - 1 along K of a tile whose rows of x are gathered."""
    a_bufs, w_bufs, full, empty = rings
    N, K = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    W_BYTES: gl.constexpr = w_bufs.shape[1] * BLOCK_K * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    for i in range(first, last):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(bar, W_BYTES)
        k = i * BLOCK_K
        _copy_w(w_descs, tile[0], tile[3], k, bar, w_bufs.index(stage), N, ACT[1], ACT[2])
        token = tokens.load(gl.SliceLayout(1, layout))
        mask = (token >= 0)[:, None]
        if not EVEN_K:
            # K is a multiple of 8, so the 16 bytes of one copy are all inside or all outside.
            mask = mask & ((k + ks) // 8 < K // 8)[None, :]
        pointers = x_ptr + k + (token.to(gl.int64) * stride_x)[:, None] + ks[None, :]
        cp_async(a_bufs.index(stage), pointers, mask=mask)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def _produce_gathered(
    source,
    w_descs,
    rings,
    sizes,
    queue,
    notes,
    relay,
    tile,
    TOP_K: gl.constexpr,
    ACT: gl.constexpr,
    EVEN_K: gl.constexpr,
):
    """Fill the ring with rows of x and of W, by four warps."""
    x_ptr, stride_x, rows_ptr, tokens = source
    BLOCK_M: gl.constexpr = rings[0].shape[1]
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    k_steps = gl.cdiv(sizes[1], BLOCK_K)
    step = 0
    slot = 0
    _note_tokens(tile, rows_ptr, tokens.index(0), TOP_K)
    while tile[0] >= 0:
        mine = tokens.index(slot % 2)
        # The next tile is found two steps at a time, as late as that hides.
        at_0, at_1, at_2 = gl.maximum(k_steps - 6, 0), k_steps - 4, k_steps - 2
        step = _copy_gathered(
            0, at_0, x_ptr, stride_x, mine, tile, w_descs, rings, sizes, step, ACT, EVEN_K
        )
        drawn = _draw(queue)
        step = _copy_gathered(
            at_0, at_1, x_ptr, stride_x, mine, tile, w_descs, rings, sizes, step, ACT, EVEN_K
        )
        entry = _look_up(_item(drawn, queue, relay), queue)
        step = _copy_gathered(
            at_1, at_2, x_ptr, stride_x, mine, tile, w_descs, rings, sizes, step, ACT, EVEN_K
        )
        slot += 1
        next_tile = _next_tile(entry, queue, relay, BLOCK_M)
        _note_tokens(next_tile, rows_ptr, tokens.index(slot % 2), TOP_K)
        _tell(next_tile, notes, slot)
        step = _copy_gathered(
            at_2, k_steps, x_ptr, stride_x, mine, tile, w_descs, rings, sizes, step, ACT, EVEN_K
        )
        tile = next_tile


@gluon.jit
def _copy_rows(first, last, tile, a_desc, w_descs, rings, sizes, step):
    """Steps `first` to `last` - 1 along K of a tile whose rows of A lie in order."""
    a_bufs, w_bufs, full, empty = rings
    expert, end, row, n = tile
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    W_BYTES: gl.constexpr = w_bufs.shape[1] * BLOCK_K * 2
    HALF_BYTES: gl.constexpr = HALF_M * BLOCK_K * 2
    both = row + HALF_M < end
    for i in range(first, last):
        k = i * BLOCK_K
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(bar, W_BYTES + HALF_BYTES, pred=not both)
        mbarrier.expect(bar, W_BYTES + 2 * HALF_BYTES, pred=both)
        _copy_w(w_descs, expert, n, k, bar, w_bufs.index(stage), sizes[0], False, False)
        upper = a_bufs.index(stage).slice(0, HALF_M)
        lower = a_bufs.index(stage).slice(HALF_M, HALF_M)
        tma_load(a_desc, [row, k], bar, upper)
        tma_load(a_desc, [row + HALF_M, k], bar, lower, pred=both)
        step += 1
    return step


@gluon.jit
def _produce_rows(a_desc, w_descs, rings, sizes, queue, notes, relay, tile):
    """Fill the ring with consecutive rows of A and rows of W, by one warp."""
    BLOCK_M: gl.constexpr = rings[0].shape[1]
    k_steps = gl.cdiv(sizes[1], rings[0].shape[2])
    step = 0
    slot = 0
    while tile[0] >= 0:
        # The next tile is found two steps at a time, as late as that hides.
        at_0, at_1, at_2 = gl.maximum(k_steps - 5, 0), k_steps - 3, k_steps - 1
        step = _copy_rows(0, at_0, tile, a_desc, w_descs, rings, sizes, step)
        drawn = _draw(queue)
        step = _copy_rows(at_0, at_1, tile, a_desc, w_descs, rings, sizes, step)
        entry = _look_up(_item(drawn, queue, relay), queue)
        step = _copy_rows(at_1, at_2, tile, a_desc, w_descs, rings, sizes, step)
        slot += 1
        next_tile = _next_tile(entry, queue, relay, BLOCK_M)
        _tell(next_tile, notes, slot)
        step = _copy_rows(at_2, k_steps, tile, a_desc, w_descs, rings, sizes, step)
        tile = next_tile


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
    notes,
    tile,
    GATHERED: gl.constexpr,
    ACT: gl.constexpr,
):
    """Multiply and store rows 64 * HALF to 64 * HALF + 63 of every tile, by one warpgroup."""
    a_bufs, w_bufs, full, empty = rings
    N, K = sizes
    STAGES: gl.constexpr = a_bufs.shape[0]
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
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
    slot = 0
    expert, end, row, n = tile
    while expert >= 0:
        slot += 1
        row += HALF * HALF_M
        if row < end:
            acc = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout)
            where = (pending_row, pending_end, pending_col)
            for i in gl.static_range(CHUNKS):
                acc = _multiply(acc, rings, step + i, i > 0, HALF, GATHERED)
                _store(i, pending, where, output, buffers, out_n)
                # Once all but the last product are done, the stage before is free.
                acc = warpgroup_mma_wait(1, deps=[acc])
                if i > 0:
                    mbarrier.arrive(empty.index((step + i - 1) % STAGES))
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
            for i in range(step, step + k_steps):
                mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
                mbarrier.arrive(empty.index(i % STAGES))
        expert, end, row, n = _told(notes, slot)
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
    # Ahead of the barriers that one thread prepares: behind them, ptxas lets that thread's warp
    # diverge until the tile is known, though it looks it up in registers that a warp shares.
    queue = _queue(tiles_ptr, n_tiles)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    relay = gl.allocate_shared_memory(gl.int32, [BLOCK_M], plain)
    tile = _next_tile(_look_up(gl.program_id(0), queue), queue, relay, BLOCK_M)
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
    notes = gl.allocate_shared_memory(gl.int32, [8, 1], plain)
    tokens = gl.allocate_shared_memory(gl.int32, [2, BLOCK_M], plain)
    for i in gl.static_range(STAGES):
        # One arrival for the TMA copies; where rows are gathered, one more of every thread.
        mbarrier.init(full.index(i), count=129 if GATHERED else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (a_bufs, w_bufs, full, empty)
    w_descs = (w_desc, up_desc)
    output = (bias_ptr, out_desc, out_ptr)
    sizes = (N, K)
    # Registers of the second consumer and of the producer; what is left goes to the first consumer.
    if GATHERED:
        x = (a, stride_a, rows_ptr, tokens)
        gl.warp_specialize(
            [
                (_consume, (0, output, buffers_0, rings, sizes, notes, tile, GATHERED, ACT)),
                (_consume, (1, output, buffers_1, rings, sizes, notes, tile, GATHERED, ACT)),
                (
                    _produce_gathered,
                    (x, w_descs, rings, sizes, queue, notes, relay, tile, TOP_K, ACT, EVEN_K),
                ),
            ],
            [4, 4],
            [224, 64],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, output, buffers_0, rings, sizes, notes, tile, GATHERED, ACT)),
                (_consume, (1, output, buffers_1, rings, sizes, notes, tile, GATHERED, ACT)),
                (_produce_rows, (a, w_descs, rings, sizes, queue, notes, relay, tile)),
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
    tiles: TileMap,
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
    replay.launch(
        _grouped,
        (processors(a),),
        source,
        stride,
        rows_R,
        w_desc,
        up_desc,
        bias_EN,
        out_desc,
        out,
        tiles.table,
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
