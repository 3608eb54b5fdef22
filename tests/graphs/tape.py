"""A stand-in for CUDA graphs that is as strict as these, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ops.graphs.cuda_graph import Captured, restore
from tests.graphs.recorder import write_over


class Tape:
    """Captures by keeping the operators of a function with the tensors that they had: a replay
    repeats these where the tensors were, and runs nothing of the function."""

    def __init__(self) -> None:
        self.captures = 0
        self.replayed = 0

    def __call__(
        self,
        function: Callable[[], Any],
        state: Sequence[Tensor] = (),
        *,
        pool: Any = None,
        stream: Any = None,
        device: torch.device | None = None,
    ) -> Captured:
        saved = [(t, t.clone()) for t in state]
        with _Keeping() as kept:
            output = function()
        restore(saved)
        self.captures += 1

        def replay() -> None:
            self.replayed += 1
            with torch.inference_mode(False), torch.no_grad():
                for func, args, kwargs, held in kept.calls:
                    write_over(held, func(*args, **kwargs))

        return Captured(replay, output, 64)


class _Keeping(TorchDispatchMode):
    """Keeps every operator that runs, with its tensors and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out
