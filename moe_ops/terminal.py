"""One line of a terminal that is written again and again, to say where something slow is."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

log = logging.getLogger("moe_ops")

PATIENCE = 5.0  # seconds for which nothing is said


def rewrite(stream: TextIO, text: str) -> None:
    """Put a text in place of the line; nothing for a stream that is no terminal.

    It is cut to the terminal's width, as a longer one would begin a line of its own each time.
    """
    if stream.isatty():
        width = shutil.get_terminal_size().columns - 1
        stream.write(f"\r{text[:width]:<{width}}\r")
        stream.flush()


class _Here(threading.local):
    """What a thread waits for."""

    line: _Line | None = None
    calls = 0  # the contexts of `one_call` that it is in
    spent = 0.0  # seconds for which it waited in these


_here = _Here()


@contextmanager
def waiting_for(text: str) -> Iterator[None]:
    """A context around something that may be slow: after `PATIENCE` seconds it is shown each second
    on the terminal that stderr is or, where INFO is logged, logged instead. At the end the line is
    empty again. Inside another such context the text replaces that one's, and the time goes on."""
    line = _here.line
    if line is not None:
        before, line.text = line.text, text
        try:
            yield
        finally:
            line.text = before
        return
    logged = log.isEnabledFor(logging.INFO)
    if not logged and (sys.stderr is None or not sys.stderr.isatty()):
        yield
        return
    line = _here.line = _Line(text, _here.spent, None if logged else sys.stderr)
    try:
        with line.said():
            yield
    finally:
        _here.line = None
        if _here.calls:
            _here.spent = line.seconds


@contextmanager
def waiting_at_least_for(text: str) -> Iterator[None]:
    """`waiting_for`, but for where another text tells more."""
    if _here.line is not None:
        yield
        return
    with waiting_for(text):
        yield


@contextmanager
def one_call() -> Iterator[None]:
    """A context in which the seconds of all that is waited for are counted together."""
    _here.calls += 1
    try:
        yield
    finally:
        _here.calls -= 1
        if not _here.calls:
            _here.spent = 0.0


class _Line:
    """A text with the seconds since it began, said by a thread that ends with the context."""

    def __init__(self, text: str, spent: float, stream: TextIO | None) -> None:
        self.text = text
        self._stream = stream  # None: it is logged
        self._start = time.perf_counter() - spent
        self._ended = threading.Event()
        self._last = ""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @contextmanager
    def said(self) -> Iterator[None]:
        thread = threading.Thread(target=self._say_again, name="moe_ops progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            if self._last and self._stream is not None:
                rewrite(self._stream, "")
            elif self._last:
                log.info("done after %.0f s", self.seconds)

    def _say_again(self) -> None:
        wait = max(0.0, PATIENCE - self.seconds)
        while not self._ended.wait(wait):
            text, wait = self.text, 1.0
            if self._stream is not None:
                rewrite(self._stream, f"moe_ops: {text}, {self.seconds:.0f} s")
            elif text != self._last:
                log.info("%s, %.0f s", text, self.seconds)
            self._last = text
