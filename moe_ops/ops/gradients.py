"""How expert products, and the layer of them, are differentiated: formulas made of ops. With
adapters: `gradients_adapted.py`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.ops.expert_gemm import ExpertGemmCall, expert_gemm, used_rows
from moe_ops.ops.expert_wgrad import ExpertWgradCall, expert_wgrad, rows_of
from moe_ops.ops.expert_wgrad_onto import expert_wgrad_onto
from moe_ops.ops.experts import ExpertsCall, experts, weights_of
from moe_ops.ops.experts_accumulating import ExpertsAccumulatingCall, experts_accumulating
from moe_ops.ops.experts_backward import ExpertsBackwardCall, experts_backward, float_weight
from moe_ops.ops.experts_saving import ExpertsSavingCall, experts_saving
from moe_ops.registry.formulas import Formula, Gradients, wants
from moe_ops.registry.gradients import undefined_gradient
from moe_ops.registry.layouts import no_gradient

Grads = tuple[Tensor | None, ...]
# Scales of codes that are trained, and what rounds inputs, are left to the definitions.
OF_GEMM = ("x_RD", "w_EFD", "bias_EF")
OF_LAYER = ("x_TD", "weights_TK", "w13_EFD", "w2_EDI", "b13_EF", "b2_ED")


def bias_grad(
    g_RF: Tensor, ends_E: Tensor, rows_R: Tensor | None, factor_R1: Tensor, bias_EF: Tensor
) -> Tensor:
    """The sum of each expert's rows of g times their factors, in the bias's dtype."""
    same = bias_EF.dtype is g_RF.dtype
    dtype = "" if same else str(bias_EF.dtype).removeprefix("torch.")
    return expert_wgrad(g_RF, factor_R1, ends_E, rows_R, out_dtype=dtype)[..., 0]


def weight_grad(
    a_RM: Tensor,
    b_RN: Tensor,
    ends_E: Tensor,
    a_rows_R: Tensor | None = None,
    b_rows_R: Tensor | None = None,
    *,
    transposed: bool,
    main_grad: Tensor | None = None,
) -> Tensor | None:
    """The gradient of a weight by which b was multiplied: [E, M, N], or [E, N, M] if transposed.
    None if it was added to a main_grad."""
    if transposed:
        a_RM, b_RN, a_rows_R, b_rows_R = b_RN, a_RM, b_rows_R, a_rows_R
    if main_grad is not None:
        expert_wgrad_onto(a_RM, b_RN, ends_E, main_grad, a_rows_R, b_rows_R)
        return None
    made: Tensor = expert_wgrad.part(ExpertWgradCall(a_RM, b_RN, ends_E, a_rows_R, b_rows_R))
    return made


def _takes_gemm(call: ExpertGemmCall) -> bool:
    return not call.x_format and wants(call, OF_GEMM)


def _gemm(call: ExpertGemmCall) -> tuple[Tensor]:
    return (expert_gemm.part(call),)


def _gemm_backward(
    call: ExpertGemmCall, saved: list[Tensor], grads: Grads, wanted: frozenset[str]
) -> Gradients:
    x_RD, ends_E, (grad_RF,), made = call.x_RD, call.ends_E, grads, Gradients()
    if grad_RF is None:
        return made
    g_RF = grad_RF.to(x_RD.dtype)
    if "x_RD" in wanted:
        w_EFD = float_weight(
            x_RD, call.w_EFD, call.w_scale_EFG, call.w_zero_EFG, call.global_scale_E, call.w_format
        )
        dx_RD = expert_gemm(g_RF, w_EFD, ends_E, transposed=not call.transposed)
        made["x_RD"] = rows_of(dx_RD, None, used_rows(ends_E, dx_RD.shape[0]))
    if "w_EFD" in wanted and call.w_format:
        made["w_EFD"] = _of_codes(grad_RF, call, "w_EFD")
    elif "w_EFD" in wanted:
        made["w_EFD"] = weight_grad(g_RF, x_RD, ends_E, transposed=call.transposed)
    if "bias_EF" in wanted and call.bias_EF is not None:
        ones_R1 = g_RF.new_ones(g_RF.shape[0], 1)
        made["bias_EF"] = bias_grad(g_RF, ends_E, None, ones_R1, call.bias_EF)
    return made


def _wgrad(call: ExpertWgradCall) -> tuple[Tensor]:
    return (expert_wgrad.part(call),)


def _wgrad_backward(
    call: ExpertWgradCall, saved: list[Tensor], grads: Grads, wanted: frozenset[str]
) -> Gradients:
    ends_E, (grad_EMN,), made = call.ends_E, grads, Gradients()
    if grad_EMN is None:
        return made
    g_EMN = grad_EMN.to(call.a_RM.dtype)
    used_R = used_rows(ends_E, call.rows)
    if "a_RM" in wanted:
        b_RN = rows_of(call.b_RN, call.b_rows_R, used_R)
        da_RM = expert_gemm(b_RN, g_EMN, ends_E)
        made["a_RM"] = _scattered(da_RM, call.a_RM, call.a_rows_R, used_R)
    if "b_RN" in wanted:
        a_RM = rows_of(call.a_RM, call.a_rows_R, used_R)
        db_RN = expert_gemm(a_RM, g_EMN, ends_E, transposed=True)
        made["b_RN"] = _scattered(db_RN, call.b_RN, call.b_rows_R, used_R)
    return made


def _scattered(d_RN: Tensor, of: Tensor, rows_R: Tensor | None, used_R: Tensor) -> Tensor:
    """The gradient of the rows that were read, from that of each reading."""
    d_RN = rows_of(d_RN, None, used_R)
    if rows_R is None:
        return d_RN
    return torch.zeros_like(of).index_add(0, torch.where(used_R, rows_R, 0), d_RN)


def _takes_layer(call: ExpertsCall) -> bool:
    return not call.x_format and not call.out_dtype and wants(call, OF_LAYER)


def _layer(call: ExpertsCall) -> tuple[Tensor, ...]:
    out: tuple[Tensor, ...] = experts_saving.part(ExpertsSavingCall(call))
    return out


def _layer_backward(
    call: ExpertsCall,
    saved: list[Tensor],
    grads: Grads,
    wanted: frozenset[str],
    main_grad13_EFD: Tensor | None = None,
    main_grad2_EDI: Tensor | None = None,
) -> Gradients:
    (y_RF, rows_R, ends_E), (grad_TD, grad_y_RF, *_) = saved, grads
    if grad_TD is None and grad_y_RF is None:
        return {}
    saved.clear()
    if grad_TD is None:
        grad_TD = torch.zeros_like(call.x_TD)
    dx_TD, dweights_TK, dy_RF, wh_RI = experts_backward.part(
        ExpertsBackwardCall(
            grad_TD, y_RF, rows_R, ends_E, call, grad_y_RF,
            for_tokens="x_TD" in wanted, for_weights="w2_EDI" in wanted,
        )
    )  # fmt: skip
    del y_RF  # before the gradients of weights are made
    made: Gradients = {"weights_TK": dweights_TK}
    if "x_TD" in wanted:
        made["x_TD"] = dx_TD
    refused = refused_grads(call, grad_TD, wanted)
    made |= refused
    wanted -= refused.keys()
    order = Order(rows_R, ends_E, call.ids_TK.shape[1])
    made |= second_weight_grads(call, grad_TD, wh_RI, order, wanted, main_grad2_EDI)
    del wh_RI  # before the gradient of the larger weight is made
    return made | first_weight_grads(call, dy_RF, order, wanted, main_grad13_EFD)


@dataclass(frozen=True)
class Order:
    """How rows are sorted by expert: the pair of token and choice in each, one past the last row of
    each expert, and K, the choices of a token."""

    rows_R: Tensor
    ends_E: Tensor
    K: int

    @functools.cached_property
    def token_R(self) -> Tensor:
        """The token of each row."""
        return self.rows_R // self.K


def second_weight_grads(
    call: ExpertsCall, grad_TD: Tensor, wh_RI: Tensor, order: Order, wanted: frozenset[str],
    main_grad: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of the second weight and its bias, of those that are wanted."""
    made: Gradients = {}
    if "w2_EDI" in wanted:
        made["w2_EDI"] = weight_grad(
            grad_TD, wh_RI, order.ends_E, a_rows_R=order.token_R, transposed=call.transposed,
            main_grad=main_grad,
        )  # fmt: skip
    if "b2_ED" in wanted and call.b2_ED is not None:
        weight_R = call.weights_TK.reshape(-1)[order.rows_R.clamp(min=0)].to(call.x_TD.dtype)
        rows = order.ends_E, order.token_R
        made["b2_ED"] = bias_grad(grad_TD, *rows, weight_R[:, None], call.b2_ED)
    return made


def first_weight_grads(
    call: ExpertsCall, dy_RF: Tensor, order: Order, wanted: frozenset[str],
    main_grad: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """The gradients of the first weight and its bias, of those that are wanted."""
    made: Gradients = {}
    if "w13_EFD" in wanted:
        made["w13_EFD"] = weight_grad(
            dy_RF, call.x_TD, order.ends_E, b_rows_R=order.token_R, transposed=call.transposed,
            main_grad=main_grad,
        )  # fmt: skip
    if "b13_EF" in wanted and call.b13_EF is not None:
        ones_R1 = dy_RF.new_ones(dy_RF.shape[0], 1)
        made["b13_EF"] = bias_grad(dy_RF, order.ends_E, None, ones_R1, call.b13_EF)
    return made


def _accumulating(call: ExpertsAccumulatingCall) -> tuple[Tensor, ...]:
    return _layer(call.layer)


def _accumulating_backward(
    call: ExpertsAccumulatingCall,
    saved: list[Tensor],
    grads: Grads,
    wanted: frozenset[str],
) -> Gradients:
    if torch.is_grad_enabled():
        raise ValueError(
            "a backward that adds to main_grad has no gradient itself; leave out "
            "create_graph=True, or train these experts without main_grad"
        )
    return _layer_backward(
        call.layer, saved, grads, wanted, call.main_grad13_EFD, call.main_grad2_EDI
    )


def refused_grads(call: ExpertsCall, grad_TD: Tensor, wanted: frozenset[str]) -> Gradients:
    """What raises in place of gradients of codes, and of weights that a layout reorders."""
    weights = weights_of(call)
    made: Gradients = {}
    if call.w_format:
        made = {name: _of_codes(grad_TD, call, name) for name in wanted & {"w13_EFD", "w2_EDI"}}
    if call.layout and not wanted.isdisjoint(weights):
        for name in wanted & experts.layouts[call.layout].restore(weights).keys():
            reason = no_gradient(name, call.layout)
            made[name] = undefined_gradient(grad_TD, weights[name], reason)
    return made


def _of_codes(grad_TD: Tensor, call: ExpertsCall | ExpertGemmCall, name: str) -> Tensor:
    """In place of the gradient of a weight whose codes are of a float dtype."""
    reason = (
        f"{name} holds codes of {call.w_format!r}, which have no gradient; freeze them by "
        "requires_grad_(False), or train a plain weight that moe_ops.fake_quantize rounds"
    )
    return undefined_gradient(grad_TD, getattr(call, name), reason)


expert_gemm.differentiated(Formula(takes=_takes_gemm, forward=_gemm, backward=_gemm_backward))
expert_wgrad.differentiated(
    Formula(takes=lambda call: True, forward=_wgrad, backward=_wgrad_backward)
)
experts.differentiated(Formula(takes=_takes_layer, forward=_layer, backward=_layer_backward))
experts_accumulating.differentiated(
    Formula(
        takes=lambda call: True,
        forward=_accumulating,
        backward=_accumulating_backward,
        writes=("main_grad13_EFD", "main_grad2_EDI"),
    )
)
