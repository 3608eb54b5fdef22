"""One CUDA graph: a call that is captured, and the memory that graphs share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.interop.interrupts import let_through
from moe_ops.ranks.peers import check

NO_GPU = "there is no CUDA GPU to capture on"
WARMUPS = 2  # the first compiles and allocates, the second shows that neither happens again


class CaptureError(RuntimeError):
    """A call that cannot be captured; the message says why."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured call: `replay` repeats it on the current stream and writes `output` anew."""

    replay: Callable[[], None]
    output: Any
    bytes: int  # that the graph's memory pool grew by


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """A context whose errors are why a call is not captured: it raises CaptureError, after `what`.
    Not those of memory, which may be made, and those that came from outside."""
    try:
        yield
    except (CaptureError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        let_through(error)
        raise CaptureError(f"{what}: {error!r}") from error


_one_at_a_time = threading.Lock()  # torch captures one graph at a time in a process
_thread = threading.local()


def capture_call(
    function: Callable[[], Any],
    state: Sequence[Tensor] = (),
    *,
    pool: Any = None,
    stream: Any = None,
    device: torch.device | None = None,
) -> Captured:
    """Run `function` to warm it up, then capture it; it has to read and write fixed buffers.

    The tensors of `state`, which the function changes, are as before afterwards. Graphs of one
    `pool` share memory, if they were captured on one `stream`, so they must not run at the same
    time, and each has to be the last to run when its output is read. `device` is the current GPU
    unless given. What the function raises before the capture is raised as it is.

    Threads wait for each other, and from the warm-up on: it may compile, which times kernels, and
    whoever waits for the whole of a GPU breaks the capture of any thread on it.

    Raises CaptureError if the capture fails. The process stays usable.
    """
    if device is not None and device.type != "cuda":
        raise CaptureError(f"CUDA graphs need tensors on a CUDA GPU, got {device}; move them there")
    if not torch.cuda.is_available():
        raise CaptureError("CUDA graphs need a CUDA GPU, and torch.cuda.is_available() is False")
    if capturing():
        raise CaptureError("a graph is being captured already; capture this one before, or not")
    with _one_at_a_time, torch.cuda.device(device):
        _thread.captures = True
        try:
            return _warmed_and_captured(function, state, pool, stream or torch.cuda.Stream())
        finally:
            _thread.captures = False


@contextmanager
def between_captures() -> Iterator[None]:
    """A context in which no thread captures a graph, or warms up for it."""
    with _one_at_a_time:
        yield


def capturing() -> bool:
    """Whether this thread captures a graph, or warms up for it."""
    if getattr(_thread, "captures", False):
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _warmed_and_captured(
    function: Callable[[], Any], state: Sequence[Tensor], pool: Any, stream: torch.cuda.Stream
) -> Captured:
    caller = torch.cuda.current_stream()
    saved = [(t, t.clone()) for t in state]
    stream.wait_stream(caller)
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                function()
                restore(saved)  # a second step from the last slot would be one too many
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as torch.cuda.graph does, or what it frees would be subtracted
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved()
        try:
            mode = "thread_local"  # other threads may use the GPU meanwhile, and allocate
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                output = function()
        except Exception as error:
            end_capture(stream)
            let_through(error)
            raise CaptureError(f"capture failed: {error}") from error
    finally:
        # A failed capture leaves its stream current.
        torch.cuda.set_stream(caller)
        caller.wait_stream(stream)
        restore(saved)

    def replay() -> None:
        check()
        graph.replay()

    return Captured(replay, output, torch.cuda.memory_reserved() - before)


def end_capture(stream: torch.cuda.Stream) -> None:
    """Give torch's random numbers back, which a failed capture keeps until another one ends."""
    graph, mode = torch.cuda.CUDAGraph(), "thread_local"
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        torch.zeros((), device=stream.device)


def restore(saved: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in saved:
        tensor.copy_(value)


class GraphPool:
    """The memory of graphs of which one runs at a time: what one computes on the way lies where
    another's does, as all are captured on one stream. What a replay leaves in it holds until the
    next replay of any other."""

    def __init__(self, capture: Callable[..., Captured] = capture_call) -> None:
        self._capture = capture
        self._memory: tuple[Any, Any] = (None, None)
        self._graphs: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()

    def captures_on(self, device: torch.device) -> bool:
        """Whether there is something to capture with on a device: a GPU, or a stand-in for it."""
        return device.type == "cuda" or self._capture is not capture_call

    def capture(
        self, function: Callable[[], Any], state: Sequence[Tensor] = (), *, device: torch.device
    ) -> Captured:
        """Capture a call in the memory of this pool; `capture_call` says the rest."""
        if not self._graphs:  # a pool without graphs is closed, though memory of it be in use
            self._memory = _new_memory(device)
        pool, stream = self._memory
        made = self._capture(function, state, pool=pool, stream=stream, device=device)
        self._graphs.add(made.replay)
        return made


def _new_memory(device: torch.device) -> tuple[Any, Any]:
    """A pool, and the stream on which its graphs are captured."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
