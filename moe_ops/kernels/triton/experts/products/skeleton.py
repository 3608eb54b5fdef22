"""The skeleton of the grouped products on Hopper (sm_90): a persistent, warp-specialised kernel in
Gluon.

A block holds a ring of stages in shared memory. A producer fills it, tile by tile, and two consumer
warpgroups each multiply and store a half of every tile. Outputs may stay in registers, and are then
stored behind the products of the next tile. Tiles are those of `tile_scheduler.py`.

A kernel gives the functions that differ, as constants:
    AT       (slot, tile, source, rings, sizes, HOW): what the copies of all steps of a tile share
    COPY     (i, bar, stage, tile, at, source, rings, sizes, HOW): begin to copy step i of a tile
             along K into a free stage; its barrier is told of all copies
    NOTE     (slot, tile, source, HOW), or None: what else the producer writes down of a tile
    PRODUCT  (LOWER, step, k_steps, tile, pending, output, buffers, rings, sizes, scales, HOW):
             multiply a consumer's half of a tile, and store what is pending; what is so then

What the functions share:
    rings   stages of A and of W; barriers: stage full, stage read
    step    of the ring: steps since the block began
    sizes   N rows of W per expert, K; for a PRODUCT whose outputs are pending, their columns
    queue, tile, notes, relay   as in `tile_scheduler.py`
    source  what is copied
    output  bias or None, descriptor and pointer of the output; others as a kernel has them
    buffers of a consumer: two chunks of outputs that are copied, or None if none are pending
    pending chunks of outputs; their first row, one past the last row of their tile, first column
    scales  of what is multiplied
    LOWER   which of the consumers this is
    HOW     what else a kernel is compiled for, its `Act` last
and, constant,
    ROWS    of a tile
    COLUMNS, TURNS   along K of a step; the steps whose number divides that of a tile
    AHEAD   how many steps ahead of a tile's end the next one is drawn, looked up, written down
    BLOCKS  that share a processor: one, or two of few registers
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels.triton import Act, replay
from moe_ops.kernels.triton.experts.products.hopper import (
    CHUNK_LAYOUT,
    CHUNK_N,
    HALF_N,
    store_chunk,
)
from moe_ops.kernels.triton.experts.schedule import tile_scheduler
from moe_ops.kernels.triton.launch import processors

# Of a thread at the start, for three warpgroups, by the blocks of a processor; then moved to the
# consumers.
REGISTERS = {1: 168, 2: 80}
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def first_tile(tiles_ptr, n_tiles, ROWS: gl.constexpr):
    """The queue, its relay and a block's first tile.

    Ahead of the barriers that one thread prepares: behind them, ptxas lets that thread's warp
    diverge until the tile is known, though it looks it up in registers that a warp shares.
    """
    queue = tile_scheduler.queue_of(tiles_ptr, n_tiles, ROWS)
    relay = gl.allocate_shared_memory(gl.int32, [128], PLAIN)
    entry = tile_scheduler.look_up(gl.program_id(0), queue)
    return queue, relay, tile_scheduler.tile_with_rows(entry, queue, relay, ROWS)


@gluon.jit
def steps_of(K, COLUMNS: gl.constexpr, TURNS: gl.constexpr):
    """The steps of a tile; what is copied is zeros past the last column."""
    return gl.cdiv(K, COLUMNS * TURNS) * TURNS


@gluon.jit
def copy_steps(
    first, last, step, tile, at, source, rings, sizes, COPY: gl.constexpr, HOW: gl.constexpr
):
    """Copy steps `first` to `last` - 1 of a tile."""
    full, empty = rings[2], rings[3]
    STAGES: gl.constexpr = full.shape[0]
    for i in range(first, last):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        COPY(i, bar, stage, tile, at, source, rings, sizes, HOW)
        step += 1
    return step


@gluon.jit
def produce(
    source, rings, sizes, queue, notes, relay, tile, AT: gl.constexpr, COPY: gl.constexpr,
    NOTE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TURNS: gl.constexpr,
    AHEAD: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Fill the ring. The next tile is found a step or two at a time, as late as that hides."""
    k_steps = steps_of(sizes[1], COLUMNS, TURNS)
    step = 0
    slot = 0
    if NOTE is not None:
        NOTE(slot, tile, source, HOW)
    while tile[0] >= 0:
        at = AT(slot, tile, source, rings, sizes, HOW)
        at_0 = k_steps - AHEAD[0]
        if AHEAD[0] > 4:  # a tile has at least four steps
            at_0 = gl.maximum(at_0, 0)
        at_1, at_2 = k_steps - AHEAD[1], k_steps - AHEAD[2]
        step = copy_steps(0, at_0, step, tile, at, source, rings, sizes, COPY, HOW)
        drawn = tile_scheduler.draw(queue)
        step = copy_steps(at_0, at_1, step, tile, at, source, rings, sizes, COPY, HOW)
        entry = tile_scheduler.look_up(tile_scheduler.drawn_item(drawn, queue, relay), queue)
        step = copy_steps(at_1, at_2, step, tile, at, source, rings, sizes, COPY, HOW)
        slot += 1
        next_tile = tile_scheduler.tile_with_rows(entry, queue, relay, ROWS)
        if NOTE is not None:
            NOTE(slot, next_tile, source, HOW)
        tile_scheduler.tell(next_tile, notes, slot)
        step = copy_steps(at_2, k_steps, step, tile, at, source, rings, sizes, COPY, HOW)
        tile = next_tile


@gluon.jit
def none_pending(output, buffers, ACT: gl.constexpr):
    """A tile's chunks of outputs, of no rows."""
    ROWS: gl.constexpr = buffers.shape[1]
    COLUMNS: gl.constexpr = buffers.shape[2]
    chunk = gl.zeros([ROWS, COLUMNS], output[1].dtype, CHUNK_LAYOUT)
    chunks = (chunk, chunk) if ACT.gated else (chunk, chunk, chunk, chunk)
    return chunks, (0, 0, 0)


@gluon.jit
def skip(step, k_steps, rings):
    """Let the producer have the stages of a tile, by a consumer whose half has no rows."""
    full, empty = rings[2], rings[3]
    STAGES: gl.constexpr = full.shape[0]
    for i in range(step, step + k_steps):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        mbarrier.arrive(empty.index(i % STAGES))


@gluon.jit
def consume(
    LOWER: gl.constexpr, output, buffers, rings, sizes, scales, notes, tile, PRODUCT: gl.constexpr,
    COLUMNS: gl.constexpr, TURNS: gl.constexpr, HOW: gl.constexpr,
):  # fmt: skip
    """Multiply and store a half of every tile, by one warpgroup."""
    ACT: gl.constexpr = HOW[-1]
    pending = () if buffers is None else none_pending(output, buffers, ACT)
    if buffers is not None:
        sizes = (sizes[0], sizes[1], sizes[0] // 2 if ACT.gated else sizes[0])
    k_steps = steps_of(sizes[1], COLUMNS, TURNS)
    step = 0
    slot = 0
    expert, end, row, n = tile
    while expert >= 0:
        slot += 1
        pending = PRODUCT(
            LOWER, step, k_steps, (expert, end, row, n), pending, output, buffers, rings, sizes,
            scales, HOW,
        )  # fmt: skip
        expert, end, row, n = tile_scheduler.told(notes, slot)
        step += k_steps
    if buffers is not None:
        for i in gl.static_range(2 if ACT.gated else 4):
            store_chunk(i, pending, output, buffers, sizes[2])
        tma.store_wait(0)


@gluon.jit
def specialize(
    dealt, stages, source, output, buffers, sizes, scales, AT: gl.constexpr, COPY: gl.constexpr,
    NOTE: gl.constexpr, PRODUCT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    TURNS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    HOW: gl.constexpr, BLOCKS: gl.constexpr = 1, LEAN: gl.constexpr = False,
):  # fmt: skip
    """Run a block's tiles, from what `first_tile` dealt on, by a producer of so many warps and two
    consumers, each with its buffers. LEAN: whether few registers do for a producer of one warp that
    shares the processor with no other block."""
    queue, relay, tile = dealt
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    # Of at least three steps, as `tell` says.
    SLOTS: gl.constexpr = 2 if STAGES <= 4 else 8
    notes = gl.allocate_shared_memory(gl.int32, [4 * SLOTS, 1], PLAIN)
    for i in gl.static_range(STAGES):
        # One arrival for the copies by TMA; of four warps, which copy by cp.async, too, one more
        # of every thread.
        mbarrier.init(full.index(i), count=129 if WARPS == 4 else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (stages[0], stages[1], full, empty)
    gl.warp_specialize(
        [
            (consume, (0, output, buffers[0], rings, sizes, scales, notes, tile, PRODUCT,
                       COLUMNS, TURNS, HOW)),
            (consume, (1, output, buffers[1], rings, sizes, scales, notes, tile, PRODUCT,
                       COLUMNS, TURNS, HOW)),
            (produce, (source, rings, sizes, queue, notes, relay, tile, AT, COPY, NOTE, ROWS,
                       COLUMNS, TURNS, AHEAD, HOW)),
        ],
        [4, WARPS],
        # Of the second consumer and of the producer; what is left goes to the first consumer.
        [224, 64] if WARPS == 4 else [104, 32] if BLOCKS == 2 else [240, 24] if LEAN else [232, 40],
    )  # fmt: skip


def boxes(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What boxes of so many rows and columns of a matrix are copied by."""
    size = t.element_size()
    layout = gl.NVMMASharedLayout(columns * size, 8 * size, rank=2)
    return TensorDescriptor.from_tensor(t, [rows, columns], layout)


def boxes_of_pair(w_ENK: Tensor, columns: int, act: Act) -> list[TensorDescriptor]:
    """What the left and the right rows of W are copied by, as `copy_w` has them; of W whose columns
    lie, what all are."""
    if not w_ENK.is_contiguous():
        w_2d = w_ENK.transpose(1, 2).view(-1, w_ENK.shape[1])
        return [boxes(w_2d, columns, CHUNK_N)] * 2
    w_2d = w_ENK.view(-1, w_ENK.shape[2])
    pair = (w_2d[::2], w_2d[1::2]) if act.interleaved else (w_2d, w_2d)
    return [boxes(w, HALF_N, columns) for w in pair]


def launch(kernel: Any, a: Tensor, *args: Any, blocks: int = 1) -> None:
    """Launch a kernel of this skeleton, so many blocks of it on every multiprocessor of the device
    of `a`."""
    grid = (blocks * processors(a),)
    replay.launch(kernel, grid, *args, num_warps=4, maxnreg=REGISTERS[blocks])
