"""The gradient of expert weights on Hopper (sm_90), of rows of 16 bits: a persistent,
warp-specialised kernel in Gluon.

A tile is 128 columns of a by 256 of b, of one expert: [M, N] of `wgrad.py`. A producer fills a ring
of stages of 64 rows: of the operand whose rows lie in order by TMA, of the one whose rows are named
by cp.async. Each of two consumers multiplies 64 columns of a by all of b, and stores what it made
behind the products of its next tile. Tiles are dealt in turn, so a block knows its own.

In the last step of an expert, rows past its end are zeros in both: there all is copied by cp.async,
which leaves them out.

What the functions share:
    rings  stages of a and of b; barriers: stage full, stage read
    where  ends of experts, R, and tiles: along M, along N, of all experts
    named  the operand whose rows are named: pointer, stride, width, names
    lies   the other one: descriptor, pointer, stride, width
    NAMES_A  whether the named one is a
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

from moe_ops.kernels.triton.experts.products import hopper, skeleton
from moe_ops.kernels.triton.experts.products.hopper import CHUNK_LAYOUT

BLOCK_M, BLOCK_N, BLOCK_R = 128, 256, 64
STAGES = 4  # 48 KiB each, beside 32 KiB of outputs: all that a block has
GROUP = 8  # tiles along M that run side by side, reading the same columns of b
BOX = gl.constexpr(64)  # columns of one copy, and of a consumer: a row of shared memory
ROWS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _tile_at(item, where, GROUP: gl.constexpr):
    """Expert, first row, one past the last row, tile along M and along N of an item; of items past
    the last one there are no rows."""
    ends_ptr, R, m_tiles, n_tiles, items = where
    expert = item // (m_tiles * n_tiles)
    at = item % (m_tiles * n_tiles)
    first = at // (GROUP * n_tiles) * GROUP
    size = gl.minimum(m_tiles - first, GROUP)
    at = at % (GROUP * n_tiles)
    # Ends that do not ascend within R rows give wrong sums, but no row outside these is read.
    exists = item < items
    end = gl.load(ends_ptr + expert, mask=exists, other=0)
    begin = gl.load(ends_ptr + expert - 1, mask=exists & (expert > 0), other=0)
    begin = gl.minimum(gl.maximum(begin, 0), R)
    return expert, begin, gl.minimum(end, R), first + at % size, at // size


@gluon.jit
def _boxes(bufs, stage, i: gl.constexpr):
    """Columns 64 * i on of a stage."""
    return bufs.index(stage).slice(i * BOX, BOX, dim=1)


@gluon.jit
def _copy_rows(pointer, stride, width, rows, inside, col, bufs, stage):
    """These rows, from a column on, by cp.async: zeros of rows and columns that are not inside."""
    COUNT: gl.constexpr = bufs.shape[2] // BOX
    cols = col + gl.arange(0, BOX, gl.SliceLayout(0, ROWS_LAYOUT))
    pointers = pointer + (rows.to(gl.int64) * stride)[:, None] + cols[None, :]
    for i in gl.static_range(COUNT):
        # The width is a multiple of 8, so the 16 bytes of one copy are all inside or all outside.
        mask = inside[:, None] & ((cols + i * BOX) // 8 < width // 8)[None, :]
        hopper.cp_async(_boxes(bufs, stage, i), pointers + i * BOX, mask=mask)


@gluon.jit
def _produce(item, named, lies, rings, where, NAMES_A: gl.constexpr, GROUP: gl.constexpr):
    """Fill the ring, by four warps. The next tile, and the names of the rows of the next step, are
    loaded a step ahead."""
    a_bufs, b_bufs, full, empty = rings
    named_ptr, named_stride, named_width, names_ptr = named
    desc, lies_ptr, lies_stride, lies_width = lies
    named_bufs, lies_bufs = (a_bufs, b_bufs) if NAMES_A else (b_bufs, a_bufs)
    STAGES: gl.constexpr = a_bufs.shape[0]
    BLOCK_R: gl.constexpr = a_bufs.shape[1]
    NAMED: gl.constexpr = named_bufs.shape[2]
    LIES: gl.constexpr = lies_bufs.shape[2]
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(1, ROWS_LAYOUT))
    step = 0
    _, begin, end, m, n = _tile_at(item, where, GROUP)
    names = gl.load(names_ptr + begin + r, mask=begin + r < end, other=0)
    while item < where[4]:
        item += gl.num_programs(0)
        _, next_begin, next_end, next_m, next_n = _tile_at(item, where, GROUP)
        named_col, lies_col = (m * NAMED, n * LIES) if NAMES_A else (n * NAMED, m * LIES)
        for row in range(begin, end, BLOCK_R):
            last = row + BLOCK_R >= end
            next_row = gl.where(last, next_begin, row + BLOCK_R) + r
            next_names = gl.load(
                names_ptr + next_row, mask=next_row < gl.where(last, next_end, end), other=0
            )
            stage = step % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            inside = row + r < end
            _copy_rows(
                named_ptr, named_stride, named_width, names, inside, named_col, named_bufs, stage
            )
            whole = row + BLOCK_R <= end
            if whole:
                mbarrier.expect(bar, BLOCK_R * LIES * 2)
                for i in gl.static_range(LIES // BOX):
                    box = _boxes(lies_bufs, stage, i)
                    hopper.tma_load(desc, [row, lies_col + i * BOX], bar, box)
            else:
                mbarrier.arrive(bar)
                _copy_rows(
                    lies_ptr, lies_stride, lies_width, row + r, inside, lies_col, lies_bufs, stage
                )
            async_copy.mbarrier_arrive(bar, increment_count=False)
            names = next_names
            step += 1
        if begin >= end:  # no step has loaded them
            names = gl.load(names_ptr + next_begin + r, mask=next_begin + r < next_end, other=0)
        begin, end, m, n = next_begin, next_end, next_m, next_n


@gluon.jit
def _multiply(acc, rings, step, use_acc, HALF: gl.constexpr):
    """Start acc += a^T @ b on the stage of this step, once it is full."""
    a_bufs, b_bufs, full, _ = rings
    STAGES: gl.constexpr = a_bufs.shape[0]
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    fence_async_shared()  # cp.async writes through the generic proxy
    a = _boxes(a_bufs, stage, HALF).permute([1, 0])
    return warpgroup_mma(a, b_bufs.index(stage), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _release(rings, step):
    """Let the producer have the stage of a step."""
    empty = rings[3]
    mbarrier.arrive(empty.index(step % empty.shape[0]))


@gluon.jit
def _consume(HALF: gl.constexpr, item, output, buffers, rings, where, sizes, GROUP: gl.constexpr):
    """Multiply and store a half of every tile, by one warpgroup."""
    M, N = sizes
    BLOCK_R: gl.constexpr = rings[0].shape[1]
    BLOCK_N: gl.constexpr = rings[1].shape[2]
    TO: gl.constexpr = output[1].dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    chunk = gl.zeros([BOX, BOX], TO, CHUNK_LAYOUT)
    chunks, place = (chunk, chunk, chunk, chunk), (0, 0, 0)
    step = 0
    expert, begin, end, m, n = _tile_at(item, where, GROUP)
    while item < where[4]:
        item += gl.num_programs(0)
        following = _tile_at(item, where, GROUP)
        steps = gl.cdiv(gl.maximum(end - begin, 0), BLOCK_R)
        acc = gl.zeros([BOX, BLOCK_N], gl.float32, layout)
        if steps >= 4:
            for i in gl.static_range(4):
                acc = _multiply(acc, rings, step + i, i > 0, HALF)
                hopper.store_chunk(i, (chunks, place), output, buffers, N)
                # Once all but the last product are done, the stage before is free.
                acc = warpgroup_mma_wait(1, deps=[acc])
                if i > 0:
                    _release(rings, step + i - 1)
            for i in range(4, steps):
                acc = _multiply(acc, rings, step + i, True, HALF)
                acc = warpgroup_mma_wait(1, deps=[acc])
                _release(rings, step + i - 1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _release(rings, step + steps - 1)
        else:
            for i in gl.static_range(4):
                hopper.store_chunk(i, (chunks, place), output, buffers, N)
            for i in range(steps):
                acc = _multiply(acc, rings, step + i, True, HALF)
                acc = warpgroup_mma_wait(0, deps=[acc])
                _release(rings, step + i)
        step += steps
        sums = hopper.cut(hopper.cut((acc,)))
        chunks = ()
        for i in gl.static_range(4):
            made = gl.convert_layout(sums[i].to(TO), CHUNK_LAYOUT, assert_trivial=True)
            chunks = chunks + (made,)  # noqa: RUF005
        row = expert * M
        place = (row + (2 * m + HALF) * BOX, row + M, n * BLOCK_N)
        expert, begin, end, m, n = following
    for i in gl.static_range(4):
        hopper.store_chunk(i, (chunks, place), output, buffers, N)
    tma.store_wait(0)


@gluon.jit
def wgrad_kernel(
    named_ptr, named_stride, names_ptr, lies_desc, lies_ptr, lies_stride, ends_ptr, out_desc,
    out_ptr, R, M, N, m_tiles, n_tiles, items, NAMES_A: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_R: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """All tiles of all experts by as many blocks as there are processors."""
    dtype: gl.constexpr = lies_desc.dtype
    swizzled: gl.constexpr = lies_desc.layout
    stored: gl.constexpr = out_desc.layout
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_M], swizzled)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_N], swizzled)
    buffers_0 = gl.allocate_shared_memory(out_desc.dtype, [2, BOX, BOX], stored)
    buffers_1 = gl.allocate_shared_memory(out_desc.dtype, [2, BOX, BOX], stored)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for i in gl.static_range(STAGES):
        # One arrival for the copies by TMA, and one of every thread of the producer.
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (a_bufs, b_bufs, full, empty)
    where = (ends_ptr, R, m_tiles, n_tiles, items)
    output = (None, out_desc, out_ptr)
    named_width, lies_width = (M, N) if NAMES_A else (N, M)
    named = (named_ptr, named_stride, named_width, names_ptr)
    lies = (lies_desc, lies_ptr, lies_stride, lies_width)
    item = gl.program_id(0)
    gl.warp_specialize(
        [
            (_consume, (0, item, output, buffers_0, rings, where, (M, N), GROUP)),
            (_consume, (1, item, output, buffers_1, rings, where, (M, N), GROUP)),
            (_produce, (item, named, lies, rings, where, NAMES_A, GROUP)),
        ],
        [4, 4],
        # Of the second consumer and of the producer; what is left goes to the first consumer.
        [224, 64],
    )  # fmt: skip


def launch(
    a_RM: Tensor, b_RN: Tensor, ends_E: Tensor, a_rows_R: Tensor | None, b_rows_R: Tensor | None,
    out_EMN: Tensor,
) -> None:  # fmt: skip
    """Fill `out_EMN` with the gradient; the backend says which operands it takes: one has names."""
    E, M, N = out_EMN.shape
    named, names_R, lies = (a_RM, a_rows_R, b_RN) if b_rows_R is None else (b_RN, b_rows_R, a_RM)
    assert names_R is not None
    m_tiles, n_tiles = triton.cdiv(M, BLOCK_M), triton.cdiv(N, BLOCK_N)
    skeleton.launch(
        wgrad_kernel, a_RM, named, named.stride(0), names_R, skeleton.boxes(lies, BLOCK_R, 64),
        lies, lies.stride(0), ends_E, skeleton.boxes(out_EMN.view(E * M, N), 64, 64), out_EMN,
        names_R.shape[0], M, N, m_tiles, n_tiles, E * m_tiles * n_tiles, b_rows_R is None, BLOCK_M,
        BLOCK_N, BLOCK_R, STAGES, GROUP,
    )  # fmt: skip
