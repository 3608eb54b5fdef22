"""Rows that come in batches: the first slots of each expert, as many as counts say."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.experts.schedule.sort import count_of
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

BLOCK, ROWS, COLUMNS = 1024, 4, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Counts of the rows of experts, int32 [E]; the slots that each has, and about how many rows:
    launches are sized by that, and are right for any counts."""

    counts_E: Tensor
    slots: int
    expected: int


@triton.jit(do_not_specialize=["M"])
def order_kernel(
    counts_ptr, ids_ptr, weights_ptr, rows_ptr, inverse_ptr, ends_ptr, M,
    E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each expert: its slots in order, behind the rows of experts before it."""
    take_turn(PDL)
    e = tl.program_id(0)
    other_E = tl.arange(0, BE)
    counts_E = tl.load(counts_ptr + other_E, mask=other_E < e, other=0)
    begin = tl.sum(tl.minimum(tl.maximum(counts_E, 0), M), 0)
    count = count_of(counts_ptr, e, True, M)
    for first in range(0, M, BM):
        m = first + tl.arange(0, BM)
        slot, inside, used = e * M + m, m < M, m < count
        tl.store(ids_ptr + slot, tl.where(used, e, -1), mask=inside)
        tl.store(weights_ptr + slot, tl.full((BM,), 1.0, tl.float32), mask=used)
        tl.store(inverse_ptr + slot, tl.where(used, begin + m, -1), mask=inside)
        tl.store(rows_ptr + begin + m, slot, mask=used)
    tl.store(ends_ptr + e, begin + count)


def order_batches(
    counts_E: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows_R, inverse_R, ends_E) as `sort_pairs` gives them, but that rows past the last are not
    written; slots are tokens of one choice, whose ids and weights of 1 are written, too."""
    E, T = counts_E.shape[0], ids_TK.shape[0]
    rows_R, inverse_R = (ids_TK.new_empty(T) for _ in range(2))
    ends_E = ids_TK.new_empty(E)
    launch(
        order_kernel, (E,), counts_E, ids_TK, weights_TK, rows_R, inverse_R, ends_E, T // E,
        E=E, BE=max(2, triton.next_power_of_2(E)), BM=BLOCK, num_warps=4, **pdl_options(ids_TK),
    )  # fmt: skip
    return rows_R, inverse_R, ends_E


@triton.jit(do_not_specialize=["M"])
def put_back_kernel(
    y_ptr, counts_ptr, ends_ptr, out_ptr, M,
    D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of an expert into its first slots; others stay unwritten."""
    take_turn(PDL)
    e, m = tl.program_id(0), tl.program_id(1) * BR + tl.arange(0, BR)
    count = count_of(counts_ptr, e, True, M)
    begin = tl.load(ends_ptr + e) - count
    d = tl.program_id(2) * BD + tl.arange(0, BD)
    mask_RD = (m < count)[:, None] & (d < D)[None, :]
    from_R, to_R = (begin + m).to(tl.int64), e.to(tl.int64) * M + m
    y_RD = tl.load(y_ptr + from_R[:, None] * D + d[None, :], mask=mask_RD, other=0.0)
    tl.store(out_ptr + to_R[:, None] * D + d[None, :], y_RD, mask=mask_RD)


def put_back(y_RD: Tensor, counts_E: Tensor, ends_E: Tensor) -> Tensor:
    """Rows in the order of experts, where their slots are: [E * M, D]."""
    (R, D), E = y_RD.shape, counts_E.shape[0]
    out_RD = y_RD.new_empty(R, D)
    BD = min(COLUMNS, triton.next_power_of_2(D))
    launch(
        put_back_kernel, (E, triton.cdiv(R // E, ROWS), triton.cdiv(D, BD)),
        y_RD, counts_E, ends_E, out_RD, R // E, D=D, BR=ROWS, BD=BD, num_warps=4,
        **pdl_options(y_RD),
    )  # fmt: skip
    return out_RD
