"""The kernels of one decoder layer in a step, in their order, with what each takes."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType


class Ran(NamedTuple):
    """When a kernel ran, in microseconds."""

    start: float
    end: float
    kernel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel, in microseconds: the medians over the layers of a step. The gap is from the end
    of the one before to its start, and below zero where they overlap."""

    kernel: str
    us: float
    gap_us: float


def timeline(steps: Callable[[], Any], number: int, layers: int) -> list[Launch]:
    """Return the launches of a median layer in the last step but one of a call of `number` steps,
    from the first kernel that runs once in every layer."""
    activity = torch.profiler.ProfilerActivity.CUDA
    # Without acc_events torch 2.11 warns of cycles whose events are lost; there is only one here.
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        steps()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    ran = [Ran(e.time_range.start, e.time_range.end, e.name) for e in events]
    return median_layer(ran, number, layers)


def median_layer(ran: Sequence[Ran], number: int, layers: int) -> list[Launch]:
    """Return the launches of a median layer among the kernels of `number` steps. Raises
    ValueError if no kernel runs once in every layer."""
    kernels = sorted(ran)
    often = Counter(one.kernel for one in kernels)
    # The prompt may run the kernel once a layer, too.
    once = [n for n, count in often.items() if count in (layers * number, layers * (number + 1))]
    if not once or number < 2:
        raise ValueError(f"no kernel runs {layers * number} times, once a layer in {number} steps")
    starts = [i for i, one in enumerate(kernels) if one.kernel == once[0]]
    starts = starts[-2 * layers : -layers]
    found: list[Launch] = []
    for place in range(min(b - a for a, b in itertools.pairwise(starts))):
        pairs = [(kernels[i + place - 1], kernels[i + place]) for i in starts[:-1]]
        us = statistics.median(one.end - one.start for _, one in pairs)
        gap = statistics.median(one.start - before.end for before, one in pairs)
        found.append(Launch(kernel=pairs[0][1].kernel, us=us, gap_us=gap))
    return found


def table(found: Sequence[Launch]) -> str:
    """A line for each, and the sum, which is what a layer takes."""
    lines = [f"{'kernel':<72}{'us':>8}{'gap us':>8}"]
    lines += [f"{one.kernel[:70]:<72}{one.us:>8.1f}{one.gap_us:>8.1f}" for one in found]
    whole = sum(one.us + one.gap_us for one in found)
    return "\n".join([*lines, f"{'a layer':<72}{whole:>8.1f}"])
