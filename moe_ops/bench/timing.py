"""Times of calls on a device: replays of a CUDA graph that holds them, or a loop on the host."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# Of one measurement. A GPU is loaded no longer than it must; `rates.py` says what a long load does.
SECONDS = {"cuda": 0.1, "cpu": 0.3}
LEAST, LEAST_LONG, MOST = 5, 3, 300  # replays
# What runs before a measurement (the float32 results to compare with) heats a GPU, whose clock then
# stays low for a while; the rates of `rates.py` are those of a GPU that was idle.
REST_SECONDS = 0.5
# The GPU waits for the host during the first replays, until some are queued; of long ones, never.
UNTIL_QUEUED, LONG_US = 3, 5000.0
GRAPH_US = 2000.0  # of one replay, at least: what is between two replays must not show

Run = Callable[[], Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Microseconds of one call: the median replay, and the quartiles around it."""

    us: float
    low_us: float
    high_us: float
    replays: int


def time_replays(run: Run, calls: int, device: torch.device, most: int = MOST) -> Timing:
    """Run a function that makes so many calls again and again, `most` times at most."""
    run()
    spans = _cuda_us(run, most) if device.type == "cuda" else _host_us(run, most)
    low, middle, high = statistics.quantiles(spans, n=4, method="inclusive")
    return Timing(us=middle / calls, low_us=low / calls, high_us=high / calls, replays=len(spans))


def _host_us(run: Run, most: int) -> list[float]:
    spans: list[float] = []
    while len(spans) < LEAST or (len(spans) < most and sum(spans) < SECONDS["cpu"] * 1e6):
        start = time.perf_counter()
        run()
        spans.append((time.perf_counter() - start) * 1e6)
    return spans


def _cuda_us(run: Run, most: int) -> list[float]:
    (first,) = _queued_us(run, 1, skip=0)
    long = first > LONG_US
    count = min(most, max(LEAST_LONG if long else LEAST, int(SECONDS["cuda"] * 1e6 / first)))
    time.sleep(REST_SECONDS)
    return _queued_us(run, count, skip=0 if long else UNTIL_QUEUED)


def _queued_us(run: Run, count: int, skip: int) -> list[float]:
    """The spans between events around the runs, which the host queues without waiting."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(skip + count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in itertools.pairwise(events[skip:])]


def rounds_for(calls: int, call_us: float) -> int:
    """How often a graph goes round its calls, to be long enough."""
    return max(1, min(16, -(-int(GRAPH_US) // max(1, int(calls * call_us)))))


def capture(calls: Sequence[Callable[[], Result]], rounds: int) -> tuple[Run, list[Result]]:
    """A CUDA graph of the calls, and the results of its last round. The calls ran before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results: list[Result] = []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            results = [call() for call in calls]
    return graph.replay, results
