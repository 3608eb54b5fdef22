"""What the grouped products on Hopper (sm_90) share whose tiles are rows of A by rows of W: copies
by TMA into the ring of `skeleton.py`, which says what the functions share, activations, and the
stores of a tile behind the products of the next one. ACT is an `Act`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_ops.kernels.triton.activation import activate, activate_gated

# Named so from Triton 3.7 or 3.8 on; before that, longer.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
cp_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

BLOCK_M = 128
BLOCK_N = 256
HALF_M = BLOCK_M // 2  # rows of a consumer
HALF_N = BLOCK_N // 2
CHUNK_N = 64  # columns that one copy stores: of 16 bits, a row of shared memory as it is swizzled
BOX_N = gl.constexpr(CHUNK_N)  # columns of W^T that one copy loads
WIDE_N = gl.constexpr(BLOCK_N)
CHUNK_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK_N, 16]))


@gluon.constexpr_function
def rows_lie(w_bufs):
    """Whether stages are of rows of W; else they are of columns, as W^T lies."""
    return w_bufs.shape[-2] > w_bufs.shape[-1]


@gluon.jit
def copy_w(w_descs, expert, n, k, full, stage, sizes, ACT: gl.constexpr):
    """Two boxes of 128 rows of W[expert]: gate rows and up rows, if it has both. Of W^T as it lies
    four of 64 columns, which are rows of W."""
    left, right = w_descs
    N, K = sizes
    if rows_lie(stage):
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
    else:
        WIDE: gl.constexpr = stage.shape[1]
        for i in gl.static_range(WIDE // BOX_N):
            col = n * WIDE + i * BOX_N
            if ACT.gated:
                col = n * (WIDE // 2) + i * BOX_N
                if i * BOX_N >= WIDE // 2:
                    col += N // 2 - WIDE // 2
            tma_load(left, [expert * K + k, col], full, stage.slice(i * BOX_N, BOX_N, dim=1))


@gluon.jit
def both_halves(slot, tile, source, rings, sizes, HOW: gl.constexpr):
    """Whether a tile has rows in its lower half, as `AT` of `skeleton.py`."""
    HALF_M: gl.constexpr = rings[0].shape[1] // 2
    return tile[2] + HALF_M < tile[1]


@gluon.jit
def copy_rows(i, bar, stage, tile, both, source, rings, sizes, HOW: gl.constexpr):
    """A step of W and of the rows of A where these lie in order, as `COPY` of `skeleton.py`."""
    a_bufs, w_bufs, _, _ = rings
    a_desc, w_desc, up_desc = source
    expert, _, row, n = tile
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    BYTES: gl.constexpr = w_bufs.dtype.primitive_bitwidth // 8
    W_BYTES: gl.constexpr = w_bufs.shape[1] * w_bufs.shape[2] * BYTES
    HALF_BYTES: gl.constexpr = HALF_M * BLOCK_K * BYTES
    k = i * BLOCK_K
    mbarrier.expect(bar, W_BYTES + HALF_BYTES, pred=not both)
    mbarrier.expect(bar, W_BYTES + 2 * HALF_BYTES, pred=both)
    copy_w((w_desc, up_desc), expert, n, k, bar, w_bufs.index(stage), sizes, HOW[-1])
    upper = a_bufs.index(stage).slice(0, HALF_M)
    lower = a_bufs.index(stage).slice(HALF_M, HALF_M)
    tma_load(a_desc, [row, k], bar, upper)
    tma_load(a_desc, [row + HALF_M, k], bar, lower, pred=both)


@gluon.jit
def allocate(w_desc, out_desc, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr):
    """Stages of A and of W, and the buffers of each consumer. ROWS: whether rows of W lie."""
    swizzled: gl.constexpr = w_desc.layout
    stored: gl.constexpr = out_desc.layout
    HALF_M: gl.constexpr = out_desc.block_shape[0]
    CHUNK: gl.constexpr = out_desc.block_shape[1]
    a_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 2 * HALF_M, BLOCK_K], swizzled)
    W: gl.constexpr = [STAGES, WIDE_N, BLOCK_K] if ROWS else [STAGES, BLOCK_K, WIDE_N]
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, W, swizzled)
    buffers_0 = gl.allocate_shared_memory(out_desc.dtype, [2, HALF_M, CHUNK], stored)
    buffers_1 = gl.allocate_shared_memory(out_desc.dtype, [2, HALF_M, CHUNK], stored)
    return (a_bufs, w_bufs), (buffers_0, buffers_1)


@gluon.jit
def halves(acc):
    """[M, N] into its left and right [M, N / 2]; a thread has the same columns of both."""
    M: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    return acc.reshape([M, 2, HALF]).permute([0, 2, 1]).split()


@gluon.jit
def cut(pieces):
    """The left and the right half of each."""
    both = ()
    for i in gl.static_range(len(pieces)):
        both = both + halves(pieces[i])
    return both


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
    bias_ptr = output[0]
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
    bias_ptr = output[0]
    acc = add_bias(acc, bias_ptr, expert, col, N, 1)
    if ACT.kind is not None:
        acc = activate(acc, ACT)
    return acc


@gluon.jit
def store_chunk(i: gl.constexpr, pending, output, buffers, out_n):
    """Store chunk i of the pending ones, if there are any; rows from `end` on belong to others."""
    out_desc, out_ptr = output[1], output[2]
    chunks, where = pending
    row, end, col = where
    buffer = buffers.index(i % 2)
    M: gl.constexpr = buffer.shape[0]
    CHUNK: gl.constexpr = buffer.shape[1]
    col += i * CHUNK
    # The copy that last read this buffer has to be done. It is the last but one, unless tiles that
    # were not stored by copies came between.
    if row + M <= end:
        tma.store_wait(1)
        buffer.store(chunks[i])
        fence_async_shared()
        tma_store(out_desc, [row, col], buffer)
    elif row < end:
        tma.store_wait(0)
        buffer.store(chunks[i])
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        rows = row + gl.arange(0, M, gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
        pointers = out_ptr + rows.to(gl.int64)[:, None] * out_n + cols[None, :]
        mask = (rows < end)[:, None] & (cols < out_n)[None, :]
        gl.store(pointers, buffer.load(layout), mask=mask)
