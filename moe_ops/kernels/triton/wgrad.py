"""The gradient of expert weights: each expert's rows of a, transposed, times its rows of b.

R rows sorted by expert, M columns of a, N of b. Expert e owns rows ends_E[e - 1] to ends_E[e] - 1,
and a program walks all of them for one tile of the expert's [M, N]: so sums are taken in the order
of the rows, whatever the rows of other experts are, and nothing is added up in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import on_its_device, shared_memory, stages_within
from moe_ops.kernels.triton.replay import launch

GROUP = 8  # rows of tiles that run side by side, sharing b from the L2 cache
# Rows an expert on average, from which on a wider tile should gain more by reading less for each
# product than it loses by having a processor for itself: two of the narrower ones overlap what they
# load and store. Not measured yet.
LONG = 1024


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of one tile; `stages` blocks of rows of a and b fit shared memory, of most tiles with
    room for those of a second one."""

    block_m: int
    block_n: int
    block_r: int
    warps: int
    stages: int


def tiles_for(
    M: int, N: int, rows_per_expert: float, element_size: int, memory: int, whole: bool
) -> Tiles:
    """The tiles of a product, for so many bytes of shared memory; `whole`: whether 16 divides all
    sizes. How many rows are multiplied at once depends on the dtype alone.

    Exact products of float32 have no matrix unit: a larger tile would not fit the registers.
    """
    most = 3
    if element_size > 2:
        block_m, block_n, block_r, warps = 64, 16 if N <= 16 else 64, 32, 4
    elif N <= 16:  # a bias
        block_m, block_n, block_r, warps = 128, 16, 64, 4
    elif M <= 16:  # of an adapter, as are those of 16 columns
        block_m, block_n, block_r, warps = 16, 128, 64, 4
    elif M <= 64 or N <= 64:
        block_m, block_n, block_r, warps = 64, 64, 64, 4
    elif whole and N > 128 and rows_per_expert >= LONG and memory > 200_000:
        block_m, block_n, block_r, warps, most = 128, 256, 64, 8, 4
    else:
        block_m, block_n, block_r, warps = 128, 128, 64, 8
    stage = (block_m + block_n) * block_r * element_size
    return Tiles(block_m, block_n, block_r, warps, stages_within(memory - 1024, stage, most))


@on_its_device
def wgrad(
    a_RM: Tensor, b_RN: Tensor, ends_E: Tensor, a_rows_R: Tensor | None, b_rows_R: Tensor | None,
    dtype: torch.dtype, wgmma: bool = False, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """The `expert_wgrad` op, of operands whose rows are contiguous. `wgmma`: whether the kernel for
    Hopper runs it; `tiles` are for the other to take in the place of those by the table."""
    out_EMN = a_RM.new_empty(ends_E.shape[0], a_RM.shape[1], b_RN.shape[1], dtype=dtype)
    # No copy by TMA is of a tensor without rows, as those of a rank without tokens are.
    if wgmma and out_EMN.numel() and a_RM.shape[0] and b_RN.shape[0]:
        from moe_ops.kernels.triton import wgrad_hopper

        wgrad_hopper.launch(a_RM, b_RN, ends_E, a_rows_R, b_rows_R, out_EMN)
    else:
        _launch(a_RM, b_RN, ends_E, a_rows_R, b_rows_R, out_EMN, tiles, adds=False)
    return out_EMN


@on_its_device
def wgrad_onto(
    a_RM: Tensor, b_RN: Tensor, ends_E: Tensor, a_rows_R: Tensor | None, b_rows_R: Tensor | None,
    sum_EMN: Tensor, tiles: Tiles | None = None,
) -> tuple[()]:  # fmt: skip
    """The `expert_wgrad_onto` op, of operands whose rows are contiguous and of a sum that is."""
    _launch(a_RM, b_RN, ends_E, a_rows_R, b_rows_R, sum_EMN, tiles, adds=True)
    return ()


def _launch(
    a_RM: Tensor, b_RN: Tensor, ends_E: Tensor, a_rows_R: Tensor | None, b_rows_R: Tensor | None,
    out_EMN: Tensor, tiles: Tiles | None, adds: bool,
) -> None:  # fmt: skip
    """Write each expert's product into out_EMN, or add it to what is there."""
    E, (rows_of_a, M), (_, N) = ends_E.shape[0], a_RM.shape, b_RN.shape
    strides = a_RM.stride(0), b_RN.stride(0)
    named = a_rows_R if a_rows_R is not None else b_rows_R
    R = rows_of_a if named is None else named.shape[0]
    if out_EMN.numel() == 0:
        return
    if tiles is None:
        whole = all(size % 16 == 0 for size in (M, N, *strides))
        tiles = tiles_for(M, N, R / E, a_RM.element_size(), shared_memory(a_RM), whole)
    m_tiles, n_tiles = triton.cdiv(M, tiles.block_m), triton.cdiv(N, tiles.block_n)
    launch(
        wgrad_kernel, (E * m_tiles * n_tiles,),
        a_RM, strides[0], a_rows_R, b_RN, strides[1], b_rows_R, ends_E, out_EMN,
        R, M, N, m_tiles, n_tiles,
        BM=tiles.block_m, BN=tiles.block_n, BR=tiles.block_r, GROUP=GROUP, ADDS=adds,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def rows_named(names_ptr, rows, end):
    """The rows of an operand: those that are named, if any are. Past the end no name is read."""
    named = rows
    if names_ptr is not None:
        named = tl.load(names_ptr + rows, mask=rows < end, other=0)
    return named


@triton.jit(do_not_specialize=["R", "m_tiles", "n_tiles"])
def wgrad_kernel(
    a_ptr, stride_a, a_rows_ptr, b_ptr, stride_b, b_rows_ptr, ends_ptr, out_ptr,
    R, M, N, m_tiles, n_tiles,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """One tile of one expert by one program. Tiles of an expert are neighbours, as they read the
    same rows."""
    expert = tl.program_id(0) // (m_tiles * n_tiles)
    tile = tl.program_id(0) % (m_tiles * n_tiles)
    first_m = tile // (GROUP * n_tiles) * GROUP
    size = tl.minimum(m_tiles - first_m, GROUP)
    tile = tile % (GROUP * n_tiles)
    m = (first_m + tile % size) * BM + tl.arange(0, BM)
    n = tile // size * BN + tl.arange(0, BN)
    in_m = m < M
    in_n = n < N

    # Ends that do not ascend within R rows give wrong sums, but no row outside these is read.
    # Near 2^31, sums of the beginning and the rows of a step would be negative.
    begin = tl.maximum(tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), 0)
    begin = tl.minimum(begin, R)
    end = tl.minimum(tl.load(ends_ptr + expert), R)
    acc_MN = tl.zeros([BM, BN], tl.float32)
    rows = begin + tl.arange(0, BR)
    # Names of rows are loaded a step ahead of the rows themselves.
    a_rows = rows_named(a_rows_ptr, rows, end)
    b_rows = rows_named(b_rows_ptr, rows, end)
    for _ in range(begin, end, BR):
        inside = (rows < end)[:, None]
        a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * stride_a + m[None, :]
        b_ptrs = b_ptr + b_rows.to(tl.int64)[:, None] * stride_b + n[None, :]
        # Both are masked: 0 times what lies in a row of no expert, or another's, may be NaN.
        a_RM = tl.load(a_ptrs, mask=inside & in_m[None, :], other=0.0)
        b_RN = tl.load(b_ptrs, mask=inside & in_n[None, :], other=0.0)
        rows += BR
        a_rows = rows_named(a_rows_ptr, rows, end)
        b_rows = rows_named(b_rows_ptr, rows, end)
        acc_MN = tl.dot(tl.trans(a_RM), b_RN, acc_MN, input_precision="ieee")

    row_M = out_ptr + expert.to(tl.int64) * M * N + m.to(tl.int64) * N
    if ADDS:
        # One half after the other: registers hold no tile besides the product.
        halves = tl.permute(tl.reshape(acc_MN, [BM, 2, BN // 2]), [0, 2, 1])
        first, second = tl.split(halves)
        left = tile // size * BN + tl.arange(0, BN // 2)
        add_tile(row_M, in_m, left, N, first)
        add_tile(row_M, in_m, left + BN // 2, N, second)
    else:
        mask_MN = in_m[:, None] & in_n[None, :]
        tl.store(row_M[:, None] + n[None, :], acc_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)


@triton.jit
def add_tile(row_M, in_m, n, N, sums_MN):
    """Add sums, each rounded to float32 before, to some columns of rows that begin at row_M."""
    ptrs = row_M[:, None] + n[None, :]
    mask_MN = in_m[:, None] & (n < N)[None, :]
    tl.store(ptrs, tl.load(ptrs, mask=mask_MN, other=0.0) + sums_MN, mask=mask_MN)
