"""CUDA graphs: of one call, and of a function of tokens for buckets of token counts."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from moe_ops.arena import Arena, Buffer, current_stream, shared
from moe_ops.passes.planning.plan import Plan

log = logging.getLogger("moe_ops")

WARMUPS = 2  # the first compiles and allocates, the second shows that neither happens again


class CaptureError(RuntimeError):
    """A call that cannot be captured; the message says why."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured call: `replay` repeats it on the current stream and writes `output` anew."""

    replay: Callable[[], None]
    output: Any
    bytes: int  # that the graph's memory pool grew by


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


def capturing() -> bool:
    """Whether this thread captures a graph, or warms up for it."""
    return getattr(_thread, "captures", False) or torch.cuda.is_current_stream_capturing()


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
            raise CaptureError(f"capture failed: {error}") from error
    finally:
        # A failed capture leaves its stream current.
        torch.cuda.set_stream(caller)
        caller.wait_stream(stream)
        restore(saved)
    return Captured(graph.replay, output, torch.cuda.memory_reserved() - before)


def end_capture(stream: torch.cuda.Stream) -> None:
    """Give torch's random numbers back, which a failed capture keeps until another one ends."""
    graph, mode = torch.cuda.CUDAGraph(), "thread_local"
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        torch.zeros((), device=stream.device)


def restore(saved: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in saved:
        tensor.copy_(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """One bucket: the calls that it served, the memory of its graph, or why it has none."""

    tokens: int
    hits: int
    bytes: int
    refusal: str | None = None


@dataclass(slots=True)
class _Bucket:
    graph: Captured | None
    refusal: str | None = None
    hits: int = 0


@dataclass(slots=True)
class _Lane:
    """What one stream has to itself, as graphs of different streams may run at the same time."""

    pool: Any
    inputs: list[Tensor] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    buckets: OrderedDict[int, _Bucket] = field(default_factory=OrderedDict)
    layout: tuple[Any, ...] = ()  # of the inputs, and where the fixed arguments are


class GraphRunner:
    """`function` through CUDA graphs, one for each bucket of token counts.

        run = moe_ops.capture(block, buckets=(1, 8, 64), varying=1)
        out = run(x_TD, w13_EFD, w2_EDI)

    The first `varying` arguments are tensors whose first dim counts tokens: they are copied into
    buffers and padded to the bucket, integers with -1 (an expert that is not here), floats with 0.
    The other arguments are used where they are. Tensors in the result whose first dim is the bucket
    are cut to the tokens; they hold until the next call on the same stream.

    A graph is captured on its first use or by `warmup`, and forgotten when a fixed argument or a
    buffer has another address, or when more than `most` others were used since. Weights changed in
    place need nothing. The function itself runs, for a reason that is logged once, where no bucket
    is large enough, where a gradient is asked for, and where a capture fails.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        buckets: Iterable[int],
        varying: int = 1,
        most: int = 32,
        arena: Arena = shared,
        capture: Callable[..., Captured] = capture_call,
    ) -> None:
        self.buckets = sorted(set(buckets))
        if not self.buckets or self.buckets[0] < 1:
            raise ValueError(f"buckets are token counts from 1 on, got {self.buckets}")
        if varying < 1:
            raise ValueError(f"varying={varying}: at least one argument has to count tokens")
        self.function = function
        self.varying = varying
        self.most = most
        self._arena = arena
        self._capture = capture
        self._lock = threading.RLock()
        self._lanes: dict[tuple[torch.device, int], _Lane] = {}
        self._told: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        T = args[0].shape[0]
        reason = self._refusal(args, T)
        if reason is not None:
            return self._uncaptured(reason, args)
        tokens = self.buckets[bisect_left(self.buckets, T)]
        with self._lock, torch.inference_mode(False), torch.no_grad():
            lane = self._lane(args)
            for buffer, value in zip(lane.inputs, args[: self.varying], strict=True):
                buffer[:T].copy_(value)
                buffer[T:tokens].fill_(_padding(buffer))
            bucket = self._bucket(lane, tokens, args)
            if bucket.graph is not None:
                bucket.hits += 1
                bucket.graph.replay()
                return _cut(bucket.graph.output, tokens, T)
        return self._uncaptured(str(bucket.refusal), args)

    def warmup(self, *args: Any) -> None:
        """Capture every bucket, the largest first, so that the smaller ones fit into its memory.

        `args` are those of any later call; their values do not matter.
        """
        if self._refusal(args, self.buckets[0]) is not None:
            raise ValueError(f"nothing to capture: {self._refusal(args, self.buckets[0])}")
        with self._lock, torch.inference_mode(False), torch.no_grad():
            lane = self._lane(args)
            for tokens in reversed(self.buckets):
                for buffer in lane.inputs:
                    buffer[:tokens].fill_(_padding(buffer))
                self._bucket(lane, tokens, args)

    def report(self) -> list[BucketReport]:
        """The buckets of all streams, in the order of their last use."""
        with self._lock:
            return [
                BucketReport(
                    tokens=tokens,
                    hits=bucket.hits,
                    bytes=0 if bucket.graph is None else bucket.graph.bytes,
                    refusal=bucket.refusal,
                )
                for lane in self._lanes.values()
                for tokens, bucket in lane.buckets.items()
            ]

    def reset(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self._lanes.clear()

    def _refusal(self, args: tuple[Any, ...], T: int) -> str | None:
        if T == 0:
            return "there are no tokens"
        if self.buckets[-1] < T:
            return f"{T} tokens are more than the largest bucket, {self.buckets[-1]}"
        if torch.is_grad_enabled():
            leaves = pytree.tree_leaves(args)
            if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
                return "a gradient is asked for; call it under torch.no_grad()"
        if torch.is_autocast_enabled(args[0].device.type):
            return "autocast is on, whose casts of weights a graph would not repeat"
        if args[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return "the caller captures a graph itself"
        return None

    def _uncaptured(self, reason: str, args: tuple[Any, ...]) -> Any:
        if reason not in self._told:
            self._told.add(reason)
            log.info("runs without a CUDA graph: %s", reason)
        return self.function(*args)

    def _lane(self, args: tuple[Any, ...]) -> _Lane:
        """The current stream's graphs, emptied if they are of other addresses."""
        device = args[0].device
        key = (device, current_stream(device))
        varying, fixed = args[: self.varying], pytree.tree_leaves(args[self.varying :])
        layout = (
            *((x.shape[1:], x.dtype) for x in varying),
            *(_identity(x) for x in fixed),
        )
        lane = self._lanes.get(key)
        if lane is None or lane.layout != layout or any(b.retired for b in lane.buffers):
            if lane is not None:
                log.info("CUDA graphs are captured again: a weight or a buffer has moved")
            pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
            lane = self._lanes[key] = _Lane(pool, layout=layout)
            for i, x in enumerate(varying):
                shape = (self.buckets[-1], *x.shape[1:])
                nbytes = torch.Size(shape).numel() * x.dtype.itemsize
                buffer = self._arena.take(f"input {i} of a graph", nbytes, device)
                lane.buffers.append(buffer)
                lane.inputs.append(buffer.view(shape, x.dtype))
        return lane

    def _bucket(self, lane: _Lane, tokens: int, args: tuple[Any, ...]) -> _Bucket:
        bucket = lane.buckets.get(tokens)
        if bucket is None:
            inputs = [x[:tokens] for x in lane.inputs]
            fixed = args[self.varying :]
            try:
                with torch.cuda.device_of(inputs[0]):  # which need not be the current one
                    graph = self._capture(lambda: self.function(*inputs, *fixed), pool=lane.pool)
                bucket = _Bucket(graph)
            except CaptureError as error:
                bucket = _Bucket(None, str(error))
            lane.buckets[tokens] = bucket
            while len(lane.buckets) > self.most:
                lane.buckets.popitem(last=False)
        lane.buckets.move_to_end(tokens)
        return bucket


def capture(
    function: Callable[..., Any], *, buckets: Iterable[int], varying: int = 1, most: int = 32
) -> GraphRunner:
    """`function` through CUDA graphs over buckets of token counts, see `GraphRunner`."""
    return GraphRunner(function, buckets=buckets, varying=varying, most=most)


def buckets_of(plan: Plan, most: int) -> tuple[int, ...]:
    """Buckets up to `most` tokens: the powers of two, and where the plan changes its mind."""
    powers = {1 << i for i in range(most.bit_length())}
    ends = {r.upto for c in plan.choices for r in c.ranges if r.upto is not None}
    return tuple(sorted(n for n in {*powers, *ends, most} if 0 < n <= most))


def _padding(x: Tensor) -> int:
    return 0 if x.is_floating_point() or x.dtype == torch.bool else -1


def _identity(x: Any) -> Any:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


def _cut(output: Any, tokens: int, T: int) -> Any:
    def cut(x: Any) -> Any:
        return x[:T] if isinstance(x, Tensor) and x.dim() and x.shape[0] == tokens else x

    return pytree.tree_map(cut, output)
