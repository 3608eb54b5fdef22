"""Shapes of `combine`."""

from __future__ import annotations

from torch import Tensor


def combine(y_RD: Tensor, weights_TK: Tensor, rows_R: Tensor) -> Tensor:
    """[T * K, D] rows to [T, D] tokens."""
    return y_RD.new_empty((weights_TK.shape[0], y_RD.shape[1]))
