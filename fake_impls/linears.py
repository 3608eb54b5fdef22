"""Shapes of `linears`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def linears(call: Any) -> list[Tensor]:
    """[T, N] for each weight [N, K]."""
    return [call.x_TK.new_empty((call.x_TK.shape[0], w_NK.shape[0])) for w_NK in call.weights]
