"""Replays of CUDA graphs in which ranks wait for each other: a rank that does not come is named.

NCCL's own limits hold for what is launched eagerly. A collective in a replay has none: without a
watch the ranks that are there wait for ever.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import torch

from moe_ops.ranks.groups import Group, resolve

POLL_SECONDS = 0.05


class Watch:
    """Raise, within a limit, for ranks of a group that do not replay what the others replay.

        with Watch(group, seconds=30) as watch:
            for step in ...:
                graph.replay()
                watch.launched()
                watch.check()  # before what the replay gave is used elsewhere

    Every rank of the group makes one, on its own GPU. A thread looks whether replays end. If one
    takes longer than `seconds`, it reads from torch.distributed's store how far the other ranks
    are, and aborts the group, so that what waits on the GPU ends; what it wrote means nothing. Then
    `launched` and `check` raise RuntimeError with the ranks that launched fewer replays, or with
    how far all of them are. The group is not to be used any more. What waits for stores of other
    GPUs (`push`) knows nothing of the abort, and ends after the timeout of the group.

    NCCL tells the GPU at once, but does not return from an abort before all CUDA graphs that hold
    the group are gone. Another thread waits for that, which no one else does.
    """

    def __init__(
        self, group: str, *, seconds: float = 30.0, event: Callable[[], Any] = torch.cuda.Event
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds={seconds} must be above 0")
        self._group, self._seconds, self._event = Group.of(group), seconds, event
        store = torch.distributed.distributed_c10d._get_default_store()
        # The first watch of every rank, the second one, ...: what an earlier one said is not read.
        number = store.add(f"moe_ops.watches/{group}/{self._group.rank}", 1)
        self._store = torch.distributed.PrefixStore(f"moe_ops.watch/{group}/{number}", store)
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._pending: deque[tuple[Any, float]] = deque()
        self._launched = self._ended = 0
        self._error = ""
        self._closed = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="moe_ops.watch", daemon=True)
        self._thread.start()

    def launched(self) -> None:
        """Say that a replay was launched on the current stream. Raises as `check` does."""
        self.check()
        event = self._event()
        event.record()
        self._pending.append((event, time.monotonic()))
        self._launched += 1

    def check(self) -> None:
        """Raise RuntimeError if a replay did not end in time."""
        if self._error:
            raise RuntimeError(self._error)

    def close(self) -> None:
        """Stop watching. What is under way is watched no longer."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:  # of a store that is gone, say: the caller has to know
            self._error = f"the watch of {self._group.name!r} ended by {error!r}"

    def _look(self) -> None:
        self._on_its_device()
        since, said = time.monotonic(), (0, 0)
        while not self._closed.wait(POLL_SECONDS):
            while self._pending and self._pending[0][0].query():
                self._pending.popleft()
                self._ended += 1
                since = time.monotonic()
            if (self._launched, self._ended) != said:
                said = self._publish()
            # One after the other: a replay begins when it is launched and the one before has ended.
            if self._pending:
                waited = time.monotonic() - max(since, self._pending[0][1])
                if waited > self._seconds:
                    group, self._error = resolve(self._group.name), self._describe()
                    abort = partial(self._abort, group)
                    threading.Thread(target=abort, name="moe_ops.abort", daemon=True).start()
                    return
        self._publish()

    def _abort(self, group: Any) -> None:
        try:
            self._on_its_device()
            group.abort()
        except Exception as error:  # the caller has to know, and what waits does so still
            self._error += f" (to abort it failed: {error!r})"

    def _on_its_device(self) -> None:
        """What a thread that asks the GPU says first."""
        if self._device is not None:
            torch.cuda.set_device(self._device)
            _let_others_capture()

    def _publish(self) -> tuple[int, int]:
        said = self._launched, self._ended
        self._store.set(str(self._group.rank), f"{said[0]} {said[1]}")
        return said

    def _describe(self) -> str:
        """Which ranks are behind, by what each said last."""
        launched: dict[int, int] = {}
        for rank in range(self._group.size):
            if rank == self._group.rank:
                launched[rank] = self._launched
            elif self._store.check([str(rank)]):
                launched[rank] = int(self._store.get(str(rank)).split()[0])
            else:
                launched[rank] = 0
        step = self._ended + 1  # the first that did not end
        behind = [rank for rank, count in launched.items() if count < step]
        each = ", ".join(f"rank {rank}: {count}" for rank, count in launched.items())
        who = f"rank {', '.join(map(str, behind))} did not launch it" if behind else "all did"
        return (
            f"replay {step} of the group {self._group.name!r} did not end within "
            f"{self._seconds:g} s; {who} (launched by {each}). The group was aborted, and what "
            "the replay wrote means nothing; look at the log of those ranks, and start the group "
            "again"
        )


def _let_others_capture() -> None:
    """Let this thread ask for events while another one captures a graph, which would end in an
    error otherwise, as what captures forbids it to all threads that do not say that they know."""
    relaxed = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED, of the CUDA driver API
    failed = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    if failed:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode returned the CUDA error {failed}")
