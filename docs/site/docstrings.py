"""Docstrings as pages show them: plain text, as `help` prints it, made into reST.

Text between backticks is code, or a link where it is a public name; an indented block keeps its
lines; all else is text.
"""

from __future__ import annotations

import ast
import re
import textwrap
from itertools import groupby
from typing import Any

import moe_ops

CODE = re.compile(r"`([^`]+)`")
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
MARKUP = re.compile(r"([\\*|]|_(?!\w))")  # what reST would read as its own
INDENTED = "    "


def to_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring as reST."""
    found: list[str] = []
    for indented, block in blocks(lines):
        found += code(block) if indented else [*paragraph(block), ""]
    return found


def code(block: list[str]) -> list[str]:
    """An indented block as it is: of Python, or of formulas and tables."""
    try:
        ast.parse(textwrap.dedent("\n".join(block)))
        language = "python"
    except SyntaxError:
        language = "text"
    return [f".. code-block:: {language}", "", *block, ""]


def blocks(lines: list[str]) -> list[tuple[bool, list[str]]]:
    """Paragraphs, and indented blocks, which are one across empty lines; whether each is one."""
    of_line: list[tuple[bool, str]] = []
    for i, line in enumerate(lines):
        rest = next(filter(None, lines[i:]), "")
        inside = bool(of_line) and of_line[-1][0]
        of_line.append((rest.startswith(INDENTED) and (bool(line) or inside), line))
    found: list[tuple[bool, list[str]]] = []
    for (indented, empty), group in groupby(of_line, lambda pair: (pair[0], not pair[1])):
        block = [line for _, line in group]
        if indented and found and found[-1][0]:
            found[-1][1].extend(block)
        elif not empty:
            found.append((indented, block))
        elif found:
            found.append((False, []))
    return [(indented, block) for indented, block in found if block]


def paragraph(lines: list[str]) -> list[str]:
    """A paragraph; one with lines that hang from others keeps its lines."""
    hangs = any(line.startswith(" ") for line in lines) and not lines[0].startswith("- ")
    text = inline("\n".join(lines)).split("\n")
    return [f"| {line}" if hangs and not line.startswith(" ") else line for line in text]


def inline(text: str) -> str:
    """Text with code, links, and what only looks like markup."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        if i % 2:
            name = part.removeprefix("moe_ops.")
            is_public = name in moe_ops.__all__
            parts[i] = f":py:obj:`{part} <moe_ops.{name}>`" if is_public else f"``{part}``"
        else:
            escaped = MARKUP.sub(r"\\\1", part)
            linked = ARXIV.sub(r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", escaped)
            parts[i] = f"\\ {linked}" if i and re.match(r"\w", linked) else linked
    return "".join(parts)


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
