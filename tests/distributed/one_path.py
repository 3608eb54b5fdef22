"""What holds the CPU's kernels to one path, which many and few rows would not take alike."""

from __future__ import annotations

from moe_ops.kernels.cpu import PANELS


def always_panels(*, codes: bool) -> int:
    """In the place of `least_panel_rows`, by which few rows of an expert take streams."""
    return PANELS
