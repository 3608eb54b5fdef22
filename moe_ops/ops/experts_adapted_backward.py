"""The backward of the experts with adapters, but for the gradients of weights and of adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import wide
from moe_ops.ops.activate_backward import activate_backward, by_pair
from moe_ops.ops.adapters import Adapter, AdapterRows, check_adapter, flat
from moe_ops.ops.combine import combine
from moe_ops.ops.expert_gemm import expert_gemm, row_experts
from moe_ops.ops.experts import ExpertsCall, restored
from moe_ops.ops.experts_backward import ExpertsBackwardCall, float_weight
from moe_ops.ops.experts_backward import check as check_backward
from moe_ops.ops.experts_products import rows13_factor
from moe_ops.ops.experts_saving import LAYER
from moe_ops.registry.spec import op

SAVED = ("grad_TD", "y_RF", "rows_R", "ends_E")
WANTED = ("grad_y_RF", "for_tokens", "for_weights")


@dataclass(slots=True)
class ExpertsAdaptedBackwardCall:
    """The arguments of `experts_adapted_backward`: those of `experts_backward`, and adapters."""

    grad_TD: Tensor
    y_RF: Tensor
    rows_R: Tensor
    ends_E: Tensor
    layer: ExpertsCall
    adapter: Adapter
    grad_y_RF: Tensor | None = None
    for_tokens: bool = True
    for_weights: bool = True

    FLAT: ClassVar[dict[str, str]] = {
        **{name: name for name in SAVED},
        **flat(LAYER),
        **{name: name for name in WANTED},
    }


def check(call: ExpertsAdaptedBackwardCall) -> None:
    """Raise ValueError or TypeError unless `experts_adapted_backward` takes these arguments."""
    c = call
    check_backward(ExpertsBackwardCall(c.grad_TD, c.y_RF, c.rows_R, c.ends_E, c.layer, c.grad_y_RF))
    check_adapter(c.adapter, c.layer)


@op(check=check)
def experts_adapted_backward(
    call: ExpertsAdaptedBackwardCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Differentiate `experts_adapted` by tokens and routing weights, and prepare the gradients of
    its weights and adapters. Returns (dx_TD, dweights_TK, dy_RF, wh_RI, v13_Rr, v2_Rr).

    As `experts_backward` does, whose arguments it takes, with adapters behind the weights. With g
    the gradient of a row's token, t its token, w its routing weight, h = activate(y) and s the
    factor of its adapter:

        v2 = s B2^T g      dh = W2^T g + A2^T v2
        dy = w * dh * activate'(y)      v13 = s B13^T dy
        dx_t = sum of the rows' W13^T dy + A13^T v13
        dweights_tk = <dh, h> + <g, b2_e>      wh = w * h

    Gradients of adapters are sums over a group's rows, by `expert_wgrad`: of v13 and x that of A13,
    of dy and s A13 x that of B13, of v2 and wh that of A2, of g and s w A2 h that of B2. v13_Rr and
    v2_Rr have x's dtype, 0 in rows without an adapter, and [R, 0] of a pair that is missing.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices or parameters.
    """
    c, adapter = call.layer if not call.layer.layout else restored(call.layer), call.adapter
    K, R, x_TD, ends_E = c.ids_TK.shape[1], call.rows_R.shape[0], c.x_TD, call.ends_E
    rows = AdapterRows.of(adapter, call.rows_R, ends_E, K)
    v13_Rr = v2_Rr = x_TD.new_empty(R, 0)
    g_RD = call.grad_TD[call.rows_R.clamp(min=0).long() // K]
    w2_EDI = float_weight(
        x_TD, c.w2_EDI, c.w2_scale_EDG, c.w2_zero_EDG, c.global_scale2_E, c.w_format
    )
    dh_RI = expert_gemm(g_RD, w2_EDI, ends_E, transposed=not c.transposed)
    if adapter.a2_GrI is not None and adapter.b2_GDr is not None:
        v2_Rr = rows.narrow(g_RD, adapter.b2_GDr, transposed=True)
        dh_RI = rows.added(dh_RI, v2_Rr, adapter.a2_GrI, transposed=True)
    dy_RF, wh_RI, dweights_TK = activate_backward(
        dh_RI, call.y_RF, c.weights_TK, call.rows_R, *c.activation, call.for_weights
    )
    if c.b2_ED is not None:
        b2_RD = wide(c.b2_ED)[row_experts(ends_E, R)]
        of_bias_R = (wide(g_RD) * b2_RD).sum(1)
        dweights_TK = dweights_TK + by_pair(of_bias_R, call.rows_R, c.weights_TK)
    if call.grad_y_RF is not None:
        dy_RF = dy_RF + call.grad_y_RF
    if adapter.a13_GrD is not None and adapter.b13_GFr is not None:
        v13_Rr = rows.narrow(dy_RF, adapter.b13_GFr, transposed=True)
    dx_TD = x_TD.new_empty(0, x_TD.shape[1])
    if call.for_tokens:
        w13_EFD = float_weight(
            x_TD, c.w13_EFD, c.w13_scale_EFG, c.w13_zero_EFG, rows13_factor(c), c.w_format
        )
        dx_RD = expert_gemm(dy_RF, w13_EFD, ends_E, transposed=not c.transposed)
        if adapter.a13_GrD is not None:
            dx_RD = rows.added(dx_RD, v13_Rr, adapter.a13_GrD, transposed=True)
        dx_TD = combine(dx_RD, torch.ones_like(c.weights_TK), call.rows_R)
    return dx_TD, dweights_TK.to(c.weights_TK.dtype), dy_RF, wh_RI, v13_Rr, v2_Rr


experts_adapted_backward.fake(fake_impls.experts_adapted_backward)
