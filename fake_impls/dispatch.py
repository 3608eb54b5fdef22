"""Shapes of `dispatch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def dispatch(call: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[T, D] tokens to ([T * K, D] rows, [T * K] int32 pairs, [num_experts] int32 ends)."""
    x_TD, ids = call.x_TD, call.ids_TK.shape
    R = ids[0] * ids[1]
    return (
        x_TD.new_empty((R, x_TD.shape[1])),
        x_TD.new_empty((R,), dtype=torch.int32),
        x_TD.new_empty((call.num_experts,), dtype=torch.int32),
    )
