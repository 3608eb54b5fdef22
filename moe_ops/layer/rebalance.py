"""Layers whose experts change ranks by the loads that they counted, in lockstep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.checks.options import check_type
from moe_ops.layer.module import MoELayer
from moe_ops.parallel.load_balance import Rebalanced, rebalance
from moe_ops.parallel.over_ranks import move_over_ranks
from moe_ops.parallel.replicas import ExpertReplicas
from moe_ops.ranks.agree import said_by_all
from moe_ops.ranks.groups import Group, all_gather


@torch.no_grad()
def rebalance_layers(layers: Sequence[MoELayer], group: str, *, nodes: int = 1) -> Rebalanced:
    """Give every rank of a group about the same load: plan from the loads that layers counted, move
    experts between the ranks in place, and count from zero.

    layers: of this rank, made with balanced=True and expert parallelism over `group`; those of all
    ranks are alike. Loads of layers whose tokens are a rank's own are summed over the ranks. All
    ranks call it between the same two steps; the same loads give all the same plan. Addresses stay,
    so that compiled and captured forwards go on with the moved experts. Give one layer at a time
    where all at once would make the ranks wait too long.

    Returns what `rebalance` says. Raises ValueError for layers that cannot be rebalanced like this,
    and RuntimeError, naming the ranks, where ranks do not answer, have other layers, or hold other
    experts than each other think; then nothing was moved.
    """
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
    groups = layers[0].routing.n_group
    placement = layers[0].placement
    said = {
        "layers": len(layers), "E": layers[0].num_experts, "P": placement.num_physical,
        "shared": placement.shared, "groups": groups, "nodes": nodes,
        "own": sum(layer.exchange is not None for layer in layers),
    }  # fmt: skip
    said_by_all("rebalance_layers", said, found, device=layers[0].w13_weight.device)
    loads_LE, current_LP = _agreed(layers, found)
    done = rebalance(loads_LE, current_LP, ranks=found.size, nodes=nodes, num_groups=groups)
    for layer, moves, new_P in zip(layers, done.moves, done.physical_to_logical, strict=True):
        placement, loads = layer.placement, layer.loads
        assert layer.replicas is not None and loads is not None
        tensors = layer.expert_tensors()
        move_over_ranks(tensors, moves, placement.sizes, group, shared=placement.shared)
        layer.replicas.update_(ExpertReplicas.of(new_P, layer.num_experts))
        loads.zero_()
    return done


def _agreed(layers: Sequence[MoELayer], group: Group) -> tuple[Tensor, Tensor]:
    """The loads of all ranks, and the experts that all of them take to be where; on the CPU."""
    E, P = layers[0].num_experts, layers[0].placement.num_physical
    loads = torch.stack([layer.loads for layer in layers if layer.loads is not None])
    current = torch.stack([layer.physical_to_logical for layer in layers])
    mine = torch.cat((loads.long(), current.long()), 1)
    loads_RLE, current_RLP = all_gather(mine[None], group).cpu().split((E, P), -1)
    apart = [r for r in range(group.size) if not torch.equal(current_RLP[r], current_RLP[0])]
    if apart:
        raise RuntimeError(
            f"ranks {', '.join(map(str, apart))} of {group.name!r} take experts to be elsewhere "
            "than rank 0 does; rebalance all ranks together, from the same checkpoint"
        )
    own_L = torch.tensor([layer.exchange is not None for layer in layers])[:, None]
    # Replicated tokens were counted by every rank alike.
    return torch.where(own_L, loads_RLE.sum(0), loads_RLE[0]), current_RLP[0]
