"""The queue of tiles of a persistent kernel, in Gluon: who multiplies which tile next.

A block's first tile is dealt; each of the others its producer draws from a queue while it copies
the one before, and tells the consumers in shared memory: tiles cost too unequal times to be dealt
evenly ahead of time. Each walks over the block's tiles at its own pace.

What the functions share:
    queue   table of tiles, tiles along N, whole tiles of the queue, items of it
    tile    expert or -1 if there is none, one past the last row, first row, tile along N
    notes   where the producer writes the tile of a slot: places that slots take in turns
    relay   where one thread of a producer leaves a number for the others
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.schedule.tile_map import ENTRY

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
FEWEST_CUT = gl.constexpr(128)  # rows of a tile


@gluon.jit
def queue_of(tiles_ptr, n_tiles, BLOCK_M: gl.constexpr):
    """The queue of this product, for `look_up` and `draw`: its items are tiles in the order of
    the table, those of a group that share W side by side, and the last few of them as upper and
    lower halves, so that blocks end at nearly the same time. Tiles of few rows take as long as
    their rows of W do, and stay whole.
    """
    blocks = gl.num_programs(0)
    row_tiles = gl.load(tiles_ptr)
    long_tiles = gl.load(tiles_ptr + 1)
    tiles = row_tiles * n_tiles
    cut = blocks // 4
    if tiles < blocks:
        cut = gl.where(2 * tiles <= blocks, tiles, 0)
    if BLOCK_M < FEWEST_CUT:
        cut = 0
    elif 4 * long_tiles < row_tiles:
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
        item, tile, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3),
        gl.load(entry + 4),
    )  # fmt: skip


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

    Two or more steps of that slot are under way. If places for S slots of k steps have at most
    S k - 2 stages, consumers have then begun with the slot whose tile is overwritten, so they have
    read it.
    """
    SLOTS: gl.constexpr = notes.shape[0] // 4
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(4):
        note = notes.index(slot % SLOTS * 4 + i)
        note.store(gl.full([1], tile[i], gl.int32, layout))
    # One thread arrives at the stage's barrier: what all have written comes before.
    barrier()


@gluon.jit
def told(notes, slot):
    """The tile of a slot, for consumers that have waited for all stages of the slot before."""
    SLOTS: gl.constexpr = notes.shape[0] // 4
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = slot % SLOTS * 4
    expert = gl.max(notes.index(at).load(layout), 0)
    end = gl.max(notes.index(at + 1).load(layout), 0)
    row = gl.max(notes.index(at + 2).load(layout), 0)
    n = gl.max(notes.index(at + 3).load(layout), 0)
    return expert, end, row, n
