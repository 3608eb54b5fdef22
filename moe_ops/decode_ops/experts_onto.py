"""`experts` added to a residual as one op on a GPU; `passes/fuse_residual.py` calls it.

No stage of a Mixture-of-Experts layer, so not in the registry of those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends.triton import run_experts
from moe_ops.ops.experts import ExpertsCall, experts

PLANS = ("triton.tiny", "triton.rows", "triton.grouped")


@torch.library.custom_op(
    "moe_ops::experts_onto", mutates_args=(), tags=(torch.Tag.needs_exact_strides,)
)
def experts_onto(
    residual_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None,
    b2_ED: Tensor | None,
    expert_map: Tensor | None,
    transposed: bool,
    kind: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    up_shift: float,
    plan: str,
) -> Tensor:
    """residual + experts(x, ...), of which the second is rounded before they are added.

    On a GPU the last launch of the plan, one of PLANS, adds; the other arguments are such that this
    backend of `experts` takes them. Raises ValueError for another plan, and for a residual that is
    not as x_TD is.
    """
    _check(residual_TD, x_TD)
    if plan not in PLANS:
        raise ValueError(f"experts_onto: the plan is {plan!r}, not one of {', '.join(PLANS)}")
    tensors = (x_TD, weights_TK, experts_TK, w13_EFD, w2_EDI, b13_EF, b2_ED, expert_map)
    act = (kind, gated, interleaved, alpha, limit, up_shift)
    if x_TD.is_cuda:
        call = ExpertsCall(*tensors, transposed, *act)
        return run_experts(plan.removeprefix("triton."), call, residual_TD)
    return residual_TD + experts(*tensors, transposed, *act)


@experts_onto.register_fake
def _(residual_TD: Tensor, x_TD: Tensor, *rest: object) -> Tensor:
    _check(residual_TD, x_TD)
    return x_TD.new_empty(x_TD.shape)


def _check(residual_TD: Tensor, x_TD: Tensor) -> None:
    kinds = [(tuple(t.shape), t.dtype, t.device) for t in (residual_TD, x_TD)]
    if kinds[0] != kinds[1]:
        said = ["{} of {} on {}".format(*kind) for kind in kinds]
        raise ValueError(f"experts_onto: the residual is {said[0]}, x_TD {said[1]}; convert one")
