"""The table of docs/INVARIANCE.md that is made from what `bench invariant` wrote."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from tests.docs import blocks


def fill(page: str, folder: Path) -> str:
    """The page with the tables of its `costs` blocks made anew."""
    return blocks.fill(page, folder, "costs", tables)


def tables(figures: dict[str, Any]) -> str:
    cells = figures["invariant"]
    tokens = sorted({c["tokens"] for c in cells})
    rows = []
    for name in dict.fromkeys(c["format"] for c in cells):
        for layer in dict.fromkeys(c["layer"] for c in cells if c["format"] == name):
            own = {c["tokens"]: c for c in cells if (c["format"], c["layer"]) == (name, layer)}
            rows.append([f"`{name}`", layer, *(_cell(own.get(T)) for T in tokens)])
    parts = [
        *blocks.heading(figures),
        blocks.table(["format", "layer", *map(str, tokens)], rows),
        means(cells),
    ]
    return "\n\n".join(parts)


def _cell(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else f"{cell['invariant_us']:.1f} ({cell['ratio']:.2f})"


def means(cells: list[dict[str, Any]]) -> str:
    """The geometric mean of each format's ratios, and the largest of them."""
    rows = []
    for name in dict.fromkeys(c["format"] for c in cells):
        ratios = [c["ratio"] for c in cells if c["format"] == name]
        mean = f"{statistics.geometric_mean(ratios):.3f}"
        rows.append([f"`{name}`", str(len(ratios)), mean, f"{max(ratios):.2f}"])
    return blocks.table(["format", "cells", "mean", "largest"], rows)
