"""The tables of docs/PERFORMANCE.md that are made from what examples/forward.py wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"<!-- forward (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str, folder: Path) -> str:
    """The page with the tables between `<!-- forward NAME -->` and `<!-- end -->` made anew from
    NAME.json in the folder."""

    def made(match: re.Match[str]) -> str:
        figures = json.loads((folder / f"{match[1]}.json").read_text())
        return f"<!-- forward {match[1]} -->\n\n{table(figures)}\n\n<!-- end -->"

    return BLOCK.sub(made, page)


def table(figures: dict[str, Any]) -> str:
    versions = f"torch {figures['torch']}, transformers {figures['transformers']}"
    head = [f"One {figures['device']}, {versions}:", "", f"    {figures['command']}", ""]
    lines = [
        "| batch x length | | a forward, ms | first call, s | memory, GB |",
        "|---|---|---|---|---|",
    ]
    sizes = list(dict.fromkeys(f["size"] for f in figures["forwards"]))
    for f in sorted(figures["forwards"], key=lambda f: sizes.index(f["size"])):
        ms = f"{f['ms']:.1f} ({f['low_ms']:.1f} to {f['high_ms']:.1f})"
        cells = (f["size"], f["way"], ms, f"{f['first_call_s']:.1f}", f"{f['extra_gb']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(head + lines)
