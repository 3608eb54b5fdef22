"""What of a layer goes to which rank when another group of ranks gets its experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ops.layer.module import MoELayer
from moe_ops.parallel.expert_map import ExpertPlacement, ids_by_rank
from moe_ops.parallel.moves import Moves, moves_between
from moe_ops.parallel.over_ranks import move_over_ranks
from moe_ops.ranks.groups import Group, resolve

TABLES = ("expert_map", "rank_of_P", "slot_of_P")
COUNTED = ("loads", "physical_loads", "counted_part")  # of a rank's own tokens
NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What all ranks of `over` agreed on: for each its rank in the old and in the new group, or
    NOWHERE; the sizes of both; how each places experts; and the layout of the weights."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    sizes: tuple[int, int]
    placed: tuple[str, str]
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of every rank of `over`, as many as it has before or after, whichever is more."""

    moves: Moves
    sizes: tuple[int, ...]
    held: tuple[int, ...]  # of a rank, before
    kept: tuple[int, ...]  # after


def move(layer: MoELayer, change: Change, over: Group, joins: bool) -> None:
    """Send what each rank holds, and give those that join what all have alike. The weights are as
    they were loaded; every rank of `over` calls it."""
    rows = _rows(layer.placement, change)
    for name in sorted(layer.expert_tensors()):
        _resize_tensor(layer, name, rows, over, joins)
    if NOWHERE not in change.old:
        return
    first = next(rank for rank, old in enumerate(change.old) if old != NOWHERE)
    for _, t in replicated(layer):
        if t.numel():
            sent = t.contiguous().view(-1).view(torch.uint8)
            dist.broadcast(sent, group=resolve(over.name), group_src=first)
            t.copy_(sent.view(t.dtype).view(t.shape))


def replicated(layer: MoELayer) -> Iterator[tuple[str, Tensor]]:
    """The tensors that every rank has alike, by name, in an order that is the same everywhere."""
    apart = {*layer.expert_tensors(), *TABLES, *COUNTED}
    named = dict(layer.named_parameters()) | dict(layer.named_buffers())
    yield from ((name, named[name].detach()) for name in sorted(named) if name not in apart)


def _rows(placement: ExpertPlacement, change: Change) -> Rows:
    unused = count(placement.num_physical + placement.shared)  # what no row has to be moved for
    before, after = (
        _held(placement, size, placed)
        for size, placed in zip(change.sizes, change.placed, strict=True)
    )
    old: list[int] = []
    new: list[int] = []
    rows = []
    for old_rank, new_rank in zip(change.old, change.new, strict=True):
        held, kept = before[old_rank], after[new_rank]
        row = [*held, *(next(unused) for _ in range(len(kept) - len(held)))]
        old += row
        new += [*kept, *row[len(kept) :]]  # one that is not kept goes on holding what it holds
        rows.append((len(row), len(held), len(kept)))
    each = tuple(n for n, _, _ in rows)
    return Rows(
        moves=moves_between(old, new, each, ranks_per_node=len(rows)),
        sizes=each,
        held=tuple(n for _, n, _ in rows),
        kept=tuple(n for _, _, n in rows),
    )


def _held(placement: ExpertPlacement, size: int, placed: str) -> dict[int, tuple[int, ...]]:
    """What each rank of so many holds, shared experts too, and who is none of them: nothing."""
    shared = tuple(range(placement.num_physical, placement.num_physical + placement.shared))
    routed = ids_by_rank(placement.num_physical, size, placed)
    return {NOWHERE: (), **{rank: (*ids, *shared) for rank, ids in enumerate(routed)}}


def _resize_tensor(layer: MoELayer, name: str, rows: Rows, over: Group, joins: bool) -> None:
    """Move the rows of one tensor; of a rank that leaves it stays as it was."""
    given = getattr(layer, name)
    size, held, kept = (of[over.rank] for of in (rows.sizes, rows.held, rows.kept))
    t = given.detach().new_empty((size, *given.shape[1:]))
    t[:held].copy_(given.detach()[:held])
    move_over_ranks({name: t}, rows.moves, rows.sizes, over.name)
    if joins:
        given.detach().copy_(t[:kept])
    elif kept:
        own = t if kept == size else t[:kept].clone()
        if isinstance(given, nn.Parameter):
            given.data = own
        else:
            setattr(layer, name, own)
