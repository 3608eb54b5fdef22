"""The memory that a call takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that torch holds at one time during a call, above those before it."""
    return _on_gpu(run, device) if device.type == "cuda" else _on_host(run)


def _on_gpu(run: Callable[[], Any], device: torch.device) -> int:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def _on_host(run: Callable[[], Any]) -> int:
    """Read from torch's profiler, which sees what compiled code allocates, too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        held = run()
    del held  # its memory is freed unseen
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
