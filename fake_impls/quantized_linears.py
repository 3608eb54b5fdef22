"""Shapes of `quantized_linears`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def quantized_linears(call: Any) -> list[Tensor]:
    """[T, N] for each weight of packed codes [N, K packed]."""
    return [call.x_TK.new_empty((call.x_TK.shape[0], w_NK.shape[0])) for w_NK in call.weights]
