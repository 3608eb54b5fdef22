"""Expert loads: how many (token, choice) pairs each expert got."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import INDICES, check_devices, check_tensor
from moe_ops.ops.dispatch import check_num_experts, local_ids
from moe_ops.registry.spec import op


@dataclass(slots=True)
class ExpertLoadsCall:
    """The arguments of `expert_loads`."""

    ids_TK: Tensor
    num_experts: int
    expert_map: Tensor | None = None


def check(call: ExpertLoadsCall) -> None:
    """Raise ValueError or TypeError unless `expert_loads` takes these arguments."""
    expert_map = call.expert_map
    check_tensor("ids_TK", call.ids_TK, 2, INDICES)
    check_num_experts(call.num_experts)
    if expert_map is not None:
        check_tensor("expert_map", expert_map, 1, INDICES)
        if expert_map.shape[0] < 1:
            raise ValueError("expert_map is empty; it must hold an id, or -1, for each expert")
        check_devices(call.ids_TK, expert_map=expert_map)


def counts(call: ExpertLoadsCall) -> str:
    """The arithmetic of any backend: sums of integers, which are exact."""
    return "exact counts"


@op(check=check, arithmetic=counts)
def expert_loads(call: ExpertLoadsCall) -> Tensor:
    """Count the pairs of each expert: loads_e = |{(t, k) : ids_TK[t, k] = e}|, int64
    [num_experts].

    With an expert_map the ids are mapped first, as in `dispatch`: with physical ids and the map of
    physical to logical experts, the result is the loads of the logical ones. Ids below 0, or not
    below num_experts (after the map), are not counted. A layer adds the result to a buffer in
    place; nothing here waits for the device, so captured graphs go on counting.

    ids_TK: int32 or int64 [T, K]; expert_map: int32 or int64 [ids]. Raises ValueError or
    TypeError for wrong shapes, dtypes or devices.
    """
    E = call.num_experts
    ids_R = local_ids(call.ids_TK, E, call.expert_map)
    return ids_R.new_zeros(E + 1).scatter_add(0, ids_R, ids_R.new_ones(ids_R.shape))[:E]


expert_loads.fake(fake_impls.expert_loads)
