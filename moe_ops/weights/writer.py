"""Writes into layers, done beside the thread that reads names and checks tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from moe_ops.kernels.cpu.transpose import transpose, transposes

# What goes where: a view of the layer's tensor, and what is to be copied to it.
Copies = Sequence[tuple[Tensor, Tensor]]
THREADS = 2  # one seldom has the bandwidth of a memory; more take time from whoever else computes
AHEAD = 8  # batches a thread may be behind: of those the mapped tensors are kept


class Writer:
    """Copies batches of tensors into others, in no order.

    torch lets other threads of Python run while it copies, so that checks and copies overlap.
    Copies to other devices are made at once, in the caller's stream. What a batch raises is raised
    by a later `add`, or at the end.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="moe_ops.weights")
        self._running: deque[Future[None]] = deque()

    def add(self, copies: Copies) -> None:
        """Copy each second tensor to the first one, sooner or later."""
        inference = torch.is_inference_mode_enabled()
        if not all(target.is_cpu for target, _ in copies):
            _copy(copies, inference)
            return
        turned: list[tuple[Tensor, Tensor]] = []
        rest: list[tuple[Tensor, Tensor]] = []
        for copy in copies:
            (turned if transposes(*copy) else rest).append(copy)
        run = transpose(turned) if turned else None
        if run is not None:
            self._submit(run)
        else:
            rest += turned
        if rest:
            self._submit(_copy, rest, inference)

    def _submit(self, run: Callable[..., None], *args: object) -> None:
        self._running.append(self._pool.submit(run, *args))
        while len(self._running) > THREADS * AHEAD:
            self._running.popleft().result()

    def finish(self) -> None:
        """Wait for all copies."""
        while self._running:
            self._running.popleft().result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.finish()
        finally:
            self._pool.shutdown()


def _copy(copies: Copies, inference: bool) -> None:
    # Tensors of inference mode can be written in it alone, and a thread has a mode of its own.
    with torch.inference_mode(inference):
        torch._foreach_copy_([t for t, _ in copies], [s for _, s in copies])
