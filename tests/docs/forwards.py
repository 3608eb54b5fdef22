"""The tables of docs/performance/ that are made from what examples/forward.py wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs import blocks

BLOCK = blocks.block("forward")


def fill(page: str, folder: Path) -> str:
    """The page with the tables of its `forward` blocks made anew."""
    return blocks.fill(page, folder, "forward", table)


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| batch x length | | a forward, ms | first call, s | memory, GB |",
        "|---|---|---|---|---|",
    ]
    sizes = list(dict.fromkeys(f["size"] for f in figures["forwards"]))
    for f in sorted(figures["forwards"], key=lambda f: sizes.index(f["size"])):
        ms = f"{f['ms']:.1f} ({f['low_ms']:.1f} to {f['high_ms']:.1f})"
        cells = (f["size"], f["way"], ms, f"{f['first_call_s']:.1f}", f"{f['extra_gb']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n\n".join([*blocks.heading(figures), "\n".join(lines)])
