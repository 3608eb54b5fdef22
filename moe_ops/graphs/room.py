"""What is done where memory does not suffice."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from moe_ops.graphs.cuda_graph import between_captures, capturing

log = logging.getLogger("moe_ops")
T = TypeVar("T")


def with_room(
    run: Callable[[], T], drop: Callable[[], str], then: Callable[[], T] | None = None
) -> T:
    """What `run` returns; if memory does not suffice, what it or `then` returns, after a `drop`.

    `drop` says as text what it let go of, which is logged; nothing if there was nothing. While this
    thread captures a graph, or warms up for it, it is not asked: the graph may read what would go.
    Another thread's capture is waited for. No lock of a stream may be held, as `drop` takes them.

    Raises OutOfMemoryError where nothing could go, and where that did not suffice.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        if capturing():
            raise
        dropped = drop()
        if not dropped:
            raise
    # Out here, where the error no longer holds what ran.
    log.warning("out of memory, so %s", dropped)
    gc.collect()
    with between_captures():
        torch.cuda.empty_cache()
    return run() if then is None else then()
