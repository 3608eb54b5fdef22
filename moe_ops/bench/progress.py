"""Where a long measurement is, on stderr if that is a terminal."""

from __future__ import annotations

import sys

from moe_ops.terminal import rewrite


def tell(text: str) -> None:
    rewrite(sys.stderr, text)


def done() -> None:
    """Blank the line, for what is printed after it."""
    rewrite(sys.stderr, "")
