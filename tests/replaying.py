"""Recorded launches without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

STREAM = 7  # on which calls are repeated


@contextmanager
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """Let launches on a CPU repeat; gives the recordings, none before and none afterwards."""
    from moe_ops.kernels.triton import replay

    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(replay, "_repeats", lambda t: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    replay._recordings.clear()
    yield replay._recordings
    replay._recordings.clear()
