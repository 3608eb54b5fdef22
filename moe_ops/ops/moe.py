"""The whole layer after the router's linear: from logits to outputs in one op."""

from __future__ import annotations

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.ops.activate import check_activation
from moe_ops.ops.experts import check_weights, experts
from moe_ops.ops.route import check as check_route
from moe_ops.ops.route import route
from moe_ops.shapes import (
    DTYPES,
    FLOATS,
    INDICES,
    check_choice,
    check_devices,
    check_size,
    check_tensor,
)
from moe_ops.spec import op


def check(
    x_TD: Tensor,
    logits_TE: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    top_k: int,
    bias_E: Tensor | None = None,
    per_expert_scale_E: Tensor | None = None,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    expert_map: Tensor | None = None,
    score: str = "softmax",
    select_on: str = "score",
    n_group: int = 1,
    topk_group: int = 1,
    group_reduce: str = "top2sum",
    group_fill: str = "-inf",
    softmax_selected: bool = False,
    renormalize: bool = False,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scale: float = 1.0,
    weights_dtype: str = "float32",
    transposed: bool = False,
    kind: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    w13_scale_EFG: Tensor | None = None,
    w2_scale_EDG: Tensor | None = None,
    w13_zero_EFG: Tensor | None = None,
    w2_zero_EDG: Tensor | None = None,
    alpha13_E: Tensor | None = None,
    alpha2_E: Tensor | None = None,
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
    w_format: str = "",
    x_format: str = "",
) -> None:
    """Raise ValueError or TypeError unless `moe` takes these arguments."""
    check_tensor("x_TD", x_TD, 2, FLOATS)
    if weights_dtype not in DTYPES:  # which `route` calls out_dtype
        check_choice("weights_dtype", weights_dtype, tuple(DTYPES))
    check_route(
        logits_TE, top_k, bias_E, per_expert_scale_E, score, select_on, n_group, topk_group,
        group_reduce, group_fill, softmax_selected, renormalize, eps, min_sum, scale, weights_dtype,
    )  # fmt: skip
    check_size("logits_TE", logits_TE, 0, x_TD.shape[0], "the tokens of x_TD")
    check_weights(
        x_TD, w13_EFD, w2_EDI, b13_EF, b2_ED, transposed, gated, w13_scale_EFG, w2_scale_EDG,
        w13_zero_EFG, w2_zero_EDG, alpha13_E, alpha2_E, x_scale, h_scale, w_format, x_format,
    )  # fmt: skip
    if expert_map is None:
        check_size(
            "logits_TE",
            logits_TE,
            1,
            w13_EFD.shape[0],
            "the experts of w13_EFD, as there is no expert_map",
        )
    else:
        check_tensor("expert_map", expert_map, 1, INDICES)
        check_size("expert_map", expert_map, 0, logits_TE.shape[1], "the experts of logits_TE")
    check_activation(kind, gated, interleaved, alpha, limit, up_shift)
    check_devices(x_TD, logits_TE=logits_TE, expert_map=expert_map)


@op(check=check)
def moe(
    x_TD: Tensor,
    logits_TE: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    top_k: int,
    bias_E: Tensor | None = None,
    per_expert_scale_E: Tensor | None = None,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    expert_map: Tensor | None = None,
    score: str = "softmax",
    select_on: str = "score",
    n_group: int = 1,
    topk_group: int = 1,
    group_reduce: str = "top2sum",
    group_fill: str = "-inf",
    softmax_selected: bool = False,
    renormalize: bool = False,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scale: float = 1.0,
    weights_dtype: str = "float32",
    transposed: bool = False,
    kind: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
    w13_scale_EFG: Tensor | None = None,
    w2_scale_EDG: Tensor | None = None,
    w13_zero_EFG: Tensor | None = None,
    w2_zero_EDG: Tensor | None = None,
    alpha13_E: Tensor | None = None,
    alpha2_E: Tensor | None = None,
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
    w_format: str = "",
    x_format: str = "",
) -> Tensor:
    """Route the tokens by their logits and run them through their experts: `experts(x,
    *route(logits, ...), ...)`.

    Arguments and their meaning are those of `route` (its out_dtype is here called weights_dtype,
    the dtype in which the routing weights are rounded) and of `experts`. With an expert_map,
    logits_TE covers the global experts and the weights only those of this rank. Result [T, D] in
    x's dtype. Raises ValueError or TypeError for wrong shapes, dtypes, devices or parameters.
    """
    weights_TK, experts_TK = route(
        logits_TE, top_k, bias_E, per_expert_scale_E, score, select_on, n_group, topk_group,
        group_reduce, group_fill, softmax_selected, renormalize, eps, min_sum, scale, weights_dtype,
    )  # fmt: skip
    return experts(
        x_TD, weights_TK, experts_TK, w13_EFD, w2_EDI, b13_EF, b2_ED, expert_map,
        transposed, kind, gated, interleaved, alpha, limit, up_shift,
        w13_scale_EFG, w2_scale_EDG, w13_zero_EFG, w2_zero_EDG, alpha13_E, alpha2_E,
        x_scale, h_scale, w_format, x_format,
    )  # fmt: skip


moe.fake(fake_impls.moe)
