"""Shapes of `route_recording`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .route import route


def route_recording(call: Any) -> tuple[Tensor, Tensor]:
    """Weights and ids of the tokens of its part, a call of `route`."""
    return route(call.routing)
