"""The kernels of one decoder layer in a step, in their order, with what each takes."""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel, in microseconds: the medians over the layers of a step. The gap is from the end
    of the one before to its start, and below zero where they overlap."""

    kernel: str
    us: float
    gap_us: float


def timeline(steps: Callable[[], Any], number: int, layers: int) -> list[Launch]:
    """Of a call that takes so many steps: a layer of the last one but one, from the first kernel on
    that runs once in every layer."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profiler:
        steps()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return median_layer([e for e in events if e.get("cat") == "kernel"], number, layers)


def median_layer(events: Sequence[dict[str, Any]], number: int, layers: int) -> list[Launch]:
    """Of the kernels of a trace. Raises ValueError if no kernel runs once in every layer."""
    kernels = sorted(events, key=lambda e: e["ts"])
    often = Counter(e["name"] for e in kernels)
    # The prompt may run the kernel once a layer, too.
    once = [n for n, count in often.items() if count in (layers * number, layers * (number + 1))]
    if not once or number < 2:
        raise ValueError(f"no kernel runs {layers * number} times, once a layer in {number} steps")
    starts = [i for i, e in enumerate(kernels) if e["name"] == once[0]]
    starts = starts[-2 * layers : -layers]
    found: list[Launch] = []
    for place in range(min(b - a for a, b in itertools.pairwise(starts))):
        spans, gaps = [], []
        for start in starts[:-1]:
            before, e = kernels[start + place - 1], kernels[start + place]
            spans.append(e["dur"])
            gaps.append(e["ts"] - before["ts"] - before["dur"])
        name = kernels[starts[0] + place]["name"]
        us, gap = statistics.median(spans), statistics.median(gaps)
        found.append(Launch(kernel=name, us=us, gap_us=gap))
    return found


def table(found: Sequence[Launch]) -> str:
    """A line for each, and the sum, which is what a layer takes."""
    lines = [f"{'kernel':<72}{'us':>8}{'gap us':>8}"]
    lines += [f"{one.kernel[:70]:<72}{one.us:>8.1f}{one.gap_us:>8.1f}" for one in found]
    whole = sum(one.us + one.gap_us for one in found)
    return "\n".join([*lines, f"{'a layer':<72}{whole:>8.1f}"])
