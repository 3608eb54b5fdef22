"""Shapes of `dispatch`."""

from __future__ import annotations

import torch
from torch import Tensor


def dispatch(
    x_TD: Tensor, experts_TK: Tensor, num_experts: int, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, D] tokens to ([T * K, D] rows, [T * K] int32 pairs, [num_experts] int32 ends)."""
    R = experts_TK.shape[0] * experts_TK.shape[1]
    return (
        x_TD.new_empty((R, x_TD.shape[1])),
        x_TD.new_empty((R,), dtype=torch.int32),
        x_TD.new_empty((num_experts,), dtype=torch.int32),
    )
