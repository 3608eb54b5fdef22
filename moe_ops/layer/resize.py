"""A live layer whose ranks become more or fewer: its experts go to where the new group has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ops.checks.options import check_type
from moe_ops.layer.exchange import Exchange
from moe_ops.layer.loads import count_anew
from moe_ops.layer.module import MoELayer
from moe_ops.layer.tensors import layer_buffers
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.expert_map import ExpertPlacement
from moe_ops.parallel.moves import Moves, moves_between
from moe_ops.parallel.over_ranks import move_over_ranks
from moe_ops.ranks.agree import said_by_all
from moe_ops.ranks.groups import Group, resolve

TABLES = ("expert_map", "rank_of_P", "slot_of_P")
COUNTED = ("loads", "physical_loads", "counted_part")  # of a rank's own tokens
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Member:
    """A rank of `over`, with its places in the old and in the new group, or NOWHERE."""

    old: int
    new: int


@torch.no_grad()
def resize_layer(
    layer: MoELayer,
    parallel: ParallelConfig | None,
    group: str,
    *,
    over: str,
    joins: bool = False,
) -> None:
    """Give a layer, in place, the experts that this rank holds in another group of ranks.

    For layers of whole experts whose tokens are a rank's own. Every rank that is in the old group,
    in the new one or in both calls it between the same two steps: `over` is a group of all of
    them. parallel, group: of the new group, as for `MoELayer`. A rank that leaves gives None and
    "", and its layer stays as it was; one that joins gives a layer that was made for the new group,
    and says so by `joins`. It gets replicated tensors too, as gate, shared experts and replicas. A
    rank that is left alone holds all experts, and can be joined by nobody.

    An expert comes from a rank that holds it, its own first. One tensor at a time is held twice.
    Results stay the same. Loads are counted from zero. Weights get new addresses, so that what was
    captured or compiled before has to be made again.

    Raises ValueError for layers that cannot be resized, and RuntimeError, naming the ranks, where
    they do not answer or have other layers, or those of `over` are not the ranks of one old and one
    new group; then nothing was moved.
    """
    check_type("layer", layer, MoELayer, "a MoELayer")
    _check(layer, parallel, joins)
    found = Group.of(over, "over")
    placement = layer.placement
    new = None if parallel is None else placement.resized(parallel)
    exchange = None if parallel is None else _exchange(layer, parallel, group)
    members, sizes = _agreed(layer, new, found, joins)
    rows = _rows(placement, members, sizes)
    with layer.as_loaded():
        for name in sorted(layer.expert_tensors()):
            _resize_tensor(layer, name, rows, found, joins)
        if any(member.old == NOWHERE for member in members):
            first = next(rank for rank, member in enumerate(members) if member.old != NOWHERE)
            for t in _replicated(layer):
                dist.broadcast(t, group=resolve(over), group_src=first)
        if new is not None and not joins:
            _adopt(layer, new, exchange)
    count_anew([layer])


def _check(layer: MoELayer, parallel: ParallelConfig | None, joins: bool) -> None:
    """Raise ValueError, saying what to do, unless a layer's experts are whole and its tokens its
    own, before and after."""
    if parallel is None and joins:
        raise ValueError("a rank that joins needs the ParallelConfig of the new group")
    for config in (layer.parallel, parallel):
        if config is not None and config.size > 1 and (not config.uses_ep or config.sharers > 1):
            raise ValueError(
                f"experts can move to a resized group where each rank holds whole ones and has "
                f"tokens of its own, and this is {config.describe()}; load a checkpoint into a new "
                "layer instead"
            )
    if layer.exchange is None:
        raise ValueError(
            "only a layer whose ranks exchange tokens of their own can be resized: "
            "MoELayer(tokens='own') on two ranks or more; load a checkpoint into a new layer "
            "instead"
        )


def _exchange(layer: MoELayer, parallel: ParallelConfig, group: str) -> Exchange | None:
    """What the layer's arguments would give in the new group. Raises as `MoELayer` does."""
    assert layer.exchange is not None
    return Exchange.of(
        {
            "parallel": parallel, "tokens": "own", "group": group, "tp_group": "",
            "max_num_tokens": layer.exchange.most, "reduce_results": layer.reduce_results,
            "quant": layer.quant,
        }
    )  # fmt: skip


def _agreed(
    layer: MoELayer, new: ExpertPlacement | None, over: Group, joins: bool
) -> tuple[list[Member], tuple[int, int]]:
    """Every rank's places, and the sizes of the old and of the new group."""
    config = layer.parallel
    old = (0, NOWHERE) if joins else (config.ep_size, config.ep_rank)
    next_ = (0, NOWHERE) if new is None else (new.config.ep_size, new.config.ep_rank)
    every = said_by_all(
        "resize_layer",
        {"P": layer.placement.num_physical, "place": (*old, *next_)},
        over,
        own=("place",),
        device=layer.w13_weight.device,
    )
    said = [values["place"] for values in every]
    for what, at in (("old", 0), ("new", 2)):
        named = [(row[at], row[at + 1]) for row in said if row[at + 1] != NOWHERE]
        size = len(named)
        if size == 0 or sorted(named) != [(size, rank) for rank in range(size)]:
            each = ", ".join(
                f"rank {r}: {row[at + 1]} of {row[at]}"
                if row[at + 1] != NOWHERE
                else f"rank {r}: -"
                for r, row in enumerate(said)
            )
            raise RuntimeError(
                f"the ranks of over={over.name!r} are not those of one {what} group: {each}; every "
                f"rank of it has to be in `over`, and give its own place"
            )
    sizes = (max(row[0] for row in said), max(row[2] for row in said))
    return [Member(old=row[1], new=row[3]) for row in said], sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of every rank of `over`, as many as it has before or after, whichever is more."""

    moves: Moves
    sizes: tuple[int, ...]
    held: tuple[int, ...]  # of a rank, before
    kept: tuple[int, ...]  # after


def _rows(placement: ExpertPlacement, members: Sequence[Member], sizes: tuple[int, int]) -> Rows:
    unused = count(placement.num_physical + placement.shared)  # what no row has to be moved for
    before, after = (_held(placement, size) for size in sizes)
    old: list[int] = []
    new: list[int] = []
    rows = []
    for member in members:
        held, kept = before[member.old], after[member.new]
        row = [*held, *(next(unused) for _ in range(len(kept) - len(held)))]
        old += row
        new += [*kept, *row[len(kept) :]]  # one that is not kept goes on holding what it holds
        rows.append((len(row), len(held), len(kept)))
    each = tuple(n for n, _, _ in rows)
    return Rows(
        moves=moves_between(old, new, each, ranks_per_node=len(members)),
        sizes=each,
        held=tuple(n for _, n, _ in rows),
        kept=tuple(n for _, _, n in rows),
    )


def _held(placement: ExpertPlacement, size: int) -> dict[int, tuple[int, ...]]:
    """What each rank of so many holds, shared experts too, and who is none of them: nothing."""
    collective = placement.config.collective
    there = placement.resized(
        ParallelConfig.of(dp=size, expert_parallel=True, collective=collective)
    )
    shared = tuple(range(placement.num_physical, placement.num_physical + placement.shared))
    return {NOWHERE: (), **{rank: (*there.ids_of(rank), *shared) for rank in range(size)}}


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


def _replicated(layer: MoELayer) -> list[Tensor]:
    """The tensors that every rank has alike, in an order that is the same everywhere."""
    apart = {*layer.expert_tensors(), *TABLES, *COUNTED}
    named = dict(layer.named_parameters()) | dict(layer.named_buffers())
    return [named[name].detach() for name in sorted(named) if name not in apart]


def _adopt(layer: MoELayer, placement: ExpertPlacement, exchange: Exchange | None) -> None:
    """Write down who serves what in the new group."""
    layer.placement, layer.parallel, layer.exchange = placement, placement.config, exchange
    layer.expert_offset = placement.offset
    layer.sizes = replace(layer.sizes, E=placement.num_slots)
    slots = layer.expert_tensors()
    layer._specs = {
        name: replace(spec, shape=(placement.num_slots, *spec.shape[1:])) if name in slots and spec
        else spec
        for name, spec in layer._specs.items()
    }  # fmt: skip
    layer._first_buffers = partial(layer_buffers, placement, layer.sizes, layer.quant, True)
    first = layer._first_buffers()
    for name in TABLES:
        made = first[name]
        if made is None:  # one rank is left, and holds all
            setattr(layer, name, None)
        else:
            layer.get_buffer(name).copy_(made)
