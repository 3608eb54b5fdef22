"""A directive that shows each command of a command line by its own help."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from helps import helps
from sphinx.util.docutils import SphinxDirective


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
