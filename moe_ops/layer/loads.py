"""How often the experts of all layers are chosen, over all ranks: one view of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.checks.options import check_type
from moe_ops.layer.module import MoELayer
from moe_ops.parallel.load_balance import imbalance_of
from moe_ops.ranks.agree import CPU, said_together
from moe_ops.ranks.groups import Group, all_gather

Layers = nn.Module | Mapping[str, MoELayer] | Sequence[MoELayer]
WANTED = "a model, MoELayers by their names, or several of them"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelLoads:
    """The pairs of a token and a chosen expert that the layers of a model counted, of all ranks.

    layers: their names, in the order of the axis L. logical_LE and physical_LP: int64, pairs by
    what the expert computes and by where it lies; experts_LP: int64, what each physical expert
    computes. slots: how many physical experts each rank holds, one rank after the other;
    of one entry where each holds a shard of all. Tensors are on the CPU, and alike on all ranks.
    """

    layers: tuple[str, ...]
    logical_LE: Tensor
    physical_LP: Tensor
    experts_LP: Tensor
    slots: tuple[int, ...]

    @property
    def logical_E(self) -> Tensor:
        """The pairs of each logical expert in all layers."""
        return self.logical_LE.sum(0)

    @property
    def physical_P(self) -> Tensor:
        """The pairs of each physical expert in all layers."""
        return self.physical_LP.sum(0)

    @property
    def ranks_LN(self) -> Tensor:
        """The pairs that each rank computes in each layer: int64 [L, ranks]."""
        return torch.stack([part.sum(1) for part in self.physical_LP.split(self.slots, 1)], 1)

    @property
    def imbalance_L(self) -> Tensor:
        """The highest load of a rank over the mean one, as it was: float64 [L], at least 1."""
        return imbalance_of(self.ranks_LN)

    def as_json(self) -> dict[str, Any]:
        """What `json.dumps` takes: names, loads by layer and of all layers, and the imbalance."""
        return {
            "layers": list(self.layers), "slots": list(self.slots),
            "logical": self.logical_LE.tolist(), "physical": self.physical_LP.tolist(),
            "physical_to_logical": self.experts_LP.tolist(),
            "logical_of_all_layers": self.logical_E.tolist(),
            "physical_of_all_layers": self.physical_P.tolist(),
            "ranks": self.ranks_LN.tolist(), "imbalance": self.imbalance_L.tolist(),
        }  # fmt: skip


@torch.no_grad()
def model_loads(layers: Layers, group: str = "") -> ModelLoads:
    """The loads that layers counted since they were made, rebalanced or sampled, of all ranks.

    layers: a model, of which all `MoELayer` with balanced=True are taken, or such layers by their
    names or in order. group: of the ranks that share each of them; "" for one rank. Every rank
    calls it between the same two steps, and the host waits for the device. Tokens that several
    ranks are given count once.

    Raises, on every rank, TypeError or ValueError for layers that count nothing, have no memory,
    have other numbers of experts than each other, are shards here and whole experts there, are
    given twice, or are not shared by this group; RuntimeError, naming the ranks, where ranks do not
    answer, have other layers, or take experts to be elsewhere.
    """
    ranks, found = Group.of(group), dict[str, MoELayer]()
    try:
        found = named_layers(layers)
        check_shared(found, ranks)
    except (TypeError, ValueError) as error:
        said_together("model_loads", {}, ranks, error, device=device_of([*found.values()]))
    return gathered(found, ranks)


def named_layers(layers: Layers) -> dict[str, MoELayer]:
    """The layers that count loads, by name. Raises TypeError or ValueError where there are none."""
    check_type("layers", layers, (nn.Module, Mapping, Sequence), WANTED)
    if isinstance(layers, nn.Module):
        every = ((name, m) for name, m in layers.named_modules() if isinstance(m, MoELayer))
        found = {name: m for name, m in every if m.loads is not None}
    elif isinstance(layers, Mapping):
        found = {str(name): m for name, m in layers.items()}
    else:
        found = {str(i): m for i, m in enumerate(layers)}
    for name, m in found.items():
        check_type(f"layer {name!r}", m, MoELayer, "a MoELayer")
        if m.loads is None:
            raise ValueError(f"layer {name!r} counts no loads; make it with balanced=True")
        if m.loads.is_meta:
            raise ValueError(
                f"layer {name!r} is on the meta device; give it memory first: "
                "layer.to_empty(device=...), then layer.reset_parameters()"
            )
    if not found:
        raise ValueError("there is no MoELayer that counts loads; make some with balanced=True")
    if len({(m.num_experts, m.placement.sizes) for m in found.values()}) != 1:
        raise ValueError(
            "layers must have as many experts each, logical and physical ones, and all of them "
            "shards or whole experts; give others apart"
        )
    if len({id(m) for m in found.values()}) != len(found):
        raise ValueError("a layer is given twice, and would count twice; give each once")
    return found


def check_shared(layers: Mapping[str, MoELayer], group: Group) -> None:
    """Raise ValueError unless these are the ranks that share each of the layers."""
    for name, m in layers.items():
        config = m.parallel
        if (config.size, config.rank) != (group.size, group.rank):
            raise ValueError(
                f"layer {name!r} is {config.describe()}, but group={group.name!r} has "
                f"{group.size} ranks, of which this is {group.rank}; give the group of the ranks "
                "that share the layer"
            )


def gathered(layers: Mapping[str, MoELayer], group: Group) -> ModelLoads:
    """`model_loads` of named layers that the ranks of the group share. Raises as it does."""
    first = next(iter(layers.values()))
    E, P, R = first.num_experts, first.placement.num_physical, group.size
    sharers = [_sharers(m) for m in layers.values()]
    device = first.w13_weight.device  # that of others may be another one
    said = {"layers": len(layers), "E": E, "P": P, "sharers": sum(sharers)}
    said_together("model_loads", said, group, None, device=device)
    mine = [torch.cat(_counted(m)).to(device) for m in layers.values()]
    every_RLN = all_gather(torch.stack(mine)[None], group).cpu()
    logical_RLE, physical_RLP, experts_RLP = every_RLN.split((E, P, P), -1)
    apart = [r for r in range(R) if not torch.equal(experts_RLP[r], experts_RLP[0])]
    if apart:
        raise RuntimeError(
            f"ranks {', '.join(map(str, apart))} of {group.name!r} take experts to be elsewhere "
            "than rank 0 does; rebalance all ranks together, from the same checkpoint"
        )
    sharers_L1 = torch.tensor([n or R for n in sharers])[:, None]
    return ModelLoads(
        layers=tuple(layers),
        logical_LE=logical_RLE.sum(0) // sharers_L1,
        physical_LP=physical_RLP.sum(0) // sharers_L1,
        experts_LP=experts_RLP[0],
        slots=first.placement.sizes,
    )


def device_of(layers: Sequence[Any]) -> torch.device:
    """Where the layers are, if these are some."""
    return next((m.w13_weight.device for m in layers if isinstance(m, MoELayer)), CPU)


def count_anew(layers: Sequence[MoELayer]) -> None:
    """Set the loads of layers to zero, in place."""
    for layer in layers:
        for t in (layer.loads, layer.physical_loads):
            if t is not None:
                with torch.inference_mode(t.is_inference()):  # in which some layers are made
                    t.zero_()


def _counted(layer: MoELayer) -> list[Tensor]:
    """What a layer counted, and what its physical experts compute."""
    assert layer.loads is not None and layer.physical_loads is not None
    return [layer.loads, layer.physical_loads, layer.physical_to_logical]


def _sharers(layer: MoELayer) -> int:
    """How many ranks count each token: 0 for all of them."""
    return 0 if layer.exchange is None else layer.exchange.sharers
