"""Dispatch: copy each token once per chosen expert, sorted by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import (
    FLOATS,
    FLOATS_OR_DOUBLE,
    INDICES,
    check_devices,
    check_size,
    check_tensor,
)
from moe_ops.fake_impls.formats import ELEMENTS
from moe_ops.registry.spec import op

MOST_EXPERTS = 2**31 - 1  # an id is at most an int32


@dataclass(slots=True)
class DispatchCall:
    """The arguments of `dispatch`."""

    x_TD: Tensor
    ids_TK: Tensor
    num_experts: int
    expert_map: Tensor | None = None


def row_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes of rows. They may be quantised before they are copied: there are T of them instead
    of R.
    """
    codes = (storage.dtype for storage in ELEMENTS.values())
    return tuple(dict.fromkeys((*FLOATS_OR_DOUBLE, *codes)))


def check(call: DispatchCall) -> None:
    """Raise ValueError or TypeError unless `dispatch` takes these arguments."""
    x_TD, ids_TK, expert_map = call.x_TD, call.ids_TK, call.expert_map
    num_experts = call.num_experts
    if (
        expert_map is None
        and x_TD.dim() == ids_TK.dim() == 2
        and x_TD.dtype in FLOATS
        and ids_TK.dtype in INDICES
        and ids_TK.shape[0] == x_TD.shape[0]
        and ids_TK.shape[1] > 0 < num_experts <= MOST_EXPERTS
        and ids_TK.device == x_TD.device
    ):
        return  # the common call, accepted in half a microsecond
    check_tensor("x_TD", x_TD, 2, row_dtypes())
    check_tensor("ids_TK", ids_TK, 2, INDICES)
    check_size("ids_TK", ids_TK, 0, x_TD.shape[0], "the tokens of x_TD")
    if ids_TK.shape[1] < 1:
        raise ValueError(
            f"ids_TK must name at least one expert a token, got shape {tuple(ids_TK.shape)}"
        )
    check_num_experts(num_experts)
    if expert_map is not None:
        check_tensor("expert_map", expert_map, 1, INDICES)
        if expert_map.shape[0] < 1:
            raise ValueError(
                "expert_map is empty; it must hold a local id, or -1, for each global expert"
            )
    check_devices(x_TD, ids_TK=ids_TK, expert_map=expert_map)


def check_num_experts(num_experts: int) -> None:
    """Raise ValueError unless there can be so many experts."""
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    if num_experts > MOST_EXPERTS:
        raise ValueError(f"num_experts={num_experts} must be at most {MOST_EXPERTS}")


@op(check=check)
def dispatch(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the (token, choice) pairs by expert. Returns (x_RD, rows_R, ends_E), with R = T * K.

        x_RD[r] = x_TD[rows_R[r] // K]      rows of one expert are adjacent, in order of pair
        rows_R[r]                           the pair t * K + k in row r; -1 for an unused row
        ends_E[e]                           one past the last row of expert e; expert e starts at
        ends_E[e-1]

    With an expert_map (global id -> local id, or -1 for an expert of another rank) the ids in
    ids_TK are global. Ids below 0, or not below num_experts (after the map), mean "not here":
    their pairs come after ends_E[-1], have rows_R = -1, and what x_RD holds there is unspecified. T
    = 0 gives empty rows, zero ends.

    x_TD: [T, D], floats or the values of `quantize`; ids_TK: int32 or int64 [T, K]; expert_map:
    int32 or int64 [global experts]. rows_R and ends_E are int32. Raises ValueError or TypeError for
    wrong shapes, dtypes or devices.
    """
    x_TD, K, num_experts = call.x_TD, call.ids_TK.shape[1], call.num_experts
    ids_R = local_ids(call.ids_TK, num_experts, call.expert_map)
    sorted_R, order_R = ids_R.sort(stable=True)
    x_RD = x_TD[order_R // K]
    rows_R = torch.where(sorted_R < num_experts, order_R, -1).to(torch.int32)
    experts_E = torch.arange(num_experts, device=x_TD.device)
    ends_E = torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True)
    return x_RD, rows_R, ends_E


def local_ids(ids_TK: Tensor, num_experts: int, expert_map: Tensor | None) -> Tensor:
    """The expert of each pair on this rank as int64 [R]; num_experts stands for "not here"."""
    ids = ids_TK.reshape(-1).long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        mapped = expert_map.long()[ids.clamp(0, expert_map.shape[0] - 1)]
        ids = torch.where(known, mapped, -1)
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)


dispatch.fake(fake_impls.dispatch)
