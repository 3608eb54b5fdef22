"""How the experts with adapters are differentiated: a formula made of ops."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.ops.adapters import OF_ADAPTER, AdapterRows
from moe_ops.ops.expert_wgrad import ExpertWgradCall, expert_wgrad
from moe_ops.ops.experts_adapted import ExpertsAdaptedCall, experts_adapted
from moe_ops.ops.experts_adapted_backward import (
    ExpertsAdaptedBackwardCall,
    experts_adapted_backward,
)
from moe_ops.ops.experts_adapted_saving import ExpertsAdaptedSavingCall, experts_adapted_saving
from moe_ops.ops.gradients import (
    OF_LAYER,
    Grads,
    Order,
    first_weight_grads,
    refused_grads,
    second_weight_grads,
)
from moe_ops.registry.formulas import Formula, Gradients
from moe_ops.registry.gradients import grad_wanted


def _takes(call: ExpertsAdaptedCall) -> bool:
    """Whether gradients are wanted of nothing that is left to the definition."""
    if call.layer.x_format:
        return False
    given = experts_adapted.arguments.by_name(call)
    others = [t for name, t in given.items() if name not in (*OF_LAYER, *OF_ADAPTER)]
    return not grad_wanted(tuple(others), {})


def _forward(call: ExpertsAdaptedCall) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = experts_adapted_saving.part(
        ExpertsAdaptedSavingCall(call.layer, call.adapter)
    )
    return out


def _backward(
    call: ExpertsAdaptedCall, saved: list[Tensor], grads: Grads, wanted: frozenset[str]
) -> Gradients:
    y_RF, u13_Rr, wu2_Rr, rows_R, ends_E = saved
    grad_TD, grad_y_RF, *_ = grads
    c, adapter = call.layer, call.adapter
    if grad_TD is None and grad_y_RF is None:
        return {}
    saved.clear()
    if grad_TD is None:
        grad_TD = torch.zeros_like(c.x_TD)
    dx_TD, dweights_TK, dy_RF, wh_RI, v13_Rr, v2_Rr = experts_adapted_backward.part(
        ExpertsAdaptedBackwardCall(
            grad_TD, y_RF, rows_R, ends_E, c, adapter, grad_y_RF, for_tokens="x_TD" in wanted,
            for_weights=not wanted.isdisjoint(("w2_EDI", "a2_GrI", "b2_GDr")),
        )
    )  # fmt: skip
    del y_RF
    made: Gradients = {"weights_TK": dweights_TK}
    if "x_TD" in wanted:
        made["x_TD"] = dx_TD
    refused = refused_grads(c, grad_TD, wanted)
    made |= refused
    wanted -= refused.keys()
    order = Order(rows_R, ends_E, c.ids_TK.shape[1])
    made |= second_weight_grads(c, grad_TD, wh_RI, order, wanted)
    made |= first_weight_grads(c, dy_RF, order, wanted)
    if wanted.isdisjoint(OF_ADAPTER):
        return made

    rows = None
    if adapter.adapter_T is not None or torch.is_grad_enabled():
        rows = AdapterRows.of(adapter, rows_R, ends_E, order.K)
    if rows is not None and torch.is_grad_enabled():
        # What was saved is no function of x and A for a backward of this one.
        token_R = rows_R.clamp(min=0).long() // order.K
        if adapter.a13_GrD is not None:
            u13_Rr = rows.narrow(c.x_TD[token_R], adapter.a13_GrD)
        if adapter.a2_GrI is not None:
            wu2_Rr = rows.narrow(wh_RI, adapter.a2_GrI)
    of = _Sums(order, rows, adapter.scale_N.shape[0])
    if "a13_GrD" in wanted and adapter.a13_GrD is not None:
        made["a13_GrD"] = of.sums(v13_Rr, c.x_TD, b_of_tokens=True)
    if "b13_GFr" in wanted and adapter.b13_GFr is not None:
        made["b13_GFr"] = of.sums(dy_RF, u13_Rr)
    if "a2_GrI" in wanted and adapter.a2_GrI is not None:
        made["a2_GrI"] = of.sums(v2_Rr, wh_RI)
    if "b2_GDr" in wanted and adapter.b2_GDr is not None:
        made["b2_GDr"] = of.sums(grad_TD, wu2_Rr, a_of_tokens=True)
    return made


class _Sums:
    """The sums of outer products over the rows of each of N adapters' groups."""

    def __init__(self, order: Order, rows: AdapterRows | None, N: int) -> None:
        self.ends_G, self.token_R, self.N = order.ends_E, order.token_R, N
        self.row_R: Tensor | None = None
        if rows is not None and rows.order_R is not None:
            # Named rows are read where they are, in the order of groups.
            self.ends_G, self.row_R = rows.ends_G, rows.order_R.to(torch.int32)
            self.token_R = order.token_R[rows.order_R]

    def sums(
        self, a_RM: Tensor, b_RN: Tensor, *, a_of_tokens: bool = False, b_of_tokens: bool = False
    ) -> Tensor:
        """[G, M, N]; a or b may be those of tokens, of which a row has one."""
        a_rows_R = self.token_R if a_of_tokens else self.row_R
        b_rows_R = self.token_R if b_of_tokens else self.row_R
        call = ExpertWgradCall(a_RM, b_RN, self.ends_G, a_rows_R, b_rows_R)
        d_GMN: Tensor = expert_wgrad.part(call)
        if self.row_R is not None or self.N == 1:
            return d_GMN
        E, M, width = d_GMN.shape  # without an index all tokens have the first adapter
        return torch.cat([d_GMN, d_GMN.new_zeros((self.N - 1) * E, M, width)])


experts_adapted.differentiated(Formula(takes=_takes, forward=_forward, backward=_backward))
