"""Shapes of `one_query`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def one_query(call: Any) -> Tensor:
    """Heads [B, H, DV] as wide as the values are."""
    B, H, _ = call.q_BHD.shape
    out: Tensor = call.q_BHD.new_empty((B, H, call.v_BNSD.shape[3]))
    return out
