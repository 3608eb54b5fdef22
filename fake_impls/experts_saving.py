"""Shapes of `experts_saving`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def experts_saving(call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, D] tokens to [T, D] outputs, [R, F] rows, [R] int32 pairs and [E] int32 ends."""
    c = call.layer
    x_TD, R = c.x_TD, c.ids_TK.shape[0] * c.ids_TK.shape[1]
    F = c.w13_EFD.shape[2 if c.transposed else 1]
    return (
        x_TD.new_empty(x_TD.shape),
        x_TD.new_empty((R, F)),
        x_TD.new_empty((R,), dtype=torch.int32),
        x_TD.new_empty((c.w13_EFD.shape[0],), dtype=torch.int32),
    )
