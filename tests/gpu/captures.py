"""Calls in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def captured(
    call: Callable[[], T], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a call, which ran before, and its result, which replays write again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


def warmed_up(call: Callable[[], object], times: int = 2) -> torch.cuda.Stream:
    """The stream, not the current one, on which a call ran so often."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    return stream
