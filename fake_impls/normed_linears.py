"""Shapes of `normed_linears`."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def normed_linears(call: Any) -> list[Tensor]:
    """The sum if there is a residual, the normed row, and [1, N] for each weight [N, K]."""
    x_TK = call.x_TK
    rows = [x_TK.new_empty(x_TK.shape) for _ in range(1 if call.residual_TK is None else 2)]
    return [*rows, *(x_TK.new_empty((x_TK.shape[0], w_NK.shape[0])) for w_NK in call.weights)]
