"""Shapes of `experts_accumulating`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def experts_accumulating(call: Any) -> Tensor:
    """Tokens [T, D] again."""
    out: Tensor = call.layer.x_TD.new_empty(call.layer.x_TD.shape)
    return out
