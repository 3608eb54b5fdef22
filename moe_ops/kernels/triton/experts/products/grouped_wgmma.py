"""The grouped products of bfloat16 and float16 on Hopper (sm_90), and of codes of 8 bits whose
scales leave the sum: one persistent, warp-specialised kernel in Gluon.

A producer copies W by TMA; the rows of A by TMA where they lie in order, by cp.async where they are
gathered. Each consumer multiplies 64 rows of a 128-row tile by the same 256 rows of W, so the lower
half of a tile with at most 64 rows costs no arithmetic.

Sums of int8 are exact. Of float8 the matrix unit keeps 14 bits of a sum, cut towards zero: by an
emulation of that, 2048 columns of normal numbers are off by 0.1 % and 14336 by 0.3 %, beside the
3.8 % that rounding both sides to float8 makes. Sums of fewer columns would have to be added to
others, which takes twice the 128 registers that a thread has for them.

What the functions below share is as in `skeleton.py`, and
    tokens  the rows of x of a slot's tile as `notes` has the tile, -1 past its end: registers are
            short
    scales  of codes, else None: of A, of W, and static ones of the output if it has any
    S       of codes a `Scaling`, else None

Adapters are as many more columns of A and of W as their rank is, in FURTHER steps of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_ops.kernels.triton import Act, Constant, Weight
from moe_ops.kernels.triton.experts.adapters import NOTHING, Added
from moe_ops.kernels.triton.experts.formats.scales import finite, scale_of
from moe_ops.kernels.triton.experts.products import hopper, skeleton
from moe_ops.kernels.triton.experts.products.hopper import BLOCK_M, CHUNK_LAYOUT
from moe_ops.kernels.triton.experts.products.skeleton import PLAIN, first_tile, skip, specialize
from moe_ops.kernels.triton.experts.schedule.tile_map import TileMap
from moe_ops.kernels.triton.quantize import TO_INTEGER

ROW_BYTES = 128  # of a row in a stage
# Later versions of Triton call it so; earlier ones `_reinterpret`.
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
STAGES = 4  # 48 KiB each, beside 32 KiB of outputs: all that a block has


@gluon.jit
def _note_tokens(slot, tile, source, HOW: gl.constexpr):
    """Write down which rows of x a tile gathers, -1 for those past its end."""
    _, _, rows_ptr, tokens, _, _ = source
    TOP_K: gl.constexpr = HOW[0]
    mine = tokens.index(slot % 2)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = tile[2] + gl.arange(0, mine.shape[0], layout)
    valid = (rows < tile[1]) & (tile[0] >= 0)
    pair = gl.load(rows_ptr + rows, mask=valid, other=0)
    mine.store(gl.where(valid, pair // TOP_K, -1))


@gluon.jit
def _tokens_of_tile(slot, tile, source, rings, sizes, HOW: gl.constexpr):
    """Where the rows of x of a slot's tile are noted."""
    return source[3].index(slot % 2)


@gluon.jit
def _copy_gathered(i, bar, stage, tile, tokens, source, rings, sizes, HOW: gl.constexpr):
    """A step of W and of the rows of x that a tile gathers, by four warps."""
    a_bufs, w_bufs, _, _ = rings
    x_ptr, stride_x, _, _, w_desc, up_desc = source
    K = sizes[1]
    EVEN_K: gl.constexpr = HOW[1]
    BLOCK_K: gl.constexpr = a_bufs.shape[2]
    W_BYTES: gl.constexpr = w_bufs.shape[1] * w_bufs.shape[2] * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ks = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    mbarrier.expect(bar, W_BYTES)
    k = i * BLOCK_K
    hopper.copy_w((w_desc, up_desc), tile[0], tile[3], k, bar, w_bufs.index(stage), sizes, HOW[-1])
    token = tokens.load(gl.SliceLayout(1, layout))
    mask = (token >= 0)[:, None]
    if not EVEN_K:
        # K is a multiple of 8, so the 16 bytes of one copy are all inside or all outside.
        mask = mask & ((k + ks) // 8 < K // 8)[None, :]
    pointers = x_ptr + k + (token.to(gl.int64) * stride_x)[:, None] + ks[None, :]
    hopper.cp_async(a_bufs.index(stage), pointers, mask=mask)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _note_adapted(slot, tile, source, HOW: gl.constexpr):
    _note_tokens(slot, tile, source[0], HOW)


@gluon.jit
def _tokens_adapted(slot, tile, source, rings, sizes, HOW: gl.constexpr):
    return _tokens_of_tile(slot, tile, source[0], rings, sizes, HOW)


@gluon.jit
def _with_rows(rings):
    """The rings with stages of rows of W, in which those of B lie, whatever of W does."""
    a_bufs, w_bufs, full, empty = rings
    if hopper.rows_lie(w_bufs):
        return rings
    else:
        STAGES: gl.constexpr = w_bufs.shape[0]
        BLOCK_K: gl.constexpr = w_bufs.shape[1]
        BLOCK_N: gl.constexpr = w_bufs.shape[2]
        SHAPE: gl.constexpr = [STAGES, BLOCK_N, BLOCK_K]
        if REINTERPRETS:
            turned = w_bufs.reinterpret(w_bufs.dtype, SHAPE, w_bufs.layout)
        else:
            turned = w_bufs._reinterpret(w_bufs.dtype, SHAPE, w_bufs.layout)
        return (a_bufs, turned, full, empty)


@gluon.jit
def _copy_gathered_adapted(i, bar, stage, tile, tokens, source, rings, sizes, HOW: gl.constexpr):
    """`_copy_gathered`, and behind its steps those of u and B, of which u lies in order."""
    of_x, of_adapter, K = source
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    steps = gl.cdiv(K, BLOCK_K)
    if i < steps:
        _copy_gathered(i, bar, stage, tile, tokens, of_x, rings, (sizes[0], K), HOW)
    else:
        both = hopper.both_halves(0, tile, of_adapter, rings, sizes, HOW)
        turned = _with_rows(rings)
        hopper.copy_rows(i - steps, bar, stage, tile, both, of_adapter, turned, sizes, HOW)
        async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _copy_rows_adapted(i, bar, stage, tile, both, source, rings, sizes, HOW: gl.constexpr):
    """`copy_rows`, and behind its steps those of u and B."""
    of_x, of_adapter, K = source
    BLOCK_K: gl.constexpr = rings[0].shape[2]
    steps = gl.cdiv(K, BLOCK_K)
    if i < steps:
        hopper.copy_rows(i, bar, stage, tile, both, of_x, rings, (sizes[0], K), HOW)
    else:
        turned = _with_rows(rings)
        hopper.copy_rows(i - steps, bar, stage, tile, both, of_adapter, turned, sizes, HOW)


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
    w = w_bufs.index(stage)
    w_KN = w.permute([1, 0]) if hopper.rows_lie(w) else w
    return warpgroup_mma(a, w_KN, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _row_scales(chunk, scales, tile, S: gl.constexpr):
    """The scales of A for the rows of a chunk of sums; 1 if these are sums of floats."""
    if S is None:
        return 1.0
    else:
        expert, end, row, _ = tile
        layout: gl.constexpr = gl.SliceLayout(1, chunk.type.layout)
        if S.of_a == "row":
            rows = row + gl.arange(0, chunk.shape[0], layout)
            return gl.load(scales[0] + gl.minimum(rows, end - 1))
        else:
            scale = gl.load(scales[0] + (expert if S.of_a == "expert" else 0))
            return scale + gl.zeros([chunk.shape[0]], gl.float32, layout)


@gluon.jit
def _scaled(
    chunk, i: gl.constexpr, a_scale, scales, tile, N, S: gl.constexpr, ACT: gl.constexpr
):  # fmt: skip
    """Chunk i of a tile's sums: of codes in float32, times the scales of its rows and columns."""
    if S is None:
        return chunk
    else:
        KIND: gl.constexpr = S.kind
        CHUNK: gl.constexpr = chunk.shape[1]
        expert, _, _, n = tile
        if S.down == -1:
            factor = (a_scale * finite(scale_of(gl.load(scales[1] + expert), KIND)))[:, None]
        else:
            STRIDE: gl.constexpr = 2 if ACT.interleaved else 1
            col = n * (4 * CHUNK) + i * CHUNK
            if ACT.gated:
                col = (n * (2 * CHUNK) + i % 2 * CHUNK) * STRIDE
                col += i // 2 * (1 if ACT.interleaved else N // 2)
            cols = col + STRIDE * gl.arange(0, CHUNK, gl.SliceLayout(0, chunk.type.layout))
            scale = gl.load(scales[1] + expert.to(gl.int64) * N + gl.minimum(cols, N - 1))
            factor = a_scale[:, None] * finite(scale_of(scale, KIND))[None, :]
        return chunk.to(gl.float32) * factor


@gluon.constexpr_function
def scaled_at_once(S, at_once):
    """S for the chunks that are scaled all at once, or for those that are not; None for others."""
    return S if S is not None and (S.of_out == "row") == at_once else None


@gluon.jit
def _static_scale(scales, expert, S: gl.constexpr):
    """The static scale of the output, of a tile; 1 if there is none."""
    if S is None or S.of_out == "row":
        return 1.0
    else:
        return gl.load(scales[2] + (expert if S.of_out == "expert" else 0))


@gluon.jit
def quotient(x, scale):
    """x / scale, rounded as a division is: a product with the inverse is off by a bit, which the
    remainder tells. Both are multiplied by a power of two first, so that every scale has an
    inverse; of a scale of 0 that is 0. The sign of a zero is lost."""
    shift = gl.where(gl.abs(scale) < 1.0, 1.8446744073709552e19, 5.421010862427522e-20)
    x, scale = x * shift, scale * shift
    inverse = gl.where(scale == 0.0, 0.0, gl.inline_asm_elementwise(
        "rcp.rn.f32 $0, $1;", "=f,f", [scale], dtype=gl.float32, is_pure=True, pack=1,
    ))  # fmt: skip
    quotient = x * inverse
    near = gl.fma(gl.fma(-quotient, scale, x), inverse, quotient)
    return gl.where(gl.abs(quotient) < 4096.0, near, quotient)  # others saturate, or are no numbers


@gluon.jit
def _rounded(chunk, output, scale, S: gl.constexpr):
    """64 columns of the output as they are stored."""
    TO: gl.constexpr = output[1].dtype
    if S is None or S.of_out == "row":
        chunk = chunk.to(TO)
    else:
        FROM: gl.constexpr = S.dtype
        x = quotient(hopper.as_held(chunk, FROM), scale)
        if TO == gl.int8:
            near = gl.minimum(gl.maximum(gl.where(x == x, x, 0.0), -127.0), 127.0)
            chunk = (near + TO_INTEGER).to(gl.int32, bitcast=True).to(gl.int8)
        else:
            chunk = x.to(TO)  # the conversion saturates, and keeps NaN
    return gl.convert_layout(chunk, CHUNK_LAYOUT, assert_trivial=True)


@gluon.jit
def _finish(acc, output, scales, tile, N, S: gl.constexpr, ACT: gl.constexpr):
    """The outputs in chunks of 64 columns, and the first column."""
    CHUNK: gl.constexpr = acc.shape[1] // 4
    sums = hopper.cut(hopper.cut((acc,)))
    expert, _, _, n = tile
    a_scale = _row_scales(sums[0], scales, tile, S)
    static = _static_scale(scales, expert, S)
    # All at once, or each chunk right before its use: as it spills least.
    NOW: gl.constexpr = scaled_at_once(S, True)
    THEN: gl.constexpr = scaled_at_once(S, False)
    scaled = ()
    for i in gl.static_range(4):
        scaled = scaled + (_scaled(sums[i], i, a_scale, scales, tile, N, NOW, ACT),)  # noqa: RUF005
    CHUNKS: gl.constexpr = 2 if ACT.gated else 4
    first = n * (CHUNKS * CHUNK)
    chunks = ()
    for i in gl.static_range(CHUNKS):
        col = first + i * CHUNK
        chunk = _scaled(scaled[i], i, a_scale, scales, tile, N, THEN, ACT)
        if ACT.gated:
            up = _scaled(scaled[i + 2], i + 2, a_scale, scales, tile, N, THEN, ACT)
            chunk = hopper.gated_columns(chunk, up, output, expert, col, N, ACT)
        else:
            chunk = hopper.columns(chunk, output, expert, col, N, ACT)
        chunks = chunks + (_rounded(chunk, output, static, S),)  # noqa: RUF005
    return chunks, first


@gluon.jit
def _product(
    LOWER: gl.constexpr, step, k_steps, tile, pending, output, buffers, rings, sizes, scales,
    HOW: gl.constexpr,
):  # fmt: skip
    """A consumer's 64 rows of a tile."""
    a_bufs, _, _, empty = rings
    N, _, out_n = sizes
    GATHERED: gl.constexpr = HOW[0] is not None
    S: gl.constexpr = HOW[2]
    FURTHER: gl.constexpr = HOW[3]
    ACT: gl.constexpr = HOW[4]
    STAGES: gl.constexpr = a_bufs.shape[0]
    HALF_M: gl.constexpr = a_bufs.shape[1] // 2
    BLOCK_N: gl.constexpr = hopper.WIDE_N
    INT8: gl.constexpr = a_bufs.dtype == gl.int8
    SUM: gl.constexpr = gl.int32 if INT8 else gl.float32
    UNIT_K: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    # Triton has no instruction for 256 columns of int8.
    UNIT_N: gl.constexpr = BLOCK_N // 2 if INT8 else BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, UNIT_N, UNIT_K])
    CHUNKS: gl.constexpr = 2 if ACT.gated else 4
    expert, end, row, n = tile
    row += LOWER * HALF_M
    if row < end:
        acc = gl.zeros([HALF_M, BLOCK_N], SUM, layout)
        for i in gl.static_range(CHUNKS):
            acc = _multiply(acc, rings, step + i, i > 0, LOWER, GATHERED)
            hopper.store_chunk(i, pending, output, buffers, out_n)
            # Once all but the last product are done, the stage before is free.
            acc = warpgroup_mma_wait(1, deps=[acc])
            if i > 0:
                mbarrier.arrive(empty.index((step + i - 1) % STAGES))
        for i in range(CHUNKS, k_steps - FURTHER):
            acc = _multiply(acc, rings, step + i, True, LOWER, GATHERED)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + i - 1) % STAGES))
        for j in gl.static_range(FURTHER):
            i = k_steps - FURTHER + j
            acc = _multiply(acc, _with_rows(rings), step + i, True, LOWER, GATHERED)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + i - 1) % STAGES))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + k_steps - 1) % STAGES))
        chunks, col = _finish(acc, output, scales, (expert, end, row, n), N, S, ACT)
        pending = (chunks, (row, end, col))
    else:
        skip(step, k_steps, rings)
    return pending


@gluon.jit
def _grouped(
    a, stride_a, rows_ptr, w_desc, up_desc, bias_ptr, out_desc, out_ptr, tiles_ptr, a_scale_ptr,
    w_scale_ptr, out_scale_ptr, u_desc, b_desc, b_up_desc, N, K, n_tiles, TOP_K: gl.constexpr,
    S: gl.constexpr, ACT: gl.constexpr, ROWS: gl.constexpr, EVEN_K: gl.constexpr,
    RANK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`a` is a pointer if TOP_K is given, which says that rows are gathered, else a descriptor.
    ROWS: whether rows of W lie, or its columns. Adapters have a RANK; 0: there are none."""
    dealt = first_tile(tiles_ptr, n_tiles, BLOCK_M)
    stages, buffers = hopper.allocate(w_desc, out_desc, BLOCK_K, STAGES, ROWS)
    output = (bias_ptr, out_desc, out_ptr)
    scales = (a_scale_ptr, w_scale_ptr, out_scale_ptr)
    FURTHER: gl.constexpr = (RANK + BLOCK_K - 1) // BLOCK_K
    HOW: gl.constexpr = (TOP_K, EVEN_K, S, FURTHER, ACT)
    of_adapter = (u_desc, b_desc, b_up_desc)
    if RANK > 0:
        whole = (gl.cdiv(K, BLOCK_K) + FURTHER) * BLOCK_K
    if TOP_K is None and RANK > 0:
        specialize(
            dealt, stages, ((a, w_desc, up_desc), of_adapter, K), output, buffers, (N, whole),
            scales, hopper.both_halves, _copy_rows_adapted, None, _product, BLOCK_M, BLOCK_K,
            TURNS=1, STAGES=STAGES, WARPS=1, AHEAD=(5, 3, 1), HOW=HOW,
        )  # fmt: skip
    elif TOP_K is None:
        specialize(
            dealt, stages, (a, w_desc, up_desc), output, buffers, (N, K), scales,
            hopper.both_halves, hopper.copy_rows, None, _product, BLOCK_M, BLOCK_K, TURNS=1,
            STAGES=STAGES, WARPS=1, AHEAD=(5, 3, 1), HOW=HOW,
        )  # fmt: skip
    else:
        tokens = gl.allocate_shared_memory(gl.int32, [2, BLOCK_M], PLAIN)
        source = (a, stride_a, rows_ptr, tokens, w_desc, up_desc)
        if RANK > 0:
            specialize(
                dealt, stages, (source, of_adapter, K), output, buffers, (N, whole), scales,
                _tokens_adapted, _copy_gathered_adapted, _note_adapted, _product, BLOCK_M, BLOCK_K,
                TURNS=1, STAGES=STAGES, WARPS=4, AHEAD=(6, 4, 2), HOW=HOW,
            )  # fmt: skip
        else:
            specialize(
                dealt, stages, source, output, buffers, (N, K), scales, _tokens_of_tile,
                _copy_gathered, _note_tokens, _product, BLOCK_M, BLOCK_K, TURNS=1, STAGES=STAGES,
                WARPS=4, AHEAD=(6, 4, 2), HOW=HOW,
            )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Scaling(Constant):
    """How sums of codes are scaled, S of the kernel: rows of W that share a scale, 1 or -1 for all,
    and the kind of these; what of A has a scale, and what of the output a static one: "row" (none),
    "expert" or "tensor"; the dtype that the output is rounded to before it is quantised."""

    down: int
    kind: str
    of_a: str
    of_out: str
    dtype: gl.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The scales of a product of codes: of A one for each row, each expert or all; of W; and static
    ones of the output if it is quantised, from values in `dtype`."""

    a: Tensor
    a_each: str  # "row", "expert" or "tensor"
    w: Tensor
    weight: Weight
    out: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def constant(self) -> Scaling:
        """What the kernel has of it when it is compiled."""
        made = "row" if self.out is None else each(self.out)
        dtype = gl.bfloat16 if self.dtype == torch.bfloat16 else gl.float16
        return Scaling(self.weight.down, self.weight.kind, self.a_each, made, dtype)


def each(scale: Tensor) -> str:
    """What has a static scale of its own: each expert, or the whole tensor."""
    return "expert" if scale.numel() > 1 else "tensor"


def adds(added: Added) -> bool:
    """Whether the kernel adds what adapters do: one for all rows, or none, whose B is copied as W
    is. Of a row without an adapter u is 0, but B may hold what times 0 is NaN."""
    b_GFr = added.b_GFr
    if b_GFr is None:
        return True
    in_order = b_GFr.is_contiguous() and b_GFr.shape[2] % 8 == 0 and b_GFr.data_ptr() % 16 == 0
    return in_order and added.index is None


def launch(
    a: Tensor, rows_R: Tensor | None, w_ENK: Tensor, bias_EN: Tensor | None, out: Tensor,
    tiles: TileMap, top_k: int | None, act: Act, scales: Scales | None = None,
    added: Added = NOTHING,
) -> None:  # fmt: skip
    """Run the product; the backend says which operands it takes, and `adds` which adapters."""
    _, N, K = w_ENK.shape
    block_k = ROW_BYTES // w_ENK.element_size()
    source = skeleton.boxes(a, hopper.HALF_M, block_k) if top_k is None else a
    found = (None, None, None) if scales is None else (scales.a, scales.w, scales.out)
    of_adapter: tuple[TensorDescriptor | None, ...] = (None, None, None)
    if added.u is not None and added.b_GFr is not None:
        pair = skeleton.boxes_of_pair(added.b_GFr, block_k, act)
        of_adapter = (skeleton.boxes(added.u, hopper.HALF_M, block_k), *pair)
    skeleton.launch(
        _grouped, a, source, None if top_k is None else a.stride(0), rows_R,
        *skeleton.boxes_of_pair(w_ENK, block_k, act), bias_EN,
        skeleton.boxes(out, hopper.HALF_M, hopper.CHUNK_N), out, tiles.table, *found, *of_adapter,
        N, K, triton.cdiv(N, hopper.BLOCK_N), top_k, None if scales is None else scales.constant,
        act, w_ENK.is_contiguous(), K % block_k == 0, added.constants["RANK"], BLOCK_M, block_k,
        STAGES,
    )  # fmt: skip
