"""Layers whose experts change ranks by the loads that they counted, in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.checks.options import check_type
from moe_ops.layer.loads import check_shared, count_anew, device_of, gathered
from moe_ops.layer.module import MoELayer
from moe_ops.parallel.load_balance import Rebalanced, check_threshold, rebalance
from moe_ops.parallel.over_ranks import move_over_ranks
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.ranks.agree import said_together
from moe_ops.ranks.groups import Group


@torch.no_grad()
def rebalance_layers(
    layers: Sequence[MoELayer], group: str, *, nodes: int = 1, threshold: float = 1.0
) -> Rebalanced:
    """Give every rank of a group about the same load: plan from the loads that layers counted, move
    experts between the ranks in place, and count from zero.

    layers: of this rank, made with balanced=True and expert parallelism over `group`; those of all
    ranks are alike. Loads of layers whose tokens are a rank's own are summed over the ranks. All
    ranks call it between the same two steps; the same loads give all the same plan. Addresses stay,
    so that compiled and captured forwards go on with the moved experts. Give one layer at a time
    where all at once would make the ranks wait too long. threshold: a layer stays as it is where
    the highest load of a rank over the mean one is below it. `LoadRecorder` calls this every so
    many steps.

    Returns what `rebalance` says. Raises, on every rank, ValueError or TypeError for layers that
    cannot be rebalanced like this, with the words of the rank that has them, and RuntimeError,
    naming the ranks, where ranks do not answer, have other layers, or hold other experts than each
    other think; then nothing was moved.
    """
    ranks = Group.of(group)
    try:
        check_layers(layers, group, nodes)
        check_shared({str(i): layer for i, layer in enumerate(layers)}, ranks)
        check_threshold(threshold)
    except (TypeError, ValueError) as error:
        said_together("rebalance_layers", {}, ranks, error, device=device_of(layers))
    agree_on(layers, group, nodes, threshold)
    found = gathered({str(i): layer for i, layer in enumerate(layers)}, ranks)
    return rebalance_by(layers, group, found.logical_LE, found.experts_LP, nodes, threshold)


def check_layers(layers: Sequence[MoELayer], group: str, nodes: int) -> None:
    """Raise TypeError or ValueError unless layers can be rebalanced over a group on these nodes."""
    found = Group.of(group)
    for layer in layers:
        check_type("each of layers", layer, MoELayer, "a MoELayer")
        config = layer.parallel
        if layer.loads is None or (config.ep_size, config.ep_rank) != (found.size, found.rank):
            raise ValueError(
                f"a layer is {config.describe()}, balanced={layer.loads is not None}; to rebalance "
                f"over the {found.size} ranks of {group!r} make it with balanced=True and expert "
                "parallelism of these ranks"
            )
    if len({(layer.num_experts, layer.placement.num_physical) for layer in layers}) != 1:
        raise ValueError("layers must be some, with as many experts each; rebalance others apart")
    if len({id(layer) for layer in layers}) != len(layers):
        raise ValueError("a layer is given twice, and would be moved twice; give each once")
    first = layers[0]
    even_LE = torch.ones(1, first.num_experts)
    current_LP = torch.arange(first.placement.num_physical)[None] % first.num_experts
    groups = first.routing.n_group
    rebalance(even_LE, current_LP, ranks=found.size, nodes=nodes, num_groups=groups)


def agree_on(layers: Sequence[MoELayer], group: str, nodes: int, threshold: float) -> None:
    """Raise RuntimeError, naming the ranks, where they would rebalance otherwise than each other,
    and ValueError where one refuses to. Every rank calls it."""
    first = layers[0]
    said = {
        "layers": len(layers), "E": first.num_experts, "P": first.placement.num_physical,
        "shared": first.placement.shared, "groups": first.routing.n_group, "nodes": nodes,
        "own": sum(layer.exchange is not None for layer in layers), "threshold": threshold,
    }  # fmt: skip
    said_together("rebalance_layers", said, Group.of(group), None, device=device_of(layers))


def rebalance_by(
    layers: Sequence[MoELayer],
    group: str,
    loads_LE: Tensor,
    current_LP: Tensor,
    nodes: int,
    threshold: float,
) -> Rebalanced:
    """Rebalance layers by loads that all ranks have alike, and count from zero."""
    groups = layers[0].routing.n_group
    done = rebalance(
        loads_LE, current_LP, ranks=Group.of(group).size, nodes=nodes, num_groups=groups,
        threshold=threshold,
    )  # fmt: skip
    for layer, moves, new_P in zip(layers, done.moves, done.physical_to_logical, strict=True):
        placement, replicas = layer.placement, layer.replicas
        assert replicas is not None
        if moves.pairs:  # of all ranks alike
            tensors = layer.expert_tensors()
            move_over_ranks(tensors, moves, placement.sizes, group, shared=placement.shared)
            replicas.update_(ExpertReplicas.of(new_P, layer.num_experts))
    count_anew(layers)
    return done
