"""The whole layer after the router's linear: from logits to outputs in one op."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import (
    DOUBLE,
    DTYPES,
    INDICES,
    check_choice,
    check_devices,
    check_float,
    check_size,
    check_tensor,
)
from moe_ops.ops.activate import check_activation
from moe_ops.ops.experts import OF_CODES, ExpertsCall, check_weights, experts
from moe_ops.ops.route import RouteCall, route
from moe_ops.ops.route import check as check_route
from moe_ops.registry.invariance import by_parts
from moe_ops.registry.spec import op


def _flat() -> dict[str, str]:
    """The arguments by flat name, and where they are: what has no default first."""
    first = (
        "layer.x_TD", "routing.logits_TE", "layer.w13_EFD", "layer.w2_EDI", "routing.top_k",
        "routing.bias_E", "routing.per_expert_scale_E",
        "layer.b13_EF", "layer.b2_ED", "layer.expert_map",
    )  # fmt: skip
    every = [f"routing.{f.name}" for f in fields(RouteCall)]
    every += [f"layer.{f.name}" for f in fields(ExpertsCall) if f.name not in OF_CODES]
    routed = ("layer.weights_TK", "layer.ids_TK")
    rest = (path for path in every if path not in (*first, *routed))
    names = {"out_dtype": "weights_dtype"}
    paths = {path.partition(".")[2]: path for path in (*first, *rest)}
    return {names.get(name, name): path for name, path in paths.items()}


@dataclass(slots=True)
class MoeCall:
    """The arguments of `moe`: those of `route`, and those of `experts` but what `route` gives."""

    layer: ExpertsCall
    routing: RouteCall

    FLAT: ClassVar[dict[str, str]] = _flat()


def check(call: MoeCall) -> None:
    """Raise ValueError or TypeError unless `moe` takes these arguments."""
    layer, logits_TE, dtype = call.layer, call.routing.logits_TE, call.routing.out_dtype
    check_float("x_TD", layer.x_TD, 2)
    if dtype not in DTYPES:  # which `route` calls out_dtype
        check_choice("weights_dtype", dtype, tuple(DTYPES))
    check_float("logits_TE", logits_TE, 2, layer.x_TD)
    check_route(call.routing)
    if logits_TE.dtype is DOUBLE and call.routing.dtype is not DOUBLE:
        raise TypeError(
            f"weights_dtype={dtype!r} would round the weights of float64 tokens, which float64 "
            "alone goes with; leave it out"
        )
    check_size("logits_TE", logits_TE, 0, layer.x_TD.shape[0], "the tokens of x_TD")
    check_weights(layer)
    if layer.expert_map is None:
        why = "the experts of w13_EFD, as there is no expert_map"
        check_size("logits_TE", logits_TE, 1, layer.w13_EFD.shape[0], why)
    else:
        check_tensor("expert_map", layer.expert_map, 1, INDICES)
        why = "the experts of logits_TE"
        check_size("expert_map", layer.expert_map, 0, logits_TE.shape[1], why)
    check_activation(layer)
    check_devices(layer.x_TD, logits_TE=logits_TE, expert_map=layer.expert_map)


@op(check=check, remembers=True, arithmetic=by_parts)
def moe(call: MoeCall) -> Tensor:
    """Route the tokens by their logits and run them through their experts: `experts(x,
    *route(logits, ...), ...)`.

    Arguments and their meaning are those of `route` (its out_dtype is here called weights_dtype,
    the dtype in which the routing weights are rounded) and of `experts`. With an expert_map,
    logits_TE covers the global experts and the weights only those of this rank. Result [T, D] in
    x's dtype. Raises ValueError or TypeError for wrong shapes, dtypes, devices or parameters.
    """
    weights_TK, ids_TK = route.part(call.routing)
    x_TD, _, _, *rest = experts.arguments.flat(call.layer)
    out_TD: Tensor = experts.part(ExpertsCall(x_TD, weights_TK, ids_TK, *rest))
    return out_TD


moe.fake(fake_impls.moe)
