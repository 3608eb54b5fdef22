"""The two expert products over rows sorted by expert, for many rows per expert.

T tokens, R sorted (token, expert) pairs, E experts, D model width, I expert width, F rows of the
first projection (2 * I if gated, else I). Expert e owns rows ends_E[e - 1] to ends_E[e] - 1; only
the device knows `ends_E`, so a small kernel writes a table of tiles and every block of a product
looks its tiles up there. Rows at and after ends_E[-1] are read and written by nobody.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.activation import activate, activate_gated
from moe_ops.kernels.triton.combine import sum_rows
from moe_ops.kernels.triton.launch import capability
from moe_ops.kernels.triton.sort import sort_pairs
from moe_ops.kernels.triton.weights import Experts

GROUP = 16  # tiles of one expert that run side by side, sharing W from the L2 cache


@dataclass(frozen=True, slots=True)
class Tiles:
    """The table of row tiles: five int32 arrays of `capacity`, then how many tiles there are, and
    how many of these are long: have more than `short` rows. The long ones come first."""

    table: Tensor
    capacity: int
    block_m: int
    short: int


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of one tile of the plain kernel; `stages` buffers of A and W fit shared memory."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def grouped_gated(
    x_TD: Tensor,
    rows_R: Tensor,
    ends_E: Tensor,
    w13_EFD: Tensor,
    b13_EF: Tensor | None,
    top_k: int,
    kind: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    up_shift: float,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """h[r] = activate(W13[e] @ x[rows_R[r] // top_k] + b13[e]) for every row r of expert e.

    W13 is [gate; up], or even and odd rows if interleaved; any strides do.
    """
    F = w13_EFD.shape[1]
    out = x_TD.new_empty(rows_R.numel(), F // 2 if gated else F)
    act = (kind, gated, gated and interleaved, alpha, limit, up_shift)
    return _product(x_TD, rows_R, ends_E, w13_EFD, b13_EF, out, top_k, act, tiles)


def grouped_rows(
    h_RI: Tensor,
    ends_E: Tensor,
    w2_EDI: Tensor,
    b2_ED: Tensor | None,
    *,
    tiles: Tiles | None = None,
) -> Tensor:
    """y[r] = W2[e] @ h[r] + b2[e] for every row r of expert e; W2 may have any strides."""
    out = h_RI.new_empty(h_RI.shape[0], w2_EDI.shape[1])
    linear = (None, False, False, 1.0, None, 0.0)
    return _product(h_RI, None, ends_E, w2_EDI, b2_ED, out, None, linear, tiles)


def run(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    layer: Experts,
    expert_map: Tensor | None,
) -> Tensor:
    """The `experts` op: sort, two products over the same tiles, weighted sum."""
    (T, K), (E, _, I) = experts_TK.shape, layer.sizes
    w13, w2 = layer.w13_EFD, layer.w2_EDI
    if layer.transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    rows_R, inverse_R, ends_E = sort_pairs(experts_TK, E, expert_map)
    # Both products mostly take the same tiles; one that does not maps its own.
    tiles = tile_map(ends_E, T * K, *tile_rows(x_TD, T * K, w13, x_TD.new_empty(0, I)))
    h_RI = grouped_gated(x_TD, rows_R, ends_E, w13, layer.b13_EF, K, *layer.act, tiles=tiles)
    y_RD = grouped_rows(h_RI, ends_E, w2, layer.b2_ED, tiles=tiles)
    return sum_rows(y_RD, inverse_R, weights_TK, K)


def tile_map(ends_E: Tensor, rows: int, block_m: int, short: int = 0) -> Tiles:
    """Tiles of at most `block_m` rows, for every product over these rows of those `tile_rows`."""
    E = ends_E.numel()
    capacity = rows // block_m + min(E, rows)
    table = torch.empty(5 * capacity + 2, dtype=torch.int32, device=ends_E.device)
    block, block_e = 128, max(triton.next_power_of_2(E), 16)
    grid = (E, triton.cdiv(triton.cdiv(rows, block_m), block))
    _tile_map[grid](ends_E, table, capacity, E, block_m, short, GROUP, block_e, block, num_warps=4)
    return Tiles(table, capacity, block_m, short)


def tile_rows(a: Tensor, rows: int, w: Tensor, out: Tensor) -> tuple[int, int]:
    """(block_m, short) that a product of these operands takes, for `tile_map`."""
    if runs_on_hopper(a, w, out):
        from moe_ops.kernels.triton import grouped_gluon

        # Short tiles dealt out apart balance the blocks, but they read W from memory once more,
        # which costs more than it brings where reading W is most of the work.
        enough = rows >= 192 * w.shape[0]
        return grouped_gluon.BLOCK_M, grouped_gluon.HALF_M if enough else 0
    return _config(a, rows, w).block_m, 0


def runs_on_hopper(a: Tensor, w_ENK: Tensor, out: Tensor) -> bool:
    """Whether the warp-specialised kernel takes these operands.

    It copies 16 bytes at a time or more, and stores a tile during four steps of 64 along K.
    """
    if not a.is_cuda or capability(a.device.index) != (9, 0):
        return False
    if a.dtype not in (torch.bfloat16, torch.float16) or w_ENK.dtype != a.dtype:
        return False
    K = w_ENK.shape[2]
    return (
        K > 192
        and K % 8 == out.shape[1] % 8 == a.stride(0) % 16 == 0
        and a.stride(1) == 1
        and w_ENK.is_contiguous()
        and all(t.data_ptr() % 16 == 0 for t in (a, w_ENK, out))
    )


def _product(
    a: Tensor,
    rows: Tensor | None,
    ends_E: Tensor,
    w_ENK: Tensor,
    bias_EN: Tensor | None,
    out: Tensor,
    top_k: int | None,
    act: tuple,
    tiles: Tiles | None,
) -> Tensor:
    if out.numel() == 0:
        return out
    block_m, short = tile_rows(a, out.shape[0], w_ENK, out)
    if tiles is None or (tiles.block_m, tiles.short) != (block_m, short):
        tiles = tile_map(ends_E, out.shape[0], block_m, short)
    bias_EN = None if bias_EN is None else bias_EN.contiguous()
    if runs_on_hopper(a, w_ENK, out):
        from moe_ops.kernels.triton import grouped_gluon

        grouped_gluon.launch(a, rows, w_ENK, bias_EN, out, tiles, top_k, act)
        return out
    config = _config(a, out.shape[0], w_ENK)
    N, K = w_ENK.shape[1:]
    n_tiles = triton.cdiv(N, config.block_n)
    _grouped[(tiles.capacity * n_tiles,)](
        a,
        *a.stride(),
        rows,
        w_ENK,
        *w_ENK.stride(),
        bias_EN,
        out,
        tiles.table,
        tiles.capacity,
        N,
        n_tiles,
        K,
        top_k,
        act,
        config.block_m,
        config.block_n,
        config.block_k,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return out


def _config(a: Tensor, rows: int, w_ENK: Tensor) -> Config:
    per_expert = rows / w_ENK.shape[0]
    return _config_for(per_expert, a.element_size(), _shared_memory(a.device))


def _config_for(rows_per_expert: float, element_size: int, shared_memory: int) -> Config:
    """The tallest tile that the rows of an expert fill, the deepest pipeline that fits."""
    block_m = next((m for m in (16, 32, 64) if rows_per_expert <= m), 128)
    block_n = 256 if block_m == 128 and shared_memory > 200_000 else 128
    block_k = 64 if element_size <= 2 else 32
    stage = (block_m + block_n) * block_k * element_size
    stages = min(4, (shared_memory - 1024) // stage)
    return Config(block_m, block_n, block_k, 8 if block_m == 128 else 4, stages)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one block may use; the interpreter on a CPU has no limit."""
    if device.type != "cuda":
        return 99 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


@triton.jit
def _tile_map(
    ends_ptr,
    table_ptr,
    capacity,
    E,
    BLOCK_M: tl.constexpr,
    SHORT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (e, i) writes tiles i * BLOCK and on of expert e: e, first row of the tile's group
    (at most GROUP tiles), one past the expert's last row, the group's first tile and its size.
    A short tile is a group of its own."""
    e = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    rows = tl.where(experts < E, ends - starts, 0)
    longs = (rows + (BLOCK_M - 1 - SHORT)) // BLOCK_M
    shorts = (rows + (BLOCK_M - 1)) // BLOCK_M - longs
    all_longs = tl.sum(longs)
    first = tl.sum(tl.where(experts < e, longs, 0))
    first_short = all_longs + tl.sum(tl.where(experts < e, shorts, 0))
    my_longs = tl.sum(tl.where(experts == e, longs, 0))
    my_shorts = tl.sum(tl.where(experts == e, shorts, 0))
    start = tl.sum(tl.where(experts == e, starts, 0))
    end = tl.sum(tl.where(experts == e, ends, 0))

    tile = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_long = tile < my_longs
    group = tl.where(is_long, tile // GROUP * GROUP, tile)
    base = tl.where(is_long, first, first_short - my_longs)
    size = tl.where(is_long, tl.minimum(my_longs - group, GROUP), 1)
    entry = table_ptr + base + tile
    mask = tile < my_longs + my_shorts
    tl.store(entry, tl.zeros([BLOCK], tl.int32) + e, mask=mask)
    tl.store(entry + capacity, start + group * BLOCK_M, mask=mask)
    tl.store(entry + 2 * capacity, tl.zeros([BLOCK], tl.int32) + end, mask=mask)
    tl.store(entry + 3 * capacity, base + group, mask=mask)
    tl.store(entry + 4 * capacity, size, mask=mask)
    if e == 0:
        tl.store(table_ptr + 5 * capacity, all_longs + tl.sum(shorts))
        tl.store(table_ptr + 5 * capacity + 1, all_longs)


@triton.jit
def _grouped(
    a_ptr,
    stride_am,
    stride_ak,
    rows_ptr,
    w_ptr,
    stride_we,
    stride_wn,
    stride_wk,
    bias_ptr,
    out_ptr,
    tiles_ptr,
    capacity,
    N,
    n_tiles,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile by one program: any strides, any GPU. Rows are gathered where TOP_K is given.

    ACT is (kind or None, gated, interleaved, alpha, limit, up_shift).
    """
    GATED: tl.constexpr = ACT[1]
    tile = tl.program_id(0)
    if tile >= tl.load(tiles_ptr + 5 * capacity) * n_tiles:
        return
    entry = tiles_ptr + tile // n_tiles
    expert = tl.load(entry).to(tl.int64)
    end = tl.load(entry + 2 * capacity)
    size = tl.load(entry + 4 * capacity)
    within = tile - tl.load(entry + 3 * capacity) * n_tiles
    n = within // size
    rows = tl.load(entry + capacity) + within % size * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < end

    # Gate and up rows of W alternate in the tile, so that each thread holds both of a pair.
    columns = n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = columns < N
    w_rows = columns
    if GATED and not ACT[2]:
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
        if ACT[0] is not None:
            value = activate(acc, ACT)
        out_columns = columns
        out_n = N
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_n + out_columns[None, :]
    mask = valid[:, None] & (out_columns < out_n)[None, :]
    tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=mask)
