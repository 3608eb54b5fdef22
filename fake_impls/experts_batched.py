"""Shapes of `experts_batched`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def experts_batched(call: Any) -> Tensor:
    """[E, M, D] rows to as many outputs."""
    x_EMD, D = call.batches.x_EMD, call.layer.w2_EDI.shape[2 if call.layer.transposed else 1]
    out: Tensor = x_EMD.new_empty((*x_EMD.shape[:2], D), dtype=call.dtype)
    return out
