"""Shapes of `state_space_step`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def state_space_step(call: Any) -> Tensor:
    """Heads [B, H, V] as the input has them."""
    out: Tensor = call.x_BHV.new_empty(tuple(call.x_BHV.shape))
    return out
