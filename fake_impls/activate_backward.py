"""Shapes of `activate_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def activate_backward(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[R, I] gradients and [R, F] rows to [R, F], [R, I] ([0, I] if not wanted) and [T, K]."""
    y_RF, (R, width) = call.y_RF, call.dh_RI.shape
    summed = torch.promote_types(y_RF.dtype, torch.float32)
    return (
        y_RF.new_empty(y_RF.shape),
        y_RF.new_empty((R if call.for_weights else 0, width)),
        y_RF.new_empty(call.weights_TK.shape, dtype=summed),
    )
