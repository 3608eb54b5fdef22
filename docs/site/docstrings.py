"""Docstrings as pages show them: plain text with indented blocks, as `help` prints it, into reST.

Text between backticks is code, or a link where it is a public name; an indented block keeps its
lines; all else is text.
"""

from __future__ import annotations

import re
from typing import Any

import moe_ops

CODE = re.compile(r"`([^`]+)`")
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
MARKUP = re.compile(r"([\\*|]|_(?!\w))")  # what reST would read as its own
INDENTED = "    "


def to_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring as reST."""
    found: list[str] = []
    for block in blocks(lines):
        if block[0].startswith(INDENTED):
            found += ["::", "", *block, ""]
        else:
            found += [*paragraph(block), ""]
    return found


def blocks(lines: list[str]) -> list[list[str]]:
    """Paragraphs and indented blocks; one of these goes on behind an empty line if it is indented
    again."""
    found: list[list[str]] = []
    for line in lines:
        indented = line.startswith(INDENTED)
        if found and found[-1] and line and indented == found[-1][0].startswith(INDENTED):
            found[-1].append(line)
        elif line or (found and found[-1]):
            found.append([line] if line else [])
    return [block for block in joined(found) if block]


def joined(found: list[list[str]]) -> list[list[str]]:
    """Indented blocks with only empty lines between them as one."""
    whole: list[list[str]] = []
    for block in found:
        goes_on = block and whole and block[0].startswith(INDENTED)
        if goes_on and whole[-1] and whole[-1][0].startswith(INDENTED):
            whole[-1] += ["", *block]
        elif block:
            whole.append(block)
    return whole


def paragraph(lines: list[str]) -> list[str]:
    """A paragraph, or a list of those whose further lines hang a little."""
    hangs = any(line.startswith(" ") for line in lines) and not lines[0].startswith("- ")
    text = inline("\n".join(lines)).split("\n")
    if not hangs:
        return text
    return [line if line.startswith(" ") else f"| {line}" for line in text]


def inline(text: str) -> str:
    """A paragraph's text, with code, links and what only looks like markup."""
    parts = CODE.split(text)
    for i, part in enumerate(parts):
        if i % 2:
            name = part.removeprefix("moe_ops.")
            public = name in moe_ops.__all__
            parts[i] = f":py:obj:`{part} <moe_ops.{name}>`" if public else f"``{part}``"
        else:
            escaped = MARKUP.sub(r"\\\1", part)
            parts[i] = ARXIV.sub(r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", escaped)
    return re.sub(r"`(?=\w)", r"`\\ ", "".join(parts)) if False else "".join(parts)


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
