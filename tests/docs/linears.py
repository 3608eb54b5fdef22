"""The table of docs/FORMATS.md that is made from what `bench linears` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs import blocks


def fill(page: str, folder: Path) -> str:
    """The page with the tables of its `linears` blocks made anew."""
    return blocks.fill(page, folder, "linears", tables)


def tables(figures: dict[str, Any]) -> str:
    cells = figures["linears"]
    by = list(dict.fromkeys(c["by"] for c in cells))
    us = {(c["layers"], c["format"], c["rows"], c["by"]): f"{c['us']:.1f}" for c in cells}
    rows = [
        [layers, f"`{name}`", str(T), *(us.get((layers, name, T, one), "") for one in by)]
        for layers, name, T in dict.fromkeys((c["layers"], c["format"], c["rows"]) for c in cells)
    ]
    head = ["layers", "format", "rows", *(f"`{one}`" for one in by)]
    return "\n\n".join([*blocks.heading(figures), blocks.table(head, rows)])
