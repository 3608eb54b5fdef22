"""One line on a terminal that says where a long measurement is."""

from __future__ import annotations

import sys

WIDTH = 100


def tell(text: str) -> None:
    """Rewrite the line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text[:WIDTH]:<{WIDTH}}")
        sys.stderr.flush()


def done() -> None:
    """Blank the line, for what is printed after it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{'':<{WIDTH}}\r")
        sys.stderr.flush()
