"""Shapes of `experts_adapted_backward`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .experts_backward import experts_backward


def experts_adapted_backward(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `experts_backward` gives, and [R, r] rows between B and A for each of two weights."""
    y_RF = call.y_RF
    v13_Rr, v2_Rr = (y_RF.new_empty((y_RF.shape[0], r)) for r in call.adapter.ranks)
    return *experts_backward(call), v13_Rr, v2_Rr
