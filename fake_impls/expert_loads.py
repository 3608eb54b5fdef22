"""Shapes of `expert_loads`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expert_loads(call: Any) -> Tensor:
    """[T, K] ids to [num_experts] int64 counts."""
    out: Tensor = call.ids_TK.new_empty((call.num_experts,), dtype=torch.int64)
    return out
