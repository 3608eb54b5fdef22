"""Which experts the routing of a layer chooses by its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.checks.shapes import INDICES, check_size, check_tensor
from moe_ops.ops import route
from moe_ops.registry.invariance import invariant_if


def chosen(layer: Any, x_TD: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
    """The weights and ids that the routing of a `MoELayer` chooses. Raises ValueError or TypeError
    for ids of a custom one that are none."""
    if layer.routing.custom is None:
        choose = invariant_if(layer.batch_invariant, route)
        weights_TK, ids_TK = choose(
            logits_TE, layer.top_k, layer.correction_bias, **layer.routing.options
        )
        return weights_TK, ids_TK
    weights_TK, ids_TK = layer.routing.custom(x_TD, logits_TE, layer.top_k)
    check_tensor("the custom routing's ids_TK", ids_TK, 2, INDICES)
    check_size("the custom routing's ids_TK", ids_TK, 1, layer.top_k, "top_k")
    return weights_TK, ids_TK
