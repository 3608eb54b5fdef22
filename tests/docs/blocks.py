"""Blocks of a page that are made from files of figures."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def block(kind: str) -> re.Pattern[str]:
    """What lies between `<!-- KIND NAME -->` and `<!-- end -->`, with the name."""
    return re.compile(rf"<!-- {kind} (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str, folder: Path, kind: str, made: Callable[[dict[str, Any]], str]) -> str:
    """The page with the blocks of a kind made anew, each from NAME.json in the folder."""

    def filled(match: re.Match[str]) -> str:
        figures = json.loads((folder / f"{match[1]}.json").read_text())
        return f"<!-- {kind} {match[1]} -->\n\n{made(figures)}\n\n<!-- end -->"

    return block(kind).sub(filled, page)


def heading(figures: dict[str, Any]) -> list[str]:
    """Where figures were measured, and by which command: two paragraphs."""
    names = (name for name in ("torch", "transformers") if name in figures)
    versions = ", ".join(f"{name} {figures[name]}" for name in names)
    return [f"One {figures['device']}, {versions}:", f"    {figures['command']}"]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
