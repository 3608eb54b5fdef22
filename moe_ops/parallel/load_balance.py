"""Rebalancing: replicate the experts with the highest loads, and pack all evenly onto ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.checks.options import check_int, check_number, check_type
from moe_ops.checks.shapes import INDICES, check_tensor
from moe_ops.parallel.expert_map import shares
from moe_ops.parallel.moves import Moves, moves_between
from moe_ops.parallel.packing import keep_bins, keep_slots, pack, replicate

LOADS = (torch.int32, torch.int64, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Rebalanced:
    """New physical experts for every layer, how to get there, and what it gains.

    physical_to_logical: int64 [L, P], rank by rank; moves: those of each layer; before and after:
    float64 [L], the highest load of a rank over the mean one.
    """

    physical_to_logical: Tensor
    moves: tuple[Moves, ...]
    before: Tensor
    after: Tensor


def rebalance(
    loads_LE: Tensor,
    current_LP: Tensor,
    *,
    ranks: int,
    nodes: int = 1,
    num_groups: int = 1,
    threshold: float = 1.0,
) -> Rebalanced:
    """Give the experts with the highest loads more replicas, and every rank about the same load.

    The replicas of an expert share its load evenly. Each rank has the slots that `place` gives it.
    With several nodes and num_groups the result is hierarchical: the groups of grouped routing are
    packed onto nodes, as many on each, then the experts of a node are replicated and packed onto
    its ranks, so that a token which is limited to few groups visits few nodes. Otherwise it is
    global, which balances better. Experts stay on their ranks and in their slots where that costs
    no balance. The same arguments give the same result, so every rank can compute it by itself.
    A layer whose `imbalance` is below the threshold stays as it is; 1 is the least there is.

    loads_LE: int32, int64, float32 or float64 [L, E], as `expert_loads` counts them, summed over
    ranks; a layer without any is given equal ones. current_LP: int32 or int64 [L, P], the logical
    expert in each physical one now. All results are on the CPU.

    Raises ValueError or TypeError for wrong shapes, dtypes and negative loads, for fewer physical
    than logical experts or than ranks, for ranks that do not divide into nodes, for a threshold
    below 1, and, where hierarchical, for groups that do not divide into nodes or experts that do
    not divide into groups.
    """
    check_int("num_groups", num_groups, least=1)
    check_threshold(threshold)
    _check(loads_LE, current_LP, ranks, nodes)
    loads_LE, current_LP = loads_LE.double().cpu(), current_LP.long().cpu()
    some_LE = torch.where(loads_LE.sum(1, keepdim=True) > 0, loads_LE, 1.0)
    sizes = shares(current_LP.shape[1], ranks)
    if nodes > 1 and num_groups > 1:
        new_LP = _by_node(some_LE, current_LP, _split(sizes, nodes), num_groups)
    else:
        new_LP = pack(some_LE, replicate(some_LE, sum(sizes), ranks), sizes)
        new_LP = keep_bins(new_LP, current_LP, sizes)
    new_LP = keep_slots(new_LP, current_LP, sizes)
    before_L = imbalance(loads_LE, current_LP, ranks)
    new_LP = torch.where((before_L < threshold)[:, None], current_LP, new_LP)
    pairs = zip(current_LP.tolist(), new_LP.tolist(), strict=True)
    return Rebalanced(
        new_LP,
        tuple(moves_between(old, new, sizes, ranks // nodes) for old, new in pairs),
        before_L,
        imbalance(loads_LE, new_LP, ranks),
    )


def check_threshold(threshold: float) -> None:
    """Raise TypeError or ValueError for a threshold that no imbalance can be compared with."""
    check_number("threshold", threshold)
    if not 1 <= threshold < math.inf:
        raise ValueError(
            f"threshold={threshold} is of the highest load of a rank over the mean one; give a "
            "number from 1 on: 1 rebalances every layer"
        )


def imbalance(loads_LE: Tensor, physical_to_logical_LP: Tensor, ranks: int) -> Tensor:
    """The highest load of a rank over the mean one, for each layer: float64 [L], at least 1.

    Loads are shared evenly among the replicas of an expert; without any load the result is 1.
    """
    return imbalance_of(rank_loads(loads_LE, physical_to_logical_LP, ranks))


def imbalance_of(ranks_LN: Tensor) -> Tensor:
    """The highest of the ranks' loads over the mean one: float64 [L]; without any load 1."""
    loads_LN = ranks_LN.double()
    mean_L = loads_LN.mean(1)
    return torch.where(mean_L > 0, loads_LN.amax(1) / mean_L, 1.0)


def rank_loads(loads_LE: Tensor, physical_to_logical_LP: Tensor, ranks: int) -> Tensor:
    """The load of each rank, float64 [L, ranks], if replicas share the loads of their experts."""
    loads_LE, logical_LP = loads_LE.double(), physical_to_logical_LP.long()
    ones_LP = torch.ones_like(logical_LP, dtype=torch.float64)
    counts_LE = torch.zeros_like(loads_LE).scatter_add_(1, logical_LP, ones_LP)
    share_LP = (loads_LE / counts_LE).gather(1, logical_LP)
    sizes = shares(logical_LP.shape[1], ranks)
    return torch.stack([part.sum(1) for part in share_LP.split(list(sizes), 1)], 1)


def _by_node(
    loads_LE: Tensor, current_LP: Tensor, nodes: list[tuple[int, ...]], num_groups: int
) -> Tensor:
    """The hierarchical result; `nodes` are the slots of the ranks of each node."""
    (L, E), N = loads_LE.shape, len(nodes)
    if num_groups % N or E % num_groups or min(map(sum, nodes)) < E // N:
        raise ValueError(
            f"{E} experts in num_groups={num_groups} cannot be shared by {N} nodes with "
            f"{', '.join(str(sum(node)) for node in nodes)} slots; pass num_groups=1 to balance "
            "without groups"
        )
    groups_LG = loads_LE.view(L, num_groups, -1).sum(2)
    each = (num_groups // N,) * N
    order_LG = pack(groups_LG, torch.ones_like(groups_LG, dtype=torch.int64), each)
    width = E // num_groups
    experts_LE = (order_LG[:, :, None] * width + torch.arange(width)).view(L, E)
    parts = []
    for experts_Le, sizes in zip(experts_LE.chunk(N, 1), nodes, strict=True):
        loads_Le = loads_LE.gather(1, experts_Le)
        packed = pack(loads_Le, replicate(loads_Le, sum(sizes), len(sizes)), sizes)
        parts.append(experts_Le.gather(1, packed))
    slots = tuple(sum(sizes) for sizes in nodes)
    new_LP = keep_bins(torch.cat(parts, 1), current_LP, slots)
    pairs = zip(new_LP.split(list(slots), 1), current_LP.split(list(slots), 1), strict=True)
    return torch.cat([keep_bins(*pair, sizes) for pair, sizes in zip(pairs, nodes, strict=True)], 1)


def _split(sizes: tuple[int, ...], nodes: int) -> list[tuple[int, ...]]:
    each = len(sizes) // nodes
    return [sizes[n * each : (n + 1) * each] for n in range(nodes)]


def _check(loads_LE: Tensor, current_LP: Tensor, ranks: int, nodes: int) -> None:
    for name, t in (("loads_LE", loads_LE), ("current_LP", current_LP)):
        check_type(name, t, Tensor, "a Tensor")
    for name, count in (("ranks", ranks), ("nodes", nodes)):
        check_int(name, count)
    check_tensor("loads_LE", loads_LE, 2, LOADS)
    check_tensor("current_LP", current_LP, 2, INDICES)
    (L, E), P = loads_LE.shape, current_LP.shape[1]
    if current_LP.shape[0] != L or L < 1 or E < 1:
        raise ValueError(
            f"loads_LE {tuple(loads_LE.shape)} and current_LP {tuple(current_LP.shape)} must have "
            "the same layers, at least one, and at least one expert"
        )
    if nodes < 1 or ranks < 1 or ranks % nodes:
        raise ValueError(f"ranks={ranks} must be a multiple of nodes={nodes}, both at least 1")
    if max(E, ranks) > P:
        raise ValueError(
            f"current_LP has {P} physical experts: too few for {E} logical ones on ranks={ranks}"
        )
    if not bool(loads_LE.isfinite().all()) or bool((loads_LE < 0).any()):
        raise ValueError("loads_LE must be finite and not negative; was a counter overflown?")
    present_LE = torch.zeros(L, E, dtype=torch.bool)
    logical_LP = current_LP.long().cpu()
    if bool(((logical_LP < 0) | (logical_LP >= E)).any()) or not bool(
        present_LE.scatter_(1, logical_LP, True).all()
    ):
        raise ValueError(f"current_LP must name each of the {E} experts of loads_LE in every layer")
