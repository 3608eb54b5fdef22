"""DTensors: each rank runs an op on its part of them, and what the results are parts of.

Nothing is gathered for it. Placements that no way of an op takes raise ValueError with those that
one does, on each axis of the mesh. Gradients are placed as their tensors are, or are partial sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def _accepts(call: Any) -> str | None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to split an op over the ranks of an axis of a mesh.

    `said` names it. `shards` gives the axis on which each argument is split; all others are whole.
    Results are split by rows if `rows`, else parts of a sum. `refuses` says of a record why the op
    cannot be split so, and what to do, or gives None. Of `once` one rank of the axis counts. What
    `own` names may be a plain tensor, which differs from rank to rank.
    """

    said: str
    shards: Callable[[Any], Mapping[str, int]]
    rows: bool = False
    refuses: Callable[[Any], str | None] = _accepts
    once: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sharded:
    """The ways in which an op is split."""

    ways: tuple[Way, ...]

    def __str__(self) -> str:
        return "is split by " + " or ".join(way.said for way in self.ways)


def given(values: tuple[Any, ...]) -> bool:
    """Whether there is a DTensor among these."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(v, module.DTensor) for v in values)


def run(op: Any, rule: Sharded | str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on this rank's parts of DTensors. The results are DTensors."""
    name = f"moe_ops.{op.name}"
    if isinstance(rule, str):
        raise NotImplementedError(
            f"{name} takes no DTensor, as it {rule}; give it this rank's tensors, by to_local()"
        )
    call = op.call(*args, **kwargs)
    named = op.arguments.by_name(call)
    placed: dict[str, Any] = {n: t for n, t in named.items() if given((t,))}
    mesh = next(iter(placed.values())).device_mesh
    if any(t.device_mesh != mesh for t in placed.values()):
        raise ValueError(f"{name} got DTensors of several meshes; redistribute them over one")
    ways = [_way(name, rule, call, placed, axis) for axis in range(mesh.ndim)]
    own = {n for way in ways if way is not None for n in way.own}
    plain = [n for n, t in named.items() if isinstance(t, Tensor) and n not in {*placed, *own}]
    if plain:
        raise ValueError(f"{name} got {plain[0]} as a plain tensor beside DTensors; distribute it")
    local = {n: _local(n, t, call, ways) for n, t in placed.items()}
    return _whole(op(*op.arguments.in_order({**named, **local})), op, call, ways)


def _local(name: str, t: Any, call: Any, ways: Sequence[Way | None]) -> Tensor:
    """This rank's part of an argument, as the ways take it on each axis of the mesh."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dims = [None if way is None else way.shards(call).get(name) for way in ways]
    places = [Replicate() if dim is None else Shard(dim) for dim in dims]
    # Where the op is split and a tensor is not, each rank has a part of its gradient.
    summed = [way is not None and dim is None for way, dim in zip(ways, dims, strict=True)]
    grads = [Partial() if s else p for s, p in zip(summed, places, strict=True)]
    mesh = t.device_mesh
    part: Tensor = t.redistribute(mesh, places).to_local(grad_placements=grads)
    for axis, way in enumerate(ways):
        if way is not None and name in way.once and mesh.get_local_rank(axis) > 0:
            part = part * 0
    return part


def _whole(out: Any, op: Any, call: Any, ways: Sequence[Way | None]) -> Any:
    """Results of this rank as DTensors."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    first = op.arguments.first(call)
    by_rows = any(way is not None and way.rows for way in ways)
    places = [Replicate() if w is None else Shard(0) if w.rows else Partial() for w in ways]

    def placed(part: Tensor) -> Any:
        shape = torch.Size((first.shape[0], *part.shape[1:])) if by_rows else part.shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, first.device_mesh, places, run_check=False, shape=shape, stride=stride
        )

    return tree_map(placed, out)


def _way(name: str, rule: Sharded, call: Any, placed: Mapping[str, Any], axis: int) -> Way | None:
    """The way of an op that has its arguments placed so on an axis; None if all are whole."""
    from torch.distributed.tensor import Shard

    found = {n: t.placements[axis] for n, t in placed.items()}
    split = {n: p.dim for n, p in found.items() if type(p) is Shard}
    said = ", ".join(
        f"{n} {f'Shard({split[n]})' if n in split else p}"
        for n, p in found.items()
        if not p.is_replicate()
    )
    if any(not p.is_replicate() and n not in split for n, p in found.items()):
        raise ValueError(f"{name} takes no tensor that is placed as in {said}; redistribute it")
    if not split:
        return None
    for way in rule.ways:
        shards = way.shards(call)
        if split.items() <= shards.items():
            why = way.refuses(call)
            if why is not None:
                raise ValueError(f"{name} with {said}: {why}")
            return way
    ways = "; or ".join(
        f"{way.said}: {', '.join(f'{n} Shard({d})' for n, d in way.shards(call).items())}"
        for way in rule.ways
    )
    raise ValueError(f"{name} cannot be split with {said}; redistribute to {ways}")
