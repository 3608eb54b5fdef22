"""CUDA graphs: of one call, and of a function of tokens for buckets of token counts."""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_ops.arena import Arena, Buffer, current_stream, shared
from moe_ops.passes.addresses import identities, module_of, tensors_of
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


Key = tuple[int, tuple[Any, ...]]  # tokens of a bucket, and what its calls have in common


@dataclass(slots=True)
class _Bucket:
    """The graph of one layout and number of tokens, or why there is none."""

    inputs: list[Tensor]  # of so many tokens, in the buffers
    buffers: list[Buffer]
    graph: Captured | None = None
    refusal: str | None = None
    hits: int = 0
    used: int = 0  # by which call of the lane

    @property
    def retired(self) -> bool:
        return any(buffer.retired for buffer in self.buffers)

    def fill(self, values: Iterable[Tensor], T: int) -> None:
        """Put the first T tokens into the inputs, and padding after them."""
        for x, value in zip(self.inputs, values, strict=True):
            x[:T].copy_(value[:T])
            x[T:].fill_(0 if x.is_floating_point() or x.dtype == torch.bool else -1)


@dataclass(slots=True)
class _Lane:
    """What one stream has to itself, as graphs of different streams may run at the same time.

    Its graphs share a pool and are captured on one stream, without which they share no memory.
    """

    lock: Any  # of the buffers: held from copying the inputs to the replay
    buckets: dict[Key, _Bucket] = field(default_factory=dict)
    calls: int = 0
    pool: Any = None
    stream: Any = None


class GraphRunner:
    """`function` through CUDA graphs, one for each bucket of token counts.

        run = moe_ops.capture(block, buckets=(1, 8, 64), varying=1)
        out = run(x_TD, w13_EFD, w2_EDI)

    The first `varying` arguments are tensors whose first dim counts tokens: they are copied into
    buffers and padded to the bucket, integers with -1 (an expert that is not here), floats with 0.
    What else is read is used where it is: the other arguments, and parameters and buffers of a
    module that is one of them, is `function`, or has it as a method. No other tensors are seen,
    such as those of a closure: they have to stay where they are, and get no gradient.

    A tensor in the result with as many rows as the bucket is cut to the tokens, also one that has
    them by chance, such as counts of 8 experts in a bucket of 8: return that as a row, [1, 8].
    Results hold until the next call on the same stream, by any thread.

    A graph is captured on its first use or by `warmup`, for which the function runs several times:
    what it writes has to be the same each time. Weights changed in place need nothing; those at
    other addresses have graphs of their own, so that layers may take turns. Of a stream's graphs
    the `most` that were used last are kept. The function itself runs, for a reason that is logged
    once, where no bucket is large enough, where a gradient is asked for, and where a capture fails.
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
        self._module = module_of(function)
        self._arena = arena
        self._capture = capture
        self._lanes: dict[tuple[torch.device, int], _Lane] = {}
        self._told: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        T = self._tokens(args)
        fixed, layout = self._read(args)
        reason = self._refusal(args, fixed, T)
        if reason is not None:
            return self._uncaptured(reason, args)
        tokens = self.buckets[bisect_left(self.buckets, T)]
        lane = self._lane(args[0].device)
        with lane.lock, torch.inference_mode(False), torch.no_grad():
            bucket = self._bucket(lane, (tokens, layout), args, fixed, T)
            if bucket.graph is not None:
                bucket.hits += 1
                bucket.graph.replay()
                return _cut(bucket.graph.output, tokens, T)
        return self._uncaptured(str(bucket.refusal), args)

    def warmup(self, *args: Any) -> None:
        """Capture every bucket, the largest first, so that the smaller ones fit into its memory.

        `args` are those of any later call; the values of the first `varying` do not matter.
        """
        self._tokens(args)
        fixed, layout = self._read(args)
        reason = self._refusal(args, fixed, self.buckets[0])
        if reason is not None:
            raise ValueError(f"nothing to capture: {reason}")
        lane = self._lane(args[0].device)
        with lane.lock, torch.inference_mode(False), torch.no_grad():
            for tokens in reversed(self.buckets):
                self._bucket(lane, (tokens, layout), args, fixed, 0)

    def report(self) -> list[BucketReport]:
        """The buckets, stream by stream in the order of their last use."""
        found = []
        for lane in list(self._lanes.values()):
            with lane.lock:
                found += [
                    BucketReport(
                        tokens=tokens,
                        hits=bucket.hits,
                        bytes=0 if bucket.graph is None else bucket.graph.bytes,
                        refusal=bucket.refusal,
                    )
                    for (tokens, _), bucket in sorted(
                        lane.buckets.items(), key=lambda item: item[1].used
                    )
                ]
        return found

    def reset(self) -> None:
        """Forget all graphs."""
        for lane in list(self._lanes.values()):
            with lane.lock:
                lane.buckets.clear()

    def _tokens(self, args: tuple[Any, ...]) -> int:
        rows = [x.shape[0] for x in args[: self.varying]]
        if len(set(rows)) != 1:
            raise ValueError(
                f"the first {self.varying} arguments have to count the same tokens, got {rows} "
                "rows; give each a row a token, or another `varying`"
            )
        return rows[0]

    def _read(self, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """What is read where it is, and what calls have in common that a graph serves."""
        leaves, structure = pytree.tree_flatten((self._module, args[self.varying :]))
        modules = [x for x in leaves if isinstance(x, nn.Module)]
        fixed = [*leaves, *(t for module in modules for t in tensors_of(module))]
        varying = ((x.shape[1:], x.dtype) for x in args[: self.varying])
        return fixed, (structure, *varying, *identities(fixed))

    def _refusal(self, args: tuple[Any, ...], fixed: list[Any], T: int) -> str | None:
        if T == 0:
            return "there are no tokens"
        if self.buckets[-1] < T:
            return f"{T} tokens are more than the largest bucket, {self.buckets[-1]}"
        if torch.is_grad_enabled():
            read = (*args[: self.varying], *fixed)
            if any(isinstance(x, Tensor) and x.requires_grad for x in read):
                return "a gradient is asked for; call it under torch.no_grad()"
        if torch.is_autocast_enabled(args[0].device.type):
            return "autocast is on, whose casts of weights a graph would not repeat"
        if args[0].is_cuda and capturing():
            return "the caller captures a graph itself"
        return None

    def _uncaptured(self, reason: str, args: tuple[Any, ...]) -> Any:
        if reason not in self._told:
            self._told.add(reason)
            log.info("runs without a CUDA graph: %s", reason)
        return self.function(*args)

    def _lane(self, device: torch.device) -> _Lane:
        key = (device, current_stream(device))
        return self._lanes.get(key) or self._lanes.setdefault(key, _Lane(self._arena.lock(device)))

    def _bucket(
        self, lane: _Lane, key: Key, args: tuple[Any, ...], fixed: list[Any], T: int
    ) -> _Bucket:
        """The bucket of a call: its inputs hold T tokens, and it is captured, if it can be."""
        try:
            bucket = lane.buckets.get(key)  # once: a key may hold hundreds of addresses
        except TypeError as error:
            return _Bucket([], [], refusal=f"an argument may change without being seen to: {error}")
        if bucket is None or bucket.retired:
            bucket = self._new_bucket(lane, key[0], args)
        bucket.fill(args[: self.varying], T)
        if bucket.graph is None and bucket.refusal is None:
            self._capture_bucket(lane, bucket, args, fixed)
            lane.buckets[key] = bucket
        lane.calls += 1
        bucket.used = lane.calls
        if len(lane.buckets) > self.most:
            log.info("more CUDA graphs than most=%d: the one used longest ago is gone", self.most)
            del lane.buckets[min(lane.buckets, key=lambda key: lane.buckets[key].used)]
        return bucket

    def _new_bucket(self, lane: _Lane, tokens: int, args: tuple[Any, ...]) -> _Bucket:
        """A bucket without a graph. Those whose buffers were replaced, also by this, are gone."""
        new, device = _Bucket([], []), args[0].device
        for i, x in enumerate(args[: self.varying]):
            shape = (self.buckets[-1], *x.shape[1:])
            nbytes = torch.Size(shape).numel() * x.dtype.itemsize
            new.buffers.append(self._arena.take(f"input {i} of a graph", nbytes, device))
            new.inputs.append(new.buffers[-1].view(shape, x.dtype)[:tokens])
        for key in [key for key, bucket in lane.buckets.items() if bucket.retired]:
            log.info("a CUDA graph of %d tokens is gone: its buffers were replaced", key[0])
            del lane.buckets[key]
        return new

    def _capture_bucket(
        self, lane: _Lane, bucket: _Bucket, args: tuple[Any, ...], fixed: list[Any]
    ) -> None:
        inputs, rest = bucket.inputs, args[self.varying :]
        device = inputs[0].device
        if not any(other.graph for other in lane.buckets.values()):
            lane.pool, lane.stream = _memory(device)  # a pool without graphs is closed
        # A function may write only there into tensors that were made there, such as a cache.
        inference = any(isinstance(x, Tensor) and x.is_inference() for x in fixed)
        try:
            with torch.inference_mode(inference):
                bucket.graph = self._capture(
                    lambda: self.function(*inputs, *rest),
                    pool=lane.pool,
                    stream=lane.stream,
                    device=device,
                )
        except CaptureError as error:
            bucket.refusal = str(error)


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


def _memory(device: torch.device) -> tuple[Any, Any]:
    """A pool, and the stream on which its graphs are captured."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


def _cut(output: Any, tokens: int, T: int) -> Any:
    def cut(x: Any) -> Any:
        return x[:T] if isinstance(x, Tensor) and x.dim() and x.shape[0] == tokens else x

    return pytree.tree_map(cut, output)
