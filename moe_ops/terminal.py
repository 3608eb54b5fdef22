"""One line of a terminal that is written again and again, to say where a long measurement is."""

from __future__ import annotations

import shutil
from typing import TextIO


def rewrite(stream: TextIO, text: str) -> None:
    """Put a text in place of the line; nothing for a stream that is no terminal.

    It is cut to the terminal's width, as a longer one would begin a line of its own each time.
    """
    if stream.isatty():
        width = shutil.get_terminal_size().columns - 1
        stream.write(f"\r{text[:width]:<{width}}\r")
        stream.flush()
