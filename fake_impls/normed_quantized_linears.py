"""Shapes of `normed_quantized_linears`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .normed_linears import normed_linears


def normed_quantized_linears(call: Any) -> list[Tensor]:
    """The sum if there is a residual, the normed row, and [1, N] for each weight of codes."""
    return normed_linears(call)
