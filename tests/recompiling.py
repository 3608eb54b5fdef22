"""Dynamo with room for few graphs of a function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def few_graphs(limit: int) -> Iterator[None]:
    """Inside, a function is compiled so many times at most; before and after, nothing is kept."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield
    torch._dynamo.reset()
