"""Times of calls on a device: replays of a CUDA graph that holds them, or a loop on the host."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

# Of one measurement without a rest. Products at full load make a GPU lower its clock after some
# tens of milliseconds: over 0.4 s their median rate on an H200 was 680 TFLOP/s, over 14 ms 774 to
# 808. So what is timed, and the rates that it is held against, load it equally long.
SECONDS = {"cuda": 0.02, "cpu": 0.3}
LEAST, LEAST_LONG, MOST = 5, 3, 300  # replays
FIRST_SECONDS = 0.005  # of what tells how long a graph has to be
# What runs before a measurement (the float32 results to compare with) heats a GPU, whose clock then
# stays low for a while.
REST_SECONDS = 0.5
# The GPU waits for the host during the first replays, until some are queued; of long ones, never.
UNTIL_QUEUED, LONG_US = 3, 5000.0
TURNS = 4  # of functions that are compared
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


def time_replays(
    run: Run, calls: int, device: torch.device, seconds: float | None = None,
    rest: float = REST_SECONDS,
) -> Timing:  # fmt: skip
    """Run a function that makes so many calls again and again, for `seconds` without a rest, behind
    one of so many seconds on a GPU."""
    run()
    seconds = SECONDS[device.type] if seconds is None else seconds
    spans = _cuda_us(run, seconds, rest) if device.type == "cuda" else _host_us(run, seconds)
    return _of(spans, calls)


def time_turns(runs: Sequence[Run], count: int, device: torch.device) -> list[Timing]:
    """Run each function so many times, in turns, and some times before each: ranks that wait for
    each other have to run them as often."""
    spans: list[list[float]] = [[] for _ in runs]
    for _ in range(TURNS):
        for run, found in zip(runs, spans, strict=True):
            found += _counted_us(run, -(-count // TURNS), device)
    return [_of(found, 1) for found in spans]


def _counted_us(run: Run, count: int, device: torch.device) -> list[float]:
    for _ in range(UNTIL_QUEUED):
        run()
    if device.type == "cuda":
        return _queued_us(run, count, UNTIL_QUEUED)
    return [_once_us(run) for _ in range(count)]


def _of(spans: list[float], calls: int) -> Timing:
    """The timing of one call, from the times of replays of `calls` calls each."""
    low, middle, high = statistics.quantiles(spans, n=4, method="inclusive")
    return Timing(us=middle / calls, low_us=low / calls, high_us=high / calls, replays=len(spans))


def _host_us(run: Run, seconds: float) -> list[float]:
    spans: list[float] = []
    while len(spans) < LEAST or (len(spans) < MOST and sum(spans) < seconds * 1e6):
        spans.append(_once_us(run))
    return spans


def _once_us(run: Run) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def _cuda_us(run: Run, seconds: float, rest: float) -> list[float]:
    (first,) = _queued_us(run, 1, skip=0)
    least, skip = (LEAST_LONG, 0) if first > LONG_US else (LEAST, UNTIL_QUEUED)
    at_once = min(MOST, max(1, int(seconds * 1e6 / first)))
    spans: list[float] = []
    while len(spans) < least:
        time.sleep(rest)
        spans += _queued_us(run, at_once, skip)
    return spans


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


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Microseconds of one call of several that take turns."""
    for call in calls:
        call()
    if device.type == "cuda":
        run, count, _ = capture_long(calls, device)
        return time_replays(run, count, device).us
    return time_replays(lambda: [call() for call in calls], len(calls), device).us


def capture_long(
    calls: Sequence[Callable[[], Result]], device: torch.device
) -> tuple[Run, int, list[Result]]:
    """`capture` of as many rounds as make a graph long enough; and how many calls one replay is."""
    first = time_replays(capture(calls, 1)[0], len(calls), device, FIRST_SECONDS, rest=0.0)
    rounds = rounds_for(len(calls), first.us)
    run, results = capture(calls, rounds)
    return run, rounds * len(calls), results


def capture(calls: Sequence[Callable[[], Result]], rounds: int) -> tuple[Run, list[Result]]:
    """A CUDA graph of the calls, and the results of its last round. The calls ran before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results: list[Result] = []
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            results = [call() for call in calls]
    return graph.replay, results
