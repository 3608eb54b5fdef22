"""The grouped products of bfloat16 and float16 on Hopper (sm_90): one persistent, warp-specialised
kernel in Gluon.

A block holds a ring of stages in shared memory. A producer fills it: W by TMA; the rows of A by
TMA where they lie in order, by cp.async where they are gathered. Two consumer warpgroups each
multiply 64 rows of a 128-row tile by the same 256 rows of W, so the lower half of a tile with at
most 64 rows costs no arithmetic. Outputs stay in registers and are stored behind the products of
the next tile.

What the functions below share is as in `hopper.py`, and
    tokens  the rows of x of a slot's tile as `notes` has the tile, -1 past its end: registers are
            short
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
from moe_ops.kernels.triton.experts.hopper import (
    BLOCK_M,
    BLOCK_N,
    CHUNK_LAYOUT,
    CHUNK_N,
    HALF_M,
    HALF_N,
    REGISTERS,
    columns,
    copy_w,
    cp_async,
    draw,
    drawn_item,
    gated_columns,
    halves,
    look_up,
    produce_rows,
    queue_of,
    store_chunk,
    tell,
    tile_with_rows,
    told,
)
from moe_ops.kernels.triton.experts.tile_map import TileMap
from moe_ops.kernels.triton.launch import processors

BLOCK_K = 64
STAGES = 4  # 48 KiB each, beside 32 KiB of outputs: all that a block has


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
        copy_w(w_descs, tile[0], tile[3], k, bar, w_bufs.index(stage), N, ACT[1], ACT[2])
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
        drawn = draw(queue)
        step = _copy_gathered(
            at_0, at_1, x_ptr, stride_x, mine, tile, w_descs, rings, sizes, step, ACT, EVEN_K
        )
        entry = look_up(drawn_item(drawn, queue, relay), queue)
        step = _copy_gathered(
            at_1, at_2, x_ptr, stride_x, mine, tile, w_descs, rings, sizes, step, ACT, EVEN_K
        )
        slot += 1
        next_tile = tile_with_rows(entry, queue, relay, BLOCK_M)
        _note_tokens(next_tile, rows_ptr, tokens.index(slot % 2), TOP_K)
        tell(next_tile, notes, slot)
        step = _copy_gathered(
            at_2, k_steps, x_ptr, stride_x, mine, tile, w_descs, rings, sizes, step, ACT, EVEN_K
        )
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
def _rounded(chunk, output):
    """64 columns of the output as they are stored."""
    return gl.convert_layout(chunk.to(output[1].dtype), CHUNK_LAYOUT, assert_trivial=True)


@gluon.jit
def _finish(acc, output, expert, n, N, ACT: gl.constexpr):
    """The outputs in chunks of 64 columns, and the first column."""
    CHUNK: gl.constexpr = acc.shape[1] // 4
    left, right = halves(acc)
    a, b = halves(left)
    c, d = halves(right)
    if ACT[1]:
        col = n * (2 * CHUNK)
        return (
            _rounded(gated_columns(a, c, output, expert, col, N, ACT), output),
            _rounded(gated_columns(b, d, output, expert, col + CHUNK, N, ACT), output),
        ), col
    else:
        col = n * (4 * CHUNK)
        return (
            _rounded(columns(a, output, expert, col, N, ACT), output),
            _rounded(columns(b, output, expert, col + CHUNK, N, ACT), output),
            _rounded(columns(c, output, expert, col + 2 * CHUNK, N, ACT), output),
            _rounded(columns(d, output, expert, col + 3 * CHUNK, N, ACT), output),
        ), col


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
                store_chunk(i, pending, where, output, buffers, out_n)
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
        expert, end, row, n = told(notes, slot)
        step += k_steps
    where = (pending_row, pending_end, pending_col)
    for i in gl.static_range(CHUNKS):
        store_chunk(i, pending, where, output, buffers, out_n)
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
    queue = queue_of(tiles_ptr, n_tiles)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    relay = gl.allocate_shared_memory(gl.int32, [BLOCK_M], plain)
    tile = tile_with_rows(look_up(gl.program_id(0), queue), queue, relay, BLOCK_M)
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
                (produce_rows, (a, w_descs, rings, sizes, queue, notes, relay, tile, ACT)),
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
