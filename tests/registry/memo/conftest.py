"""The throw-away op, for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ops import OPS, Op
from moe_ops.registry import spec
from moe_ops.registry.spec import op
from tests.registry.memo.throwaway import SETTING, Asked, by_backend, remembered


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> Iterator[Op]:
    """An op that remembers, with one backend that says what decides."""
    with torch.library._scoped_library(spec.NAMESPACE, "FRAGMENT") as library:
        monkeypatch.setattr(spec, "_library", library)
        try:
            found = op(check=asked.check, remembers=True)(remembered)
            found.backend("fast", reads=("times", "name", "bias"), supports=asked.supports)(
                by_backend
            )
            found.remembers("fast", SETTING)
            yield found
        finally:
            del OPS["remembered"]
