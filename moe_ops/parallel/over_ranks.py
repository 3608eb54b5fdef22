"""Moves of experts between the ranks of a process group, all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from moe_ops.parallel.moves import Moves, apply_moves
from moe_ops.ranks.groups import Group, all_to_all
from moe_ops.registry.derived import written


def move_over_ranks(
    tensors: Mapping[str, Tensor],
    moves: Moves,
    sizes: Sequence[int],
    group: str,
    *,
    shared: int = 0,
) -> None:
    """Move the rows of this rank's tensors in place, as `apply_moves` does, where moves are those
    of all ranks: rank r has sizes[r] rows.

    Every rank of the group calls it, with the same moves and its own tensors, of the same names,
    dtypes and widths. Addresses stay. One tensor is under way at a time, as bytes, so the memory
    that it takes is that of the rows of one tensor that come and go.

    Raises ValueError for sizes that are not those of the group and of the moves, and, before
    anything is sent, as `apply_moves` does.
    """
    found = Group.of(group)
    if len(sizes) != found.size or sum(sizes) != moves.num_rows:
        raise ValueError(
            f"sizes={tuple(sizes)} are of {len(sizes)} ranks and {sum(sizes)} rows, but the group "
            f"has {found.size} ranks and the moves are of {moves.num_rows} rows"
        )
    ends = list(accumulate(sizes))
    rank_of = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    start = ends[found.rank] - sizes[found.rank]
    mine = moves.of_rank(start, ends[found.rank])
    # Both sides of a pair of ranks count its rows in the order of their destinations.
    sends = sorted(mine.sends, key=lambda send: send[1])
    receives = sorted(mine.receives, key=lambda receive: (rank_of[receive[0]], receive[1]))
    to, of = [0] * found.size, [0] * found.size
    for _, destination in sends:
        to[rank_of[destination]] += 1
    for source, _ in receives:
        of[rank_of[source]] += 1
    apply_moves(tensors, Moves(mine.local.num_rows, ()), shared=shared)  # raises before it is late
    crossing = any(rank_of[source] != rank_of[row] for source, row in moves.pairs)
    for name in sorted(tensors):
        t = tensors[name].detach()
        leaving = t.new_empty((len(sends), t[0].nbytes), dtype=torch.uint8)
        for to_send, (row, _) in zip(leaving, sends, strict=True):
            to_send.copy_(_bytes(t[row]))
        coming = all_to_all(leaving, to, of, found) if crossing else leaving
        apply_moves({name: t}, mine.local, shared=shared)
        for received, (_, row) in zip(coming, receives, strict=True):
            t[row].copy_(received.view(t.dtype).view(t[row].shape))
    if receives:
        written(tensors.values())


def _bytes(row: Tensor) -> Tensor:
    return row.contiguous().view(-1).view(torch.uint8)
