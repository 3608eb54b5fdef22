"""What runs on a stream of its own while ranks exchange tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe_ops.registry.gradients import needs_grad


def start(module: nn.Module, x_TD: Tensor) -> Callable[[], Tensor]:
    """Start `module(x_TD)`; what is returned waits for the result and gives it, once.

    On a CUDA device the module runs on a stream of its own, in a graph that is captured, too. On a
    CPU, while a graph is traced, and where something requires grad, it runs when it is asked for.
    """
    traced = torch.compiler.is_compiling() or torch.compiler.is_exporting()
    if traced or x_TD.device.type != "cuda" or needs_grad(x_TD, *module.parameters()):
        return lambda: module(x_TD)
    here, there = torch.cuda.current_stream(x_TD.device), _second_stream(x_TD.device)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        out_TD: Tensor = module(x_TD)
    x_TD.record_stream(there)  # or its memory may be given away before the module has read it

    def wait() -> Tensor:
        here.wait_stream(there)
        out_TD.record_stream(here)
        return out_TD

    return wait


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
