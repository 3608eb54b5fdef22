"""Sort routed rows by expert on the device; the order among rows of one expert is that of pairs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch

ONE_LAUNCH = 4096  # pairs up to which every program reads all of them
CHUNK = 512  # pairs a program sorts, beyond that
CHUNKS_AT_ONCE, EXPERTS_AT_ONCE = 256, 8  # whose counts a program adds up in one go


@triton.jit
def local_ids(ids_ptr, expert_map_ptr, at, mask, E: tl.constexpr, N_MAP):
    """The experts on this rank of some pairs; E where there is none, or no pair."""
    ids = tl.load(ids_ptr + at, mask=mask, other=-1)
    if expert_map_ptr is not None:
        known = mask & (ids >= 0) & (ids < N_MAP)
        ids = tl.load(expert_map_ptr + ids, mask=known, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


# One compiled kernel serves every number of pairs up to a power of two.
@triton.jit(do_not_specialize=["R", "N_MAP"])
def sort_kernel(
    ids_ptr, expert_map_ptr, rows_ptr, inverse_ptr, ends_ptr, R, N_MAP,
    E: tl.constexpr, BR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for each expert, and one for the pairs of none."""
    take_turn(PDL)
    sort_expert(
        tl.program_id(0), ids_ptr, expert_map_ptr, rows_ptr, inverse_ptr, ends_ptr, R, N_MAP, E, BR
    )


@triton.jit
def sort_expert(
    e, ids_ptr, expert_map_ptr, rows_ptr, inverse_ptr, ends_ptr, R, N_MAP,
    E: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The rows of an expert, or for e = E of the pairs of none: found by counting the pairs of
    experts before it, so that no program waits for another."""
    pairs = tl.arange(0, BR)
    ids = local_ids(ids_ptr, expert_map_ptr, pairs, pairs < R, E, N_MAP)
    mine = (pairs < R) & (ids == e)
    begin = tl.sum((ids < e).to(tl.int32), 0)
    count = mine.to(tl.int32)
    row = begin + tl.cumsum(count, 0) - 1
    used = e < E
    tl.store(rows_ptr + row, tl.where(used, pairs, -1), mask=mine)
    tl.store(inverse_ptr + pairs, tl.where(used, row, -1), mask=mine)
    if used:
        tl.store(ends_ptr + e, begin + tl.sum(count, 0))


@triton.jit(do_not_specialize=["R", "N_MAP"])
def count_kernel(
    ids_ptr, expert_map_ptr, counts_ptr, R, N_MAP,
    E: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """counts[chunk, e]: the pairs of each expert in each chunk; e = E: of none."""
    take_turn(PDL)
    counts_ptr += tl.program_id(0).to(tl.int64) * (E + 1)
    e = tl.arange(0, BE)
    tl.store(counts_ptr + e, tl.zeros((BE,), tl.int32), mask=e <= E)
    pairs = tl.program_id(0) * BR + tl.arange(0, BR)
    ids = local_ids(ids_ptr, expert_map_ptr, pairs, pairs < R, E, N_MAP)
    tl.debug_barrier()  # the zeros come first
    # By atomics, as `tl.histogram` takes twice as long for 1024 bins.
    tl.atomic_add(counts_ptr + ids, tl.full((BR,), 1, tl.int32), mask=pairs < R, sem="relaxed")


@triton.jit(do_not_specialize=["chunks"])
def add_up_kernel(
    counts_ptr, chunks, E: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr
):
    """Replace the counts of each chunk by those of the chunks before it; one more row for all."""
    take_turn(PDL)
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    before_E = tl.zeros((BE,), tl.int32)
    for first in range(0, chunks, BC):
        c = first + tl.arange(0, BC)
        at_CE = counts_ptr + c.to(tl.int64)[:, None] * (E + 1) + e[None, :]
        mask = (c < chunks)[:, None] & (e <= E)[None, :]
        counts_CE = tl.load(at_CE, mask=mask, other=0)
        tl.store(at_CE, before_E[None, :] + tl.cumsum(counts_CE, 0) - counts_CE, mask=mask)
        before_E += tl.sum(counts_CE, 0)
    tl.store(counts_ptr + tl.cast(chunks, tl.int64) * (E + 1) + e, before_E, mask=e <= E)


@triton.jit(do_not_specialize=["R", "N_MAP", "chunks"])
def place_kernel(
    ids_ptr, expert_map_ptr, before_ptr, rows_ptr, inverse_ptr, ends_ptr, R, N_MAP, chunks,
    E: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort one chunk, and put its runs behind those of the chunks before it."""
    take_turn(PDL)
    chunk = tl.program_id(0)
    e = tl.arange(0, BE)
    before_ptr += e
    total_E = tl.load(before_ptr + tl.cast(chunks, tl.int64) * (E + 1), mask=e <= E, other=0)
    before_ptr += chunk.to(tl.int64) * (E + 1)
    before_E = tl.load(before_ptr, mask=e <= E, other=0)
    own_E = tl.load(before_ptr + (E + 1), mask=e <= E, other=0) - before_E
    end_E = tl.cumsum(total_E, 0)
    if chunk == 0:
        tl.store(ends_ptr + e, end_E, mask=e < E)
    # From a place in the sorted chunk to a row, for each expert.
    shift_E = end_E - total_E + before_E - (tl.cumsum(own_E, 0) - own_E)
    place = tl.arange(0, BR)
    pairs = chunk * BR + place
    ids = local_ids(ids_ptr, expert_map_ptr, pairs, pairs < R, E, N_MAP)
    keys = tl.sort(tl.where(pairs < R, ids, BE - 1) * BR + place)
    sorted_ids = keys // BR
    sorted_pairs = chunk * BR + keys % BR
    row = tl.gather(shift_E, sorted_ids, 0) + place
    inside = sorted_pairs < R
    used = sorted_ids < E
    tl.store(rows_ptr + row, tl.where(used, sorted_pairs, -1), mask=inside)
    tl.store(inverse_ptr + sorted_pairs, tl.where(used, row, -1), mask=inside)


def most_units(R: int, E: int, rows: int) -> int:
    """The most units of up to so many rows that R rows of E experts can fall into."""
    return min(R, E + R // rows)


@triton.jit
def count_of(counts_ptr, e, inside, M):
    """The rows of experts that have M slots each, at most as many; 0 of those that are outside."""
    return tl.minimum(tl.maximum(tl.load(counts_ptr + e, mask=inside, other=0), 0), M)


@triton.jit
def row_of(inverse_ptr, pair, inside, M):
    """The rows of pairs, -1 of those that have none. M: None, or the slots of each expert, which
    are pairs and rows; then not rows are given, but counts of the slots that are used."""
    if M is None:
        return tl.load(inverse_ptr + pair, mask=inside, other=-1)
    else:
        return tl.where(pair % M < count_of(inverse_ptr, pair // M, inside, M), pair, -1)


@triton.jit
def unit_of(ends_ptr, unit, blocks, experts_E, E: tl.constexpr, BN: tl.constexpr, M):
    """(expert, block, first row, rows) of a unit of work: a block of an expert's weights and up to
    BN of its rows. Units of one block are neighbours, so that its weights are read once. The expert
    of a unit past the last is E. experts_E counts E or more of them, in the caller's layout.

    M: None, or the slots of each expert, whose rows are the first of them; then ends are counts.
    """
    inside_E = experts_E < E
    if M is None:
        end_E = tl.load(ends_ptr + experts_E, mask=inside_E, other=0)
        begin_E = tl.load(ends_ptr + experts_E - 1, mask=inside_E & (experts_E > 0), other=0)
        tiles_E = tl.where(inside_E, (end_E - begin_E + BN - 1) // BN, 0)
    else:
        tiles_E = (count_of(ends_ptr, experts_E, inside_E, M) + BN - 1) // BN
    last_E = tl.cumsum(tiles_E, 0)
    past_E = inside_E & (last_E * blocks <= unit)
    e = tl.sum(past_E.to(tl.int32), 0)
    index = unit - tl.max(tl.where(past_E, last_E, 0), 0) * blocks
    # Loaded once more, which is quicker than two sums over all experts.
    if M is None:
        begin = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
        end = tl.load(ends_ptr + e, mask=e < E, other=0)
    else:
        begin = e * M
        end = begin + count_of(ends_ptr, e, e < E, M)
    tiles = tl.maximum((end - begin + BN - 1) // BN, 1)
    first = begin + index % tiles * BN
    return e, index // tiles, first, tl.minimum(end - first, BN)


def pairs_at_once(R: int) -> int:
    """How many pairs a program reads, where each reads all of them."""
    return max(16, triton.next_power_of_2(R))


def sort_pairs(
    ids_TK: Tensor, num_experts: int, expert_map: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows_R, inverse_R, ends_E), int32: the pair in each row, the row of each pair (-1: none),
    and one past the last row of each expert.
    """
    R, E = ids_TK.numel(), num_experts
    rows_R, inverse_R = (ids_TK.new_empty(R, dtype=torch.int32) for _ in range(2))
    ends_E = ids_TK.new_empty(E, dtype=torch.int32)
    n_map = 0 if expert_map is None else expert_map.shape[0]
    options = pdl_options(ids_TK)
    if R <= ONE_LAUNCH:
        launch(
            sort_kernel, (E + 1,), ids_TK, expert_map, rows_R, inverse_R, ends_E, R, n_map,
            E=E, BR=pairs_at_once(R), num_warps=4, **options,
        )  # fmt: skip
        return rows_R, inverse_R, ends_E
    chunks = triton.cdiv(R, CHUNK)
    BE = triton.next_power_of_2(E + 2)
    counts_CE = ids_TK.new_empty((chunks + 1, E + 1), dtype=torch.int32)
    launch(
        count_kernel, (chunks,), ids_TK, expert_map, counts_CE, R, n_map,
        E=E, BR=CHUNK, BE=BE, num_warps=4, **options,
    )  # fmt: skip
    BC = min(CHUNKS_AT_ONCE, triton.next_power_of_2(chunks))
    launch(
        add_up_kernel, (triton.cdiv(E + 1, EXPERTS_AT_ONCE),), counts_CE, chunks,
        E=E, BC=BC, BE=EXPERTS_AT_ONCE, num_warps=4, **options,
    )  # fmt: skip
    launch(
        place_kernel, (chunks,),
        ids_TK, expert_map, counts_CE, rows_R, inverse_R, ends_E, R, n_map, chunks,
        E=E, BR=CHUNK, BE=BE, num_warps=4, **options,
    )  # fmt: skip
    return rows_R, inverse_R, ends_E
