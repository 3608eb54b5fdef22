"""Shapes of `delta_rule_step`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def delta_rule_step(call: Any) -> Tensor:
    """Heads [B, H, V] as the values are, of the dtype of q."""
    out: Tensor = call.q_BND.new_empty(tuple(call.v_BHV.shape))
    return out
