"""Shapes of `one_query_latents`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def one_query_latents(call: Any) -> Tensor:
    """Heads [B, H, R] as wide as the latents are."""
    out: Tensor = call.q_BHR.new_empty(call.q_BHR.shape)
    return out
