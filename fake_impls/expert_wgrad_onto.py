"""Shapes of `expert_wgrad_onto`."""

from __future__ import annotations

from typing import Any


def expert_wgrad_onto(call: Any) -> None:
    """No result: rows [R, M] and [R, N] of E experts are added to [E, M, N]."""
