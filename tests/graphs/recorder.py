"""A stand-in for CUDA graphs, where there is no GPU: a replay runs the function again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ops.arena import Arena
from moe_ops.graphs.capture import GraphRunner
from moe_ops.graphs.cuda_graph import Captured, CaptureError, restore


class Recorder:
    """Captures by keeping the function: a replay runs it and writes into the first output.

    It runs the function to warm up and leaves the state as before, as `capture_call` does.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self.memory: list[tuple[Any, Any]] = []  # pool and stream of each capture

    @property
    def captures(self) -> int:
        return len(self.memory)

    def __call__(
        self,
        function: Callable[[], Any],
        state: Sequence[Tensor] = (),
        *,
        pool: Any,
        stream: Any,
        device: torch.device,
    ) -> Captured:
        if self.error is not None:
            raise CaptureError(self.error)
        self.memory.append((pool, stream))
        saved = [(t, t.clone()) for t in state]
        output, inference = function(), torch.is_inference_mode_enabled()
        grad = torch.is_grad_enabled()
        restore(saved)

        def replay() -> None:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                output.copy_(function())

        return Captured(replay, output, 64)


def runner(
    function: Callable[..., Any], recorder: Recorder, arena: Arena | None = None, **kw: Any
) -> GraphRunner:
    kw = {"buckets": (1, 4, 16), **kw}
    return GraphRunner(function, capture=recorder, arena=arena or Arena(), **kw)
