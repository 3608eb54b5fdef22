"""What one load has brought to a layer so far, and what it worked out once for many tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.weights.global_scales import GlobalScales
from moe_ops.weights.layouts import Coding
from moe_ops.weights.names import PARAMETERS
from moe_ops.weights.order import Orders
from moe_ops.weights.shards import ShardPlan, plan

# What goes where: a view of the layer's tensor, and what is to be copied to it.
Writes = Iterable[tuple[Tensor, Tensor]]
# Names of parameters: what they are of the first weight (False) or of the second (True).
WEIGHTS = {
    name: (part, second)
    for part, names in PARAMETERS.items()
    for second, name in zip((False, True), names, strict=True)
}
PARAMETER_NAMES = tuple(WEIGHTS)


@dataclass(eq=False, slots=True)
class LoadRecord:
    """What one load of a checkpoint has brought to one layer so far.

    Some numbers of a layer serve several tensors of a checkpoint, which must agree: the record
    remembers them. Make one per layer and load, and pass it to every `load_expert` of it; experts
    must not change their places meanwhile.
    """

    # By parameter, logical expert and shard: the entry it came from, also if it lives elsewhere.
    seen: dict[tuple[str, int, str], str] = field(default_factory=dict)
    # By parameter and logical expert: the number that serves gate and up, and its entry.
    shared: dict[tuple[str, int], tuple[Tensor, str]] = field(default_factory=dict)
    # By parameter and logical expert: the largest scale of its input; of all experts by None.
    inputs: dict[tuple[str, int | None], Tensor] = field(default_factory=dict)
    # Second-level scales, where those of gate and up may differ until all entries are known.
    global_scales: GlobalScales | None = None
    # What is the same for every expert, worked out once.
    plans: dict[tuple[object, ...], ShardPlan] = field(default_factory=dict)
    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)

    def slots_of(self, layer: MoELayer, expert: int) -> tuple[int, ...]:
        """The slots that hold an expert, asked of the layer once."""
        if expert not in self.slots:
            self.slots[expert] = slots_of(layer, expert)
        return self.slots[expert]

    def plan_of(
        self,
        layer: MoELayer,
        parameter: str,
        shard: str,
        coding: Coding,
        interleaved: bool,
        sharded: bool,
    ) -> ShardPlan:
        """`plan` for a parameter that the layer holds, asked once."""
        part, _ = WEIGHTS[parameter]
        options = (parameter, part, shard, coding, interleaved, sharded, self.orders.some)
        key = (*options, getattr(layer, parameter).data_ptr())  # other memory, if it moved
        if key not in self.plans:
            self.plans[key] = plan(layer, *options)
        return self.plans[key]


def slots_of(layer: MoELayer, expert: int) -> tuple[int, ...]:
    """The slots of this rank that hold a logical expert: none if it lives elsewhere, several if it
    has replicas. Fused shared experts follow the routed ones, from num_experts on.
    """
    placement = layer.placement
    known = layer.num_experts + placement.shared
    if not 0 <= expert < known:
        raise ValueError(f"expert {expert} does not exist: the layer has {known}")
    if expert >= layer.num_experts:
        return (placement.num_local + expert - layer.num_experts,)
    replicas = layer.replicas
    physical = (expert,) if replicas is None else replicas.physical_of(expert)
    found = (placement.local_id(p) for p in physical)
    return tuple(slot for slot in found if slot >= 0)
