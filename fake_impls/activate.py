"""Shapes of `activate`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def activate(
    y_RF: Tensor, kind: str = "silu", gated: bool = True, *args: Any, **kwargs: Any
) -> Tensor:
    """[R, F] rows to [R, F / 2] rows, or [R, F] if not gated."""
    R, F = y_RF.shape
    return y_RF.new_empty((R, F // 2 if gated else F))
