"""A line that is rewritten, on terminals alone and no wider than they are."""

import io
import logging
import sys
import threading
import time
from collections.abc import Callable

import pytest

from moe_ops import terminal
from moe_ops.terminal import one_call, rewrite, waiting_at_least_for, waiting_for
from tests.terminals import Terminal


def test_a_line_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "11")
    out = Terminal()
    rewrite(out, "longer lines are cut")
    rewrite(out, "short")
    assert out.getvalue() == "\rlonger lin\r\rshort     \r"


def test_a_file_gets_nothing() -> None:
    out = io.StringIO()
    rewrite(out, "text")
    assert not out.getvalue()


def until(holds: Callable[[], bool]) -> None:
    """Wait for another thread; what hangs forever fails."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def lines(out: Terminal) -> list[str]:
    """What was in the line, one after the other, without the seconds."""
    found = [line.rstrip().rpartition(", ")[0] for line in out.getvalue().split("\r") if line]
    return [line for i, line in enumerate(found) if i == 0 or line != found[i - 1]]


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "moe_ops progress"]


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal that stderr is, before which nobody is patient. It is no fixture, as pytest puts
    a stderr of its own in place before a test."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    return found


def test_what_takes_long_is_shown_and_cleared_even_if_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = terminal_for(monkeypatch)
    with pytest.raises(KeyError), waiting_for("compiling A"):
        until(lambda: "A, 0 s" in out.getvalue())
        with waiting_for("compiling B"), waiting_at_least_for("compiling"):
            until(lambda: "compiling B, " in out.getvalue())
            raise KeyError
    assert lines(out) == ["moe_ops: compiling A", "moe_ops: compiling B", ""]
    assert not threads()
    with waiting_at_least_for("compiling C"):
        until(lambda: "compiling C" in out.getvalue())
    assert lines(out)[-2:] == ["moe_ops: compiling C", ""]


def test_what_takes_less_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal_for(monkeypatch)
    monkeypatch.setattr(terminal, "PATIENCE", 1e6)
    with waiting_for("compiling"):
        assert threads()
    assert not out.getvalue()
    assert not threads()


def test_the_seconds_of_one_call_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    out = terminal_for(monkeypatch)
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(terminal, "PATIENCE", 5.0)
    for shown in (True, False):
        with one_call():
            with waiting_for("compiling A"):
                now += 7.0 if shown else 1.0
            now += 50.0
            with waiting_for("compiling B"):
                if shown:
                    until(lambda: "B, 7 s" in out.getvalue())
    assert lines(out) == ["moe_ops: compiling B", ""]


def test_no_terminal_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with waiting_for("compiling"), waiting_at_least_for("more"):
            assert not threads()
        assert stream is None or not stream.getvalue()


def test_where_info_is_logged_it_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = terminal_for(monkeypatch)
    with caplog.at_level(logging.INFO, "moe_ops"):
        with waiting_for("compiling A"):
            until(lambda: "compiling A, 0 s" in caplog.text)
            with waiting_for("compiling B"):
                until(lambda: "compiling B, " in caplog.text)
        said = [record.getMessage().rpartition(" ")[0] for record in caplog.records]
    assert [line.rpartition(" ")[0] for line in said] == [
        "compiling A,",
        "compiling B,",
        "done after",
    ]
    assert not out.getvalue()
    assert not threads()
