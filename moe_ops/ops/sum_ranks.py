"""The sum of the ranks' parts, where all ranks have the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import check_float
from moe_ops.ranks.agree import Values, require_alike
from moe_ops.ranks.groups import Group, all_gather, all_to_all, sum_in_order
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.spec import op
from moe_ops.registry.watched import readable


@dataclass(slots=True)
class SumRanksCall:
    """The arguments of `sum_ranks`."""

    part_TD: Tensor
    group: str = ""


def check(call: SumRanksCall) -> None:
    """Raise ValueError or TypeError unless `sum_ranks` takes these arguments."""
    check_float("part_TD", call.part_TD, 2)
    Group.of(call.group)


IN_ORDER = "float32 in the order of ranks"


def in_order(call: SumRanksCall) -> str:
    """The arithmetic of a sum in the order of ranks."""
    return IN_ORDER


@op(check=check, arithmetic=in_order)
def sum_ranks(call: SumRanksCall) -> Tensor:
    """Add the parts of all ranks: out_TD = sum_r part_TD of rank r, the same bits on every rank.

    The sum is taken in float32, in the order of ranks, and rounded to the parts' dtype once. Each
    rank adds a share of the tokens, and the shares are gathered. On GPUs that store to each other's
    memory (`moe_ops/ranks/peers.py`) each adds the parts of all instead, where that is faster.

    part_TD: float [T, D], of the same shape on every rank; group: the name of a process group, ""
    for this process alone. Gradients are those of the sum of all ranks' losses. Raises ValueError
    or TypeError for wrong shapes, dtypes or a group that is none; and RuntimeError on every rank
    for ranks that differ or do not answer.
    """
    part_TD, group = call.part_TD, Group.of(call.group)
    T, R = part_TD.shape[0], group.size
    if R == 1:
        return part_TD.clone()
    if readable(part_TD):
        dtype, grad = str(part_TD.dtype), needs_grad(part_TD)
        values: Values = {"D": part_TD.shape[1], "dtype": dtype, "gradients": grad}
        require_alike("sum_ranks", values, group, T, T)
    share = (T + R - 1) // R
    parts = F.pad(part_TD, (0, 0, 0, share * R - T))
    mine = all_to_all(parts, [share] * R, [share] * R, group).unflatten(0, (R, share))
    return all_gather(sum_in_order(mine), group)[:T].contiguous()


sum_ranks.fake(fake_impls.sum_ranks)
