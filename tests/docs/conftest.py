"""What tests of pages and of the reference share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe_ops.passes import explain


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is compiled runs as it is, but what `explain` traces, of which no code is made."""
    traced = explain.explain

    def explained(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("default"):
            return traced(*args, **kwargs)

    monkeypatch.setattr(explain, "explain", explained)
    with torch.compiler.set_stance("force_eager"):
        yield
