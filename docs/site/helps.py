"""What the commands of a command line print as their help."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from unittest import mock

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
