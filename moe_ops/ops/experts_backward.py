"""The backward of the experts, but for the gradients of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import check_devices, check_size, check_tensor, wide
from moe_ops.ops.activate_backward import activate_backward, by_pair
from moe_ops.ops.combine import combine
from moe_ops.ops.expert_gemm import decode_weight, expert_gemm, of_rows, row_experts
from moe_ops.ops.experts import ExpertsCall, restored
from moe_ops.ops.experts import check as check_experts
from moe_ops.ops.experts_products import rows13_factor
from moe_ops.ops.experts_saving import LAYER
from moe_ops.registry.spec import op


@dataclass(slots=True)
class ExpertsBackwardCall:
    """The arguments of `experts_backward`: a gradient, what `experts_saving` kept, and its call."""

    grad_TD: Tensor
    y_RF: Tensor
    rows_R: Tensor
    ends_E: Tensor
    layer: ExpertsCall
    grad_y_RF: Tensor | None = None
    for_tokens: bool = True
    for_weights: bool = True

    FLAT: ClassVar[dict[str, str]] = {
        **{name: name for name in ("grad_TD", "y_RF", "rows_R", "ends_E")},
        **{name: f"layer.{name}" for name in LAYER},
        **{name: name for name in ("grad_y_RF", "for_tokens", "for_weights")},
    }


def check(call: ExpertsBackwardCall) -> None:
    """Raise ValueError or TypeError unless `experts_backward` takes these arguments."""
    layer, x_TD = call.layer, call.layer.x_TD
    check_experts(layer)
    T, K = layer.ids_TK.shape
    I = layer.widths[1]  # noqa: E741
    F = 2 * I if layer.gated else I
    pairs = "tokens times top-k of ids_TK"
    of_rows = {"y_RF": call.y_RF}
    if call.grad_y_RF is not None:
        of_rows["grad_y_RF"] = call.grad_y_RF
    for name, t in of_rows.items():
        check_tensor(name, t, 2, (x_TD.dtype,), "give what experts_saving gave")
        check_size(name, t, 0, T * K, pairs)
        check_size(name, t, 1, F, "the rows of one expert's first weight")
    check_tensor("grad_TD", call.grad_TD, 2, (x_TD.dtype,), "convert it to the dtype of x_TD")
    check_size("grad_TD", call.grad_TD, 0, T, "the tokens of x_TD")
    check_size("grad_TD", call.grad_TD, 1, x_TD.shape[1], "the width of x_TD")
    check_tensor("rows_R", call.rows_R, 1, (torch.int32,))
    check_size("rows_R", call.rows_R, 0, T * K, pairs)
    check_tensor("ends_E", call.ends_E, 1, (torch.int32,))
    check_size("ends_E", call.ends_E, 0, layer.w13_EFD.shape[0], "the experts of w13_EFD")
    check_devices(
        call.grad_TD, x_TD=x_TD, y_RF=call.y_RF, rows_R=call.rows_R, ends_E=call.ends_E,
        grad_y_RF=call.grad_y_RF,
    )  # fmt: skip


@op(check=check)
def experts_backward(call: ExpertsBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Differentiate `experts` by tokens and routing weights, and prepare the gradients of its
    weights. Returns (dx_TD, dweights_TK, dy_RF, wh_RI).

    grad_TD is the gradient by the result; y_RF, rows_R and ends_E are what `experts_saving` gave;
    grad_y_RF, if given, a gradient that y_RF itself got, as in a backward of a backward. With
    g the gradient of a row's token, t its token, w its routing weight and h = activate(y):

        dh = W2_e^T g      dy = w * dh * activate'(y)      dx_t = sum of the rows' W13_e^T dy
        dweights_tk = <dh, h> + <g, b2_e>                  wh = w * h

    of which `activate_backward` makes those of one row. The gradients of weights and biases are
    sums over an expert's rows, by `expert_wgrad`: of g and wh that of w2_EDI, of dy_RF and x_TD
    that of w13_EFD. dx_TD, dy_RF and wh_RI have x's dtype, dweights_TK that of weights_TK; unused
    rows are unspecified; a pair whose expert is not here has a gradient of 0. With for_tokens=False
    dx_TD is empty, [0, D]; with for_weights=False wh_RI is, [0, I].

    Quantised weights are decoded to x's dtype: gradients reach x_TD and weights_TK through every
    format, and never the codes.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices or parameters.
    """
    c = call.layer if not call.layer.layout else restored(call.layer)
    K, R, x_TD, ends_E = c.ids_TK.shape[1], call.rows_R.shape[0], c.x_TD, call.ends_E
    token_R = call.rows_R.clamp(min=0).long() // K
    g_RD = call.grad_TD[token_R]
    w2_EDI = float_weight(
        x_TD, c.w2_EDI, c.w2_scale_EDG, c.w2_zero_EDG, c.global_scale2_E, c.w_format
    )
    dh_RI = expert_gemm(g_RD, w2_EDI, ends_E, transposed=not c.transposed)
    dy_RF, wh_RI, dweights_TK = activate_backward(
        dh_RI, call.y_RF, c.weights_TK, call.rows_R, *c.activation, call.for_weights
    )
    if c.b2_ED is not None:
        b2_RD = wide(c.b2_ED)[row_experts(ends_E, R)]
        of_bias_R = (wide(g_RD) * b2_RD).sum(1)
        dweights_TK = dweights_TK + by_pair(of_bias_R, call.rows_R, c.weights_TK)
    if call.grad_y_RF is not None:
        dy_RF = dy_RF + call.grad_y_RF
    dx_TD = x_TD.new_empty(0, x_TD.shape[1])
    if call.for_tokens:
        w13_EFD = float_weight(
            x_TD, c.w13_EFD, c.w13_scale_EFG, c.w13_zero_EFG, rows13_factor(c), c.w_format
        )
        dx_RD = expert_gemm(dy_RF, w13_EFD, ends_E, transposed=not c.transposed)
        dx_TD = combine(dx_RD, torch.ones_like(c.weights_TK), call.rows_R)
    return dx_TD, dweights_TK.to(c.weights_TK.dtype), dy_RF, wh_RI


def float_weight(
    x_TD: Tensor,
    w_EFD: Tensor,
    scale_EFG: Tensor | None,
    zero_EFG: Tensor | None,
    global_scale: Tensor | None,
    format: str,
) -> Tensor:
    """A weight as the tokens' dtype has it: itself, or the values that its codes stand for."""
    if not format:
        return w_EFD
    decoded = decode_weight(w_EFD, scale_EFG, zero_EFG, format)
    if global_scale is not None:
        decoded = decoded * of_rows(global_scale)[..., None]
    return decoded.to(x_TD.dtype)


experts_backward.fake(fake_impls.experts_backward)
