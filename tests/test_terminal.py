"""A line that is rewritten, on terminals alone and no wider than they are."""

import io

import pytest

from moe_ops.terminal import rewrite
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
