"""What the warp-specialised grouped products on Hopper (sm_90) share: the queue of tiles, copies by
TMA into rings of stages, and the stores of a tile behind the products of the next one.

A block's first tile is dealt; each of the others its producer draws from a queue while it copies
the one before, and tells the consumers in shared memory: tiles cost too unequal times to be dealt
evenly ahead of time. Each walks over the block's tiles at its own pace.

What the functions share:
    rings   stages of A and of W, a row of 128 bytes each; barriers: stage full, stage read
    sizes   N rows of W per expert, K
    queue   table of tiles, tiles along N, whole tiles of the queue, items of it
    tile    expert or -1 if there is none, one past the last row, first row, tile along N
    notes   where the producer writes the tile of a slot: one place for even, one for odd slots
    relay   where one thread of a producer leaves a number for the others
    output  bias or None, descriptor and pointer of the output
    ACT     an `Act`
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.experts.tile_map import ENTRY

# Named so from Triton 3.7 or 3.8 on; before that, longer.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

BLOCK_M = 128
BLOCK_N = 256
HALF_M = BLOCK_M // 2  # rows of a consumer
HALF_N = BLOCK_N // 2
CHUNK_N = 64  # columns that one copy stores: of 16 bits, a row of shared memory as it is swizzled
REGISTERS = 168  # of a thread at the start, for three warpgroups; then moved to the consumers
CHUNK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16]))


@gluon.jit
def queue_of(tiles_ptr, n_tiles):
    """The queue of this product, for `look_up` and `draw`: its items are tiles in the order of
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
def look_up(item, queue):
    """An item and the table's entry for it, anything if there is none; `tile_map` writes it.

    Only loads: `tile_of` waits for them.
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
def tile_of(entry, queue, BLOCK_M: gl.constexpr):
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
def draw(queue):
    """Begin to take the next number of the queue; `drawn_item` waits for it."""
    tiles_ptr, _, _, _ = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    thread = gl.arange(0, 32 * gl.num_warps(), layout)
    none = thread * 0
    counter = tiles_ptr + 2 + none
    return gl.atomic_add(counter, none + 1, mask=thread == 0, sem="relaxed", scope="gpu")


@gluon.jit
def drawn_item(drawn, queue, relay):
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
def tile_with_rows(entry, queue, relay, BLOCK_M: gl.constexpr):
    """`tile_of`, or where that is the lower half of a short tile, of the next item with rows."""
    expert, end, row, n = tile_of(entry, queue, BLOCK_M)
    while (row >= end) & (expert >= 0):
        entry = look_up(drawn_item(draw(queue), queue, relay), queue)
        expert, end, row, n = tile_of(entry, queue, BLOCK_M)
    return expert, end, row, n


@gluon.jit
def tell(tile, notes, slot):
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
def told(notes, slot):
    """The tile of a slot, for consumers that have waited for all stages of the slot before."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = slot % 2 * 4
    expert = gl.max(notes.index(at).load(layout), 0)
    end = gl.max(notes.index(at + 1).load(layout), 0)
    row = gl.max(notes.index(at + 2).load(layout), 0)
    n = gl.max(notes.index(at + 3).load(layout), 0)
    return expert, end, row, n


@gluon.jit
def copy_w(w_descs, expert, n, k, full, stage, N, ACT: gl.constexpr):
    """Two boxes of 128 rows of W[expert]: gate rows and up rows, if it has both."""
    left, right = w_descs
    HALF: gl.constexpr = stage.shape[0] // 2
    if ACT.interleaved:  # the descriptors are of the even and of the odd rows
        row = expert * (N // 2) + n * HALF
        right_row = row
    elif ACT.gated:
        row = expert * N + n * HALF
        right_row = row + N // 2
    else:
        row = expert * N + n * (2 * HALF)
        right_row = row + HALF
    tma_load(left, [row, k], full, stage.slice(0, HALF))
    tma_load(right, [right_row, k], full, stage.slice(HALF, HALF))


@gluon.jit
def copy_rows(first, last, tile, a_desc, w_descs, rings, sizes, step, ACT: gl.constexpr):
    """Steps `first` to `last` - 1 along K of a tile whose rows of A lie in order."""
    a_bufs, w_bufs, full, empty = rings
    expert, end, row, n = tile
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    ROW_BYTES: gl.constexpr = BLOCK_K * w_bufs.dtype.primitive_bitwidth // 8
    W_BYTES: gl.constexpr = w_bufs.shape[1] * ROW_BYTES
    HALF_BYTES: gl.constexpr = HALF_M * ROW_BYTES
    both = row + HALF_M < end
    for i in range(first, last):
        k = i * BLOCK_K
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(bar, W_BYTES + HALF_BYTES, pred=not both)
        mbarrier.expect(bar, W_BYTES + 2 * HALF_BYTES, pred=both)
        copy_w(w_descs, expert, n, k, bar, w_bufs.index(stage), sizes[0], ACT)
        upper = a_bufs.index(stage).slice(0, HALF_M)
        lower = a_bufs.index(stage).slice(HALF_M, HALF_M)
        tma_load(a_desc, [row, k], bar, upper)
        tma_load(a_desc, [row + HALF_M, k], bar, lower, pred=both)
        step += 1
    return step


@gluon.jit
def produce_rows(a_desc, w_descs, rings, sizes, queue, notes, relay, tile, ACT: gl.constexpr):
    """Fill the ring with consecutive rows of A and rows of W, by one warp."""
    BLOCK_M: gl.constexpr = rings[0].shape[1]
    k_steps = gl.cdiv(sizes[1], rings[0].shape[2])
    step = 0
    slot = 0
    while tile[0] >= 0:
        # The next tile is found two steps at a time, as late as that hides.
        at_0, at_1, at_2 = gl.maximum(k_steps - 5, 0), k_steps - 3, k_steps - 1
        step = copy_rows(0, at_0, tile, a_desc, w_descs, rings, sizes, step, ACT)
        drawn = draw(queue)
        step = copy_rows(at_0, at_1, tile, a_desc, w_descs, rings, sizes, step, ACT)
        entry = look_up(drawn_item(drawn, queue, relay), queue)
        step = copy_rows(at_1, at_2, tile, a_desc, w_descs, rings, sizes, step, ACT)
        slot += 1
        next_tile = tile_with_rows(entry, queue, relay, BLOCK_M)
        tell(next_tile, notes, slot)
        step = copy_rows(at_2, k_steps, tile, a_desc, w_descs, rings, sizes, step, ACT)
        tile = next_tile


@gluon.jit
def halves(acc):
    """[M, N] into its left and right [M, N / 2]; a thread has the same columns of both."""
    M: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([M, 2, HALF]).permute([0, 2, 1]).split()


@gluon.jit
def as_held(x, DTYPE: gl.constexpr):
    """float32 as DTYPE holds it. Two values at a time: one alone takes a slow unit of the GPU."""
    if DTYPE != gl.bfloat16:
        return x.to(DTYPE).to(gl.float32)
    else:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@gluon.jit
def add_bias(acc, bias_ptr, expert, col, N, STRIDE: gl.constexpr):
    """acc plus bias[expert, col + STRIDE * j] for column j of acc."""
    if bias_ptr is not None:
        cols = col + STRIDE * gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        bias = gl.load(bias_ptr + expert.to(gl.int64) * N + cols, mask=cols < N, other=0.0)
        acc += bias.to(gl.float32)[None, :]
    return acc


@gluon.jit
def gated_columns(gate, up, output, expert, col, N, ACT: gl.constexpr):
    """The output of columns from `col` on, in float32."""
    bias_ptr, _, _ = output
    if ACT.interleaved:
        gate = add_bias(gate, bias_ptr, expert, 2 * col, N, 2)
        up = add_bias(up, bias_ptr, expert, 2 * col + 1, N, 2)
    else:
        gate = add_bias(gate, bias_ptr, expert, col, N, 1)
        up = add_bias(up, bias_ptr, expert, N // 2 + col, N, 1)
    return activate_gated(gate, up, ACT)


@gluon.jit
def columns(acc, output, expert, col, N, ACT: gl.constexpr):
    """The output of columns from `col` on, in float32."""
    bias_ptr, _, _ = output
    acc = add_bias(acc, bias_ptr, expert, col, N, 1)
    if ACT.kind is not None:
        acc = activate(acc, ACT)
    return acc


@gluon.jit
def store_chunk(i: gl.constexpr, pending, where, output, buffers, out_n):
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
