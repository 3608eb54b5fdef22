"""The grouped products in plain Triton: any strides, any GPU."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import Act, replay
from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.experts.adapters import NOTHING, Added, add_adapter
from moe_ops.kernels.triton.experts.schedule.tile_map import ENTRY, TileMap
from moe_ops.kernels.triton.launch import shared_memory


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one tile of the plain kernel; `stages` buffers of A and W fit shared memory."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def launch(
    a: Tensor, rows: Tensor | None, w_ENK: Tensor, bias_EN: Tensor | None, out: Tensor,
    tiles: TileMap, top_k: int | None, act: Act, added: Added = NOTHING,
) -> None:  # fmt: skip
    """Write the product of all rows, those of `a` gathered by `rows` if there are any."""
    config = config_of(a, out.shape[0], w_ENK, added)
    N, K = w_ENK.shape[1:]
    n_tiles = triton.cdiv(N, config.block_n)
    replay.launch(
        _grouped, (tiles.capacity * n_tiles,),
        a, *a.stride(), rows, w_ENK, *w_ENK.stride(), bias_EN, out, tiles.table, N, n_tiles,
        *added.arguments, K, top_k, act, config.block_m, config.block_n, config.block_k,
        E=w_ENK.shape[0], **added.constants,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def config_of(a: Tensor, rows: int, w_ENK: Tensor, added: Added = NOTHING) -> Config:
    per_expert, apart = rows / w_ENK.shape[0], added.index is not None
    return config_for(per_expert, a.element_size(), shared_memory(a), apart)


def config_for(
    rows_per_expert: float, element_size: int, shared_memory: int, apart: bool = False
) -> Config:
    """The tallest tile that the rows of an expert fill, the deepest pipeline that fits. `apart`:
    rows have adapters of their own, whose sums need registers beside those of the tile.

    Exact products of float32 have no matrix unit: a larger tile would not fit the registers.
    """
    block_m = next((m for m in (16, 32, 64) if rows_per_expert <= m or (apart and m == 64)), 128)
    if element_size <= 2:
        block_n, block_k = 256 if block_m == 128 and shared_memory > 200_000 else 128, 64
    else:
        block_n, block_k = (128, 16) if block_m == 128 else (64, 32)
    stage = (block_m + block_n) * block_k * element_size
    stages = min(4, (shared_memory - 1024) // stage)
    warps = 8 if block_m == 128 or (apart and element_size <= 2) else 4
    return Config(block_m, block_n, block_k, warps, stages)


@triton.jit
def _grouped(
    a_ptr, stride_am, stride_ak, rows_ptr, w_ptr, stride_we, stride_wn, stride_wk, bias_ptr,
    out_ptr, tiles_ptr, N, n_tiles, narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf,
    stride_br,
    K: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    E: tl.constexpr, ADAPTERS: tl.constexpr, RANK: tl.constexpr, TR: tl.constexpr,
):  # fmt: skip
    """One tile by one program: any strides, any GPU. Rows are gathered where TOP_K is given."""
    GATED: tl.constexpr = ACT.gated
    tile = tl.program_id(0)
    if tile >= tl.load(tiles_ptr) * n_tiles:
        return
    entry = tiles_ptr + ENTRY * (1 + tile // n_tiles)
    expert = tl.load(entry).to(tl.int64)
    end = tl.load(entry + 2)
    size = tl.load(entry + 4)
    within = tile - tl.load(entry + 3) * n_tiles
    n = within // size
    rows = tl.load(entry + 1) + within % size * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < end

    # Gate and up rows of W alternate in the tile, so that each thread holds both of a pair.
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = columns < N
    w_rows = columns
    if GATED and not ACT.interleaved:
        w_rows = columns // 2 + columns % 2 * (N // 2)
    a_rows = rows
    if TOP_K is not None:
        a_rows = tl.load(rows_ptr + rows, mask=valid, other=0) // TOP_K
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * stride_am + ks[None, :] * stride_ak
    w_ptrs = w_ptr + expert * stride_we + w_rows.to(tl.int64)[None, :] * stride_wn
    w_ptrs += ks[:, None] * stride_wk
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(a_ptrs, mask=valid[:, None], other=0.0)
            w = tl.load(w_ptrs, mask=in_n[None, :], other=0.0)
        else:
            in_k = k + ks < K
            a = tl.load(a_ptrs, mask=valid[:, None] & in_k[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=in_n[None, :] & in_k[:, None], other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        w_ptrs += BLOCK_K * stride_wk

    if narrow_ptr is not None:
        acc = add_adapter(
            acc, expert, w_rows, in_n, rows, rows, valid, narrow_ptr, wide_ptr, index_ptr,
            stride_bg, stride_bf, stride_br, E, ADAPTERS, RANK, TR, True,
        )  # fmt: skip
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * N + w_rows, mask=in_n, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        value = activate_gated(gate, up, ACT)
        out_columns = n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_n = N // 2
    else:
        value = acc
        if ACT.kind is not None:
            value = activate(acc, ACT)
        out_columns = columns
        out_n = N
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_n + out_columns[None, :]
    mask = valid[:, None] & (out_columns < out_n)[None, :]
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=mask)
