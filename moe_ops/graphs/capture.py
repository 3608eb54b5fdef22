"""CUDA graphs of a function of tokens, for buckets of token counts."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from moe_ops.arena import Arena, shared
from moe_ops.checks.options import check_int, check_ints, check_type
from moe_ops.checks.signature import described
from moe_ops.graphs.addresses import identities, module_of, state_of
from moe_ops.graphs.cuda_graph import Captured, capture_call, capturing
from moe_ops.graphs.report import BucketReport
from moe_ops.graphs.room import with_room
from moe_ops.graphs.runner import Lane, Lanes, Size, put
from moe_ops.interop.switches import BY_SEQUENCE
from moe_ops.interop.told import padded, told_of
from moe_ops.layer import MoELayer
from moe_ops.planning.plan import Plan

log = logging.getLogger("moe_ops")


Key = tuple[int, tuple[Any, ...]]  # tokens of a bucket, and what its calls have in common


@dataclass(slots=True)
class _Bucket(Size):
    """The graph of one layout and number of tokens, or why there is none."""

    inputs: list[Tensor] = field(default_factory=list)  # of so many tokens, in the buffers
    part: Tensor | None = None  # of its tokens that are those of the call, for layers that count

    def fill(self, values: Iterable[Tensor], T: int) -> None:
        """Put the first T tokens into the inputs, and padding after them."""
        for x, value in zip(self.inputs, values, strict=True):
            put(value[:T], x[:T])
            x[T:].fill_(0 if x.is_floating_point() or x.dtype == torch.bool else -1)
        if self.part is not None:
            self.part[0].fill_(T)


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
    what it writes has to be the same each time, but for the `loads` of layers that are seen, which
    count the tokens of calls, once, and no padding. Weights changed in place need nothing; those at
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
        if not callable(function):
            raise TypeError(f"function must be one of tokens, got {described(function)}")
        self.buckets = sorted(set(check_ints("buckets", buckets, least=1)))
        check_int("varying", varying)
        if varying < 1:
            raise ValueError(f"varying={varying}: at least one argument has to count tokens")
        check_int("most", most, least=1)
        self.function = function
        self.varying = varying
        self._module = module_of(function)
        self._lanes = Lanes(arena, capture, _Bucket, most)
        self.refused: Counter[str] = Counter()  # calls by the reason why no graph served them

    def __call__(self, *args: Any) -> Any:
        T = self._tokens(args)
        fixed, layout = self._read(args)
        reason = self._refusal(args, fixed, T)
        if reason is not None:
            return self._uncaptured(reason, args)
        tokens = self.buckets[bisect_left(self.buckets, T)]
        told = None if self._module is None else told_of(self._module)

        def run() -> Any:
            lane = self._lanes.of_current(args[0].device)
            with lane.lock, torch.inference_mode(False), torch.no_grad():
                bucket = self._bucket(lane, (tokens, layout), args, fixed, T)
                if bucket.graph is not None:
                    return _cut(bucket.replay(), tokens, T)
            return self._uncaptured(str(bucket.refusal), args)

        with padded(told, args[: self.varying], tokens):
            return with_room(run, self._drop)

    def warmup(self, *args: Any) -> None:
        """Capture every bucket, the largest first, so that the smaller ones fit into its memory.

        `args` are those of any later call; the values of the first `varying` do not matter. Raises
        ValueError while routings of the module are recorded or replayed: that is of calls.
        """
        self._tokens(args)
        if self._module is not None and told_of(self._module) is not None:
            raise ValueError(
                "a warm-up is no call whose routings could be recorded or replayed; leave it out, "
                "and the first call of a size captures its graph"
            )
        fixed, layout = self._read(args)
        reason = self._refusal(args, fixed, self.buckets[0])
        if reason is not None:
            raise ValueError(f"nothing to capture: {reason}")
        lane = self._lanes.of_current(args[0].device)
        with lane.lock, torch.inference_mode(False), torch.no_grad():
            for tokens in reversed(self.buckets):
                self._bucket(lane, (tokens, layout), args, fixed, 0)

    def report(self) -> list[BucketReport]:
        """The buckets, stream by stream in the order of their last use."""
        return [
            BucketReport(
                tokens=tokens, hits=bucket.replays, bytes=bucket.bytes, refusal=bucket.refusal
            )
            for (tokens, _), bucket in self._lanes.items()
        ]

    def reset(self) -> None:
        """Forget all graphs."""
        self._lanes.forget()

    def _drop(self) -> str:
        return self._lanes.drop("a captured function")

    def _tokens(self, args: tuple[Any, ...]) -> int:
        try:
            rows = [x.shape[0] for x in args[: self.varying]]
        except (AttributeError, IndexError):  # looked at after the fact, as calls are to be quick
            got = ", ".join(map(described, args[: self.varying]))
            raise TypeError(
                f"the first {self.varying} arguments have to be tensors of a row a token, by "
                f"`varying`, got {got}"
            ) from None
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
        told = () if self._module is None else (type(told_of(self._module)),)
        fixed = [*leaves, *told, *(t for module in modules for t in state_of(module))]
        varying = ((x.shape[1:], x.dtype) for x in args[: self.varying])
        return fixed, (structure, *varying, *identities(fixed))

    def _refusal(self, args: tuple[Any, ...], fixed: list[Any], T: int) -> str | None:
        if T == 0:
            return "there are no tokens"
        if self.buckets[-1] < T:
            return f"{T} tokens are more than the largest bucket, {self.buckets[-1]}"
        if any(isinstance(x, tuple) and x[:1] == (BY_SEQUENCE,) for x in fixed):
            return f"{BY_SEQUENCE}, which padded tokens would be counted among"
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
        self.refused[reason] += 1
        if self.refused[reason] == 1:
            log.info("runs without a CUDA graph: %s", reason)
        return self.function(*args)

    def _bucket(
        self, lane: Lane[_Bucket], key: Key, args: tuple[Any, ...], fixed: list[Any], T: int
    ) -> _Bucket:
        """The bucket of a call: its inputs hold T tokens, and it is captured, if it can be."""
        try:
            bucket = lane.sizes.came(key)  # once: a key may hold hundreds of addresses
        except TypeError as error:
            return _Bucket(refusal=f"an argument may change without being seen to: {error}")
        if bucket.is_retired:
            bucket = lane.sizes.renew(key)
        if bucket.refusal is not None:
            return bucket
        if not bucket.inputs:
            self._give_inputs(lane, bucket, key[0], args)
        bucket.fill(args[: self.varying], T)
        if bucket.graph is None:
            self._capture(lane, bucket, args, fixed, T)
        return bucket

    def _give_inputs(
        self, lane: Lane[_Bucket], bucket: _Bucket, tokens: int, args: tuple[Any, ...]
    ) -> None:
        """Give a bucket its inputs. Graphs whose buffers were replaced, also by this, are gone."""
        for i, x in enumerate(args[: self.varying]):
            shape, purpose = (self.buckets[-1], *x.shape[1:]), f"input {i} of a graph"
            nbytes = torch.Size(shape).numel() * x.dtype.itemsize
            buffer = self._lanes.arena.take(purpose, nbytes, args[0].device)
            bucket.buffers[purpose] = buffer
            bucket.inputs.append(buffer.view(shape, x.dtype)[:tokens])
        for key, other in lane.sizes.items():
            if other.is_retired:
                log.info("a CUDA graph of %d tokens is gone: its buffers were replaced", key[0])
                lane.sizes.forget(key)

    def _capture(
        self, lane: Lane[_Bucket], bucket: _Bucket, args: tuple[Any, ...], fixed: list[Any], T: int
    ) -> None:
        inputs, rest, function = bucket.inputs, args[self.varying :], self.function
        counting, part = _counting_layers(fixed), None
        if counting:
            part = torch.tensor([T, inputs[0].shape[0]], device=inputs[0].device)
        bucket.part = part
        # A function may write only there into tensors that were made there, such as a cache.
        inference = any(isinstance(x, Tensor) and x.is_inference() for x in fixed)
        # inference_mode(False) switches gradients on, also inside no_grad.
        with torch.inference_mode(inference), torch.no_grad():
            bucket.capture(
                lane.pool,
                lambda: _count_part(part, counting, function, *inputs, *rest),
                [t for layer in counting for t in _counts(layer)],
                device=inputs[0].device,
            )
        if bucket.refusal is not None:
            bucket.inputs = []


def _counting_layers(values: Iterable[Any]) -> list[MoELayer]:
    """The layers in these values' modules that count how many pairs their experts get."""
    modules = (m for x in values if isinstance(x, nn.Module) for m in x.modules())
    layers = (m for m in modules if isinstance(m, MoELayer) and m.loads is not None)
    return list(dict.fromkeys(layers))


def _counts(layer: MoELayer) -> list[Tensor]:
    found = [layer.loads, layer.physical_loads, layer.counted_part]
    return [t for t in found if t is not None]


def _count_part(
    part: Tensor | None, layers: list[MoELayer], function: Callable[..., Any], *args: Any
) -> Any:
    """`function(*args)`, in which these layers count this part of their tokens."""
    if part is None:
        return function(*args)
    for layer in layers:
        assert layer.counted_part is not None
        layer.counted_part.copy_(part)
    output = function(*args)
    for layer in layers:
        assert layer.counted_part is not None
        layer.counted_part.fill_(1)
    return output


def capture(
    function: Callable[..., Any], *, buckets: Iterable[int], varying: int = 1, most: int = 32
) -> GraphRunner:
    """`function` through CUDA graphs over buckets of token counts, see `GraphRunner`."""
    return GraphRunner(function, buckets=buckets, varying=varying, most=most)


class _HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


def buckets_of(plan: Plan | _HasPlan, most: int) -> tuple[int, ...]:
    """Buckets up to `most` tokens: the powers of two, and where the plan changes its mind.

    Takes a plan, or what `moe_ops.explain` returned. Raises TypeError for anything else.
    """
    found: Any = getattr(plan, "plan", plan)
    check_type("plan", found, Plan, "a plan or what moe_ops.explain returned")
    check_int("most", most, least=1)
    powers = {1 << i for i in range(most.bit_length())}
    ends = {r.upto for c in found.choices for r in c.ranges if r.upto is not None}
    return tuple(sorted(n for n in {*powers, *ends, most} if 0 < n <= most))


def _cut(output: Any, tokens: int, T: int) -> Any:
    def cut(x: Any) -> Any:
        return x[:T] if isinstance(x, Tensor) and x.dim() and x.shape[0] == tokens else x

    return pytree.tree_map(cut, output)
