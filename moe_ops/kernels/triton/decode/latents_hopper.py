"""Attention of one query per head over latents that all heads share, on Hopper (sm_90), in Gluon: a
kernel that does what `latents_kernel` of `latents.py` does.

A program has 64 heads, and three groups of four warps. One copies tiles of slots to a ring in
shared memory, where both products read them. One computes scores and their powers, and weights the
left half of the latents with these. One weights the right half, while the scores of the next tile
are computed.

What the functions share:
    stages   latents [STAGES, BS, R] and rotated keys [STAGES, BS, D] of tiles on their way
    full, empty   barriers of each stage: filled by the copies, read by both who multiply
    handed   powers [64, BS] of a tile and by how much what was found so far shrinks [64], with
             barriers: written, read
    tiles    first tile, one past the last, one past the last entry that is seen, this program's
             split
    SIZES    slots, how many are counted, SPLITS, CHOSEN, LEAST, SCALE, D, as of `latents_kernel`;
             if D is 0 the latents stand for what is rotated, and are not looked at
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_ops.kernels.triton.decode.latents_slots import slots_at
from moe_ops.kernels.triton.launch import take_turn

cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

HEADS = 64  # of a program
LOG2_E = gl.constexpr(1 / math.log(2))
REGISTERS = 168  # of a thread at the start; then moved to who multiplies
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def rows_of(columns):
    """How four warps copy rows of so many columns of 16 bits, 16 bytes a thread."""
    across = min(32, columns // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _row_slots(buffer, indices_ptr, first, SIZES: gl.constexpr):
    """The slots whose rows a buffer gets: those of entries, slot 0 for what is no slot."""
    entry = first + gl.arange(0, buffer.shape[1], gl.SliceLayout(1, rows_of(buffer.shape[2])))
    inside = entry < SIZES[1]
    at = entry
    if SIZES[3]:
        at = gl.load(indices_ptr + entry, mask=inside, other=-1).to(gl.int32)
        inside = (at >= 0) & (at < SIZES[0])
    return gl.where(inside, at, 0)


@gluon.jit
def _copy_rows(buffer, stage, ptr, at, first, end):
    """Begin to copy rows of slots to a stage, zeros in place of entries from `end` on."""
    layout: gl.constexpr = rows_of(buffer.shape[2])
    entry = first + gl.arange(0, buffer.shape[1], gl.SliceLayout(1, layout))
    columns = gl.arange(0, buffer.shape[2], gl.SliceLayout(0, layout))
    pointers = ptr + (at * buffer.shape[2])[:, None] + columns[None, :]
    cp_async(buffer.index(stage), pointers, mask=(entry < end)[:, None])


@gluon.jit
def _produce(latents_ptr, rotated_ptr, indices_ptr, stages, full, empty, tiles,
             SIZES: gl.constexpr):  # fmt: skip
    """Copy the tiles."""
    latents, rotated = stages
    first, last, end, split = tiles
    STAGES: gl.constexpr = latents.shape[0]
    BS: gl.constexpr = latents.shape[1]
    entry = (first * SIZES[2] + split) * BS
    at = _row_slots(latents, indices_ptr, entry, SIZES)
    rotated_at = _row_slots(rotated, indices_ptr, entry, SIZES)
    for tile in range(first, last):
        step = tile - first
        stage = step % STAGES
        following = entry + SIZES[2] * BS
        # In time for their tile.
        following_at = _row_slots(latents, indices_ptr, following, SIZES)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        _copy_rows(latents, stage, latents_ptr, at, entry, end)
        if SIZES[6] > 0:
            following_rotated = _row_slots(rotated, indices_ptr, following, SIZES)
            _copy_rows(rotated, stage, rotated_ptr, rotated_at, entry, end)
            rotated_at = following_rotated
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        entry = following
        at = following_at


@gluon.jit
def _queries(ptr, head_stride, head, H, buffer):
    """Rows of queries as they go into a buffer, zeros in place of heads that are none."""
    layout: gl.constexpr = rows_of(buffer.shape[1])
    heads = head + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, layout))
    pointers = ptr + (heads * head_stride)[:, None] + columns[None, :]
    return gl.load(pointers, mask=(heads < H)[:, None], other=0.0)


@gluon.jit
def _weigh(acc, shrink, p, latents, HALF: gl.constexpr):
    """Start acc * shrink + p @ a half of the columns of a tile."""
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))
    acc *= shrink[:, None]
    columns = latents.slice(HALF * acc.shape[1], acc.shape[1], 1)
    return warpgroup_mma(p, columns, acc, is_async=True)


@gluon.jit
def _attend(queries, mask_ptr, indices_ptr, stages, full, empty, handed, tiles, where,
            SIZES: gl.constexpr):  # fmt: skip
    """Scores, their powers, and the left half of what they weight."""
    q, q_ptr, q_head, q_rope, q_rope_ptr, rope_head = queries
    head, H = where[2], where[3]
    # While the first tile is on its way.
    q.store(_queries(q_ptr, q_head, head, H, q))
    if SIZES[6] > 0:
        q_rope.store(_queries(q_rope_ptr, rope_head, head, H, q_rope))
    fence_async_shared()
    latents, rotated = stages
    p_smem, shrink_smem, written, read = handed
    first, last, _, split = tiles
    STAGES: gl.constexpr = latents.shape[0]
    BS: gl.constexpr = latents.shape[1]
    R: gl.constexpr = latents.shape[2]
    HEADS: gl.constexpr = q.shape[0]
    LEAST: gl.constexpr = SIZES[4]
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BS, 16])
    weighed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])
    as_left: gl.constexpr = gl.DotOperandLayout(0, weighed, 2)
    high = gl.full([HEADS], float("-inf"), gl.float32, gl.SliceLayout(1, scored))
    total = gl.zeros([HEADS], gl.float32, gl.SliceLayout(1, scored))
    acc = gl.zeros([HEADS, R // 2], gl.float32, weighed)
    entry = (first * SIZES[2] + split) * BS + gl.arange(0, BS, gl.SliceLayout(0, scored))
    _, added = slots_at(indices_ptr, mask_ptr, entry, SIZES[0], SIZES[1], SIZES[3], LEAST)
    for tile in range(first, last):
        step = tile - first
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        fence_async_shared()  # cp.async writes through the generic proxy
        tile_latents = latents.index(stage)
        scores = warpgroup_mma(
            q, tile_latents.permute([1, 0]), gl.zeros([HEADS, BS], gl.float32, scored),
            use_acc=False, is_async=True,
        )  # fmt: skip
        if SIZES[6] > 0:
            scores = warpgroup_mma(
                q_rope, rotated.index(stage).permute([1, 0]), scores, is_async=True
            )
        entry += SIZES[2] * BS
        # In time for its tile.
        _, following = slots_at(indices_ptr, mask_ptr, entry, SIZES[0], SIZES[1], SIZES[3], LEAST)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = scores * (SIZES[5] * LOG2_E) + added[None, :] * LOG2_E
        new = gl.maximum(high, gl.max(scores, 1))
        # Where no slot is seen yet -inf remains, and -inf minus -inf is no number.
        safe = gl.where(new == float("-inf"), 0.0, new)
        p = gl.exp2(scores - safe[:, None])
        shrink = gl.exp2(high - safe)
        high = new
        total = total * shrink + gl.sum(p, 1)
        p = p.to(latents.dtype)
        mbarrier.wait(read, (step & 1) ^ 1)
        p_smem.store(p)
        shrink_smem.store(shrink)
        fence_async_shared()
        mbarrier.arrive(written)
        acc = _weigh(acc, shrink, gl.convert_layout(p, as_left), tile_latents, 0)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage))
        added = following
    found_ptr, stats_ptr, _, _, pairs = where
    heads = head + gl.arange(0, HEADS, gl.SliceLayout(1, scored))
    place = heads * SIZES[2] + split
    gl.store(stats_ptr + place, high, mask=heads < H)
    gl.store(stats_ptr + pairs * H * SIZES[2] + place, total, mask=heads < H)
    _store(acc, found_ptr, head, H, split, 0, first < last, SIZES)


@gluon.jit
def _weigh_right(stages, full, empty, handed, tiles, where, SIZES: gl.constexpr):
    """The right half of what the powers weight."""
    latents, _ = stages
    p_smem, shrink_smem, written, read = handed
    first, last, _, split = tiles
    STAGES: gl.constexpr = latents.shape[0]
    R: gl.constexpr = latents.shape[2]
    HEADS: gl.constexpr = p_smem.shape[0]
    weighed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R // 2, 16])
    acc = gl.zeros([HEADS, R // 2], gl.float32, weighed)
    for tile in range(first, last):
        step = tile - first
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        fence_async_shared()
        mbarrier.wait(written, step & 1)
        shrink = shrink_smem.load(gl.SliceLayout(1, weighed))
        acc = _weigh(acc, shrink, p_smem, latents.index(stage), 1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(read)
        mbarrier.arrive(empty.index(stage))
    found_ptr, _, head, H, _ = where
    _store(acc, found_ptr, head, H, split, 1, first < last, SIZES)


@gluon.jit
def _store(acc, found_ptr, head, H, split, HALF: gl.constexpr, any, SIZES: gl.constexpr):
    """Store a half of what the program found, if it found any."""
    columns: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    heads = head + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    r = HALF * columns + gl.arange(0, columns, gl.SliceLayout(0, layout))
    place = (heads * SIZES[2] + split) * (2 * columns)
    gl.store(found_ptr + place[:, None] + r[None, :], acc, mask=(heads < H)[:, None] & any)


@gluon.jit
def _shown_tiles(mask_ptr, indices_ptr, split, BS: gl.constexpr, TILES: gl.constexpr,
                 BT: gl.constexpr, SIZES: gl.constexpr):  # fmt: skip
    """The first of a program's tiles that the mask shows a slot of, one past the last of these, one
    past the last entry that it shows, and the program's split."""
    layout: gl.constexpr = gl.BlockedLayout([1, BS // 8], [4, 8], [4, 1], [1, 0])
    entries = gl.arange(0, BS, gl.SliceLayout(0, layout))
    tiles = gl.arange(0, BT, gl.SliceLayout(1, layout))
    own = (tiles[:, None] * SIZES[2] + split) * BS + entries[None, :]
    own = gl.where(tiles[:, None] < TILES, own, SIZES[1])
    _, shown = slots_at(indices_ptr, mask_ptr, own, SIZES[0], SIZES[1], SIZES[3], SIZES[4])
    ends = gl.max(gl.where(shown > float("-inf"), own + 1, 0), 1)
    last = gl.max(gl.where(ends > 0, tiles + 1, 0), 0)
    return gl.min(gl.where(ends > 0, tiles, last), 0), last, gl.max(ends, 0), split


@gluon.jit
def latents_hopper_kernel(
    q_ptr, q_rope_ptr, latents_ptr, rotated_ptr, mask_ptr, indices_ptr, found_ptr, stats_ptr,
    H, q_row, q_head, rope_row, rope_head, mask_row, indices_row,
    slots: gl.constexpr, counted: gl.constexpr, W: gl.constexpr, BH: gl.constexpr, R: gl.constexpr,
    D: gl.constexpr, BS: gl.constexpr, TILES: gl.constexpr, BT: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, CHOSEN: gl.constexpr, LEAST: gl.constexpr,
    SCALE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One program: a query, BH of its heads, every `SPLITS`-th tile of BS slots. W queries in a row
    share latents."""
    SIZES: gl.constexpr = (slots, counted, SPLITS, CHOSEN, LEAST, SCALE, D)
    split = gl.program_id(1)
    b = gl.program_id(2).to(gl.int64)
    head = gl.program_id(0) * BH
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q = gl.allocate_shared_memory(dtype, [BH, R], tile)
    latents = gl.allocate_shared_memory(dtype, [STAGES, BS, R], tile)
    q_rope = q
    rotated = latents
    if D > 0:
        narrow: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * D), 16, rank=2)
        q_rope = gl.allocate_shared_memory(dtype, [BH, D], narrow)
        rotated = gl.allocate_shared_memory(dtype, [STAGES, BS, D], narrow)
    p_smem = gl.allocate_shared_memory(
        dtype, [BH, BS], gl.NVMMASharedLayout(min(128, 2 * BS), 16, rank=2)
    )
    shrink_smem = gl.allocate_shared_memory(gl.float32, [BH], PLAIN)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    written = gl.allocate_shared_memory(gl.int64, [1], barriers)
    read = gl.allocate_shared_memory(gl.int64, [1], barriers)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128)  # threads that copy
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(written, count=1)
    mbarrier.init(read, count=1)
    q_ptr += b * q_row
    q_rope_ptr += b * rope_row
    mask_ptr += b * mask_row
    indices_ptr += b * indices_row
    latents_ptr += b // W * slots * R
    rotated_ptr += b // W * slots * D
    found_ptr += b * H * SPLITS * R
    stats_ptr += b * H * SPLITS
    take_turn(PDL)
    tiles = _shown_tiles(mask_ptr, indices_ptr, split, BS, TILES, BT, SIZES)
    stages = (latents, rotated)
    handed = (p_smem, shrink_smem, written, read)
    queries = (q, q_ptr, q_head, q_rope, q_rope_ptr, rope_head)
    where = (found_ptr, stats_ptr, head, H, gl.num_programs(2).to(gl.int64))
    gl.warp_specialize(
        [
            (_attend, (queries, mask_ptr, indices_ptr, stages, full, empty, handed, tiles, where,
                       SIZES)),
            (_weigh_right, (stages, full, empty, handed, tiles, where, SIZES)),
            (_produce, (latents_ptr, rotated_ptr, indices_ptr, stages, full, empty, tiles, SIZES)),
        ],
        [4, 4],
        [176, 96],
    )  # fmt: skip
