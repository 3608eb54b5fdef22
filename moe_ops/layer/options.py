"""What an MoE layer is told besides its sizes: how it routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from moe_ops.checks.options import check_fields
from moe_ops.ops.route import RouteCall, route
from moe_ops.ops.routing_methods import routing_method

CustomRouting = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a layer chooses experts: the arguments of the `route` op, and what goes with them.

    The fields from `score` to `scale` are those of `route`, `weights_dtype` is its out_dtype;
    `n_group` and `topk_group` make it grouped. Besides:

        correction_bias  the layer holds one value per expert, added where experts are chosen
        custom           takes the place of `route`: (x_TD, logits_TE, top_k) -> (weights_TK float,
                         ids_TK int32 or int64), traceable if the layer is to be compiled
        weight_on_input  an expert's input is scaled by its weight, not its output; top_k = 1 alone

    Raises TypeError for a number, a flag or a string that is none; `check`, for which a layer asks,
    looks at the rest.
    """

    score: str = "softmax"
    select_on: str = "score"
    n_group: int = 1
    topk_group: int = 1
    group_reduce: str = "top2sum"
    group_fill: str = "-inf"
    softmax_selected: bool = False
    renormalize: bool = False
    eps: float = 0.0
    min_sum: float = 0.0
    scale: float = 1.0
    weights_dtype: str = "float32"
    correction_bias: bool = False
    custom: CustomRouting | None = None
    weight_on_input: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `route` that are no tensors, by name."""
        named = {name: getattr(self, name) for name in ROUTE_OPTIONS}
        return named | {"out_dtype": self.weights_dtype}

    def method(self, top_k: int) -> str:
        """Which routing method of FlashInfer and TensorRT-LLM this is for so many experts a token,
        by the name in their `RoutingMethodType` ("Renormalize", "DeepSeekV3", "Llama4", ...), ""
        for none; `moe_ops/ops/routing_methods.py` says which is which. A backend whose kernels
        route is given logits where it has the method, by `moe`.
        """
        if self.custom is not None:
            return ""
        logits_TE = torch.empty(1, top_k, device="meta")
        bias_E = logits_TE[0] if self.correction_bias else None
        return routing_method(RouteCall(logits_TE, top_k, bias_E, **self.options))

    def check(self, num_experts: int, top_k: int, fused: int = 0) -> None:
        """Raise ValueError or TypeError unless so many experts can be routed like this, and so many
        shared ones fused with them."""
        logits_TE = torch.empty(1, num_experts, device="meta")
        bias_E = logits_TE[0] if self.correction_bias else None
        route.check(RouteCall(logits_TE, top_k, bias_E, **self.options))
        if self.weight_on_input and top_k != 1:
            raise ValueError(
                f"weight_on_input scales a token for its one expert, got top_k={top_k}; "
                "leave it out, or take top_k=1"
            )
        if self.weight_on_input and fused:
            raise ValueError(
                "weight_on_input scales the input of every expert of a token, fused shared ones "
                "too; give the shared experts as a module"
            )
        if self.custom is None:
            return
        if not callable(self.custom):
            raise TypeError(
                f"custom must be a function of (x_TD, logits_TE, top_k), got {self.custom!r}"
            )
        given = [
            name
            for name in Routing.__dataclass_fields__
            if name not in ("custom", "weight_on_input")
            and getattr(self, name) != Routing.__dataclass_fields__[name].default
        ]
        if given:
            raise ValueError(
                f"custom takes the place of `route`, which alone reads {', '.join(given)}; "
                "leave them out and let the function do it"
            )

    def __str__(self) -> str:
        """Two to five words for a log."""
        if self.custom is not None:
            return getattr(self.custom, "__name__", type(self.custom).__name__)
        words = [self.score]
        if self.correction_bias:
            words.append("+ correction bias")
        if self.n_group > 1:
            words.append(f"in {self.topk_group} of {self.n_group} groups")
        if self.renormalize or self.softmax_selected:
            words.append("renormalised")
        if self.scale != 1.0:
            words.append(f"x {self.scale:g}")
        return " ".join(words)


# The arguments of `route` that a routing holds by the same name.
_HELD = {f.name for f in fields(Routing)}
ROUTE_OPTIONS = tuple(f.name for f in fields(RouteCall) if f.name in _HELD)
