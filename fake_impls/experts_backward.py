"""Shapes of `experts_backward`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def experts_backward(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, D] gradients to those of [T, D] tokens ([0, D] if not wanted) and of [T, K] weights,
    [R, F] of rows, and [R, I] weighted activations ([0, I] if not wanted)."""
    c, y_RF = call.layer, call.y_RF
    x_TD, width = c.x_TD, c.widths[1]
    return (
        x_TD.new_empty((x_TD.shape[0] if call.for_tokens else 0, x_TD.shape[1])),
        c.weights_TK.new_empty(c.weights_TK.shape),
        y_RF.new_empty(y_RF.shape),
        y_RF.new_empty((y_RF.shape[0] if call.for_weights else 0, width)),
    )
