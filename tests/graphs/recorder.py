"""A stand-in for CUDA graphs, where there is no GPU: a replay runs the function again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_ops.arena import Arena
from moe_ops.graphs.capture import GraphRunner
from moe_ops.graphs.cuda_graph import Captured, restore


class Recorder:
    """Captures by keeping the function: a replay runs it and writes into the first output.

    It runs the function to warm up and leaves the state as before, as `capture_call` does. Captures
    raise `errors` first, one each.
    """

    def __init__(self, *errors: Exception) -> None:
        self.errors = [*errors]
        self.memory: list[tuple[Any, Any]] = []  # pool and stream of each capture
        self.replayed = 0

    @property
    def captures(self) -> int:
        return len(self.memory)

    def __call__(
        self,
        function: Callable[[], Any],
        state: Sequence[Tensor] = (),
        *,
        pool: Any = None,
        stream: Any = None,
        device: torch.device | None = None,
    ) -> Captured:
        if self.errors:
            raise self.errors.pop(0)
        self.memory.append((pool, stream))
        saved = [(t, t.clone()) for t in state]
        output, inference = function(), torch.is_inference_mode_enabled()
        grad = torch.is_grad_enabled()
        restore(saved)

        def replay() -> None:
            self.replayed += 1
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                write_over(output, function())

        return Captured(replay, output, 64)


def write_over(output: Any, new: Any) -> None:
    """Copy results to where those of the capture are."""
    for held, x in zip(pytree.tree_leaves(output), pytree.tree_leaves(new), strict=True):
        if isinstance(held, Tensor) and held.data_ptr() != x.data_ptr():
            held.copy_(x)


def runner(
    function: Callable[..., Any], recorder: Recorder, arena: Arena | None = None, **kw: Any
) -> GraphRunner:
    kw = {"buckets": (1, 4, 16), **kw}
    return GraphRunner(function, capture=recorder, arena=arena or Arena(), **kw)
