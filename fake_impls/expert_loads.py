"""Shapes of `expert_loads`."""

from __future__ import annotations

import torch
from torch import Tensor


def expert_loads(experts_TK: Tensor, num_experts: int, expert_map: Tensor | None = None) -> Tensor:
    """[T, K] ids to [num_experts] int64 counts."""
    return experts_TK.new_empty((num_experts,), dtype=torch.int64)
