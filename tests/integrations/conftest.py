"""The stand-in of vLLM in place of the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parent / "stand_in"
OURS = "moe_ops.integrations.vllm.method"  # its base class is one of the package


def forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "vllm" or n == OURS]:
        del sys.modules[name]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in is what `import vllm` finds, and nothing is registered in it."""
    forget()
    monkeypatch.syspath_prepend(str(STAND_IN))
    yield
    forget()
