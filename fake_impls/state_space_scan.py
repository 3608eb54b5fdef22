"""Shapes of `state_space_scan`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def state_space_scan(call: Any) -> tuple[Tensor, Tensor]:
    """Heads [B, T, H, V] and a state [B, H, V, D], both float32."""
    summed = torch.promote_types(call.x_BTHV.dtype, torch.float32)
    B, T, H, V = call.x_BTHV.shape
    D = call.b_BTND.shape[3]
    out_BTHV = call.x_BTHV.new_empty((B, T, H, V), dtype=summed)
    return out_BTHV, call.x_BTHV.new_empty((B, H, V, D), dtype=summed)
