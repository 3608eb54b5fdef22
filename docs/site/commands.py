"""A directive that shows each command of a command line by its own help."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

WIDTH = "100"


def helps(module: str) -> Iterator[tuple[str, str]]:
    """Each command of a module's `parser()`, the whole of them first, and what --help prints."""
    top = importlib.import_module(module).parser()
    groups = [a for a in top._actions if isinstance(a, argparse._SubParsersAction)]
    with mock.patch.dict(os.environ, COLUMNS=WIDTH):
        yield top.prog, top.format_help()
        for group in groups:
            for name, command in group.choices.items():
                yield f"{top.prog} {name}", command.format_help()


class Commands(SphinxDirective):
    """`.. commands:: MODULE`: a section for each command, which links can name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name, text in helps(self.arguments[0]):
            lines += [name, "-" * len(name), "", ".. code-block:: text", ""]
            lines += [f"   {line}" for line in text.splitlines()] + [""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
