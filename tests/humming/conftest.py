"""The stand-in of Humming in place of the package, on a machine that lacks nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ops.bench import humming

STAND_IN = Path(__file__).parent / "stand_in"


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "humming"]:
        del sys.modules[name]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    forget()
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setattr(humming, "missing", lambda device: None)
    yield
    forget()
