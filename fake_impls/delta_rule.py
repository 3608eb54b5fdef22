"""Shapes of `delta_rule`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def delta_rule(call: Any) -> tuple[Tensor, Tensor]:
    """Heads [B, T, H, V] as the values are, of the dtype of q, and a state [B, H, D, V]."""
    summed = torch.promote_types(call.q_BTND.dtype, torch.float32)
    B, T, H, V = call.v_BTHV.shape
    D = call.q_BTND.shape[3]
    state_BHDV = call.q_BTND.new_empty((B, H, D, V), dtype=summed)
    return call.q_BTND.new_empty((B, T, H, V)), state_BHDV
