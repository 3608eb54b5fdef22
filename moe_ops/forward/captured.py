"""Forwards whose sizes come again, as captured graphs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.utils import ModelOutput

from moe_ops.arena import Arena, Buffer, shared
from moe_ops.forward.calls import (
    STATES,
    Call,
    Collected,
    call_of,
    empty_cache,
    is_dense,
    like_output,
    output_refusal,
    recorded,
)
from moe_ops.forward.inputs import Inputs, unlike, watched
from moe_ops.forward.layer_cache import CACHE, Incoming, put_later
from moe_ops.forward.masks import REPEATABLE, attention_of, masked, masks_of
from moe_ops.graphs.cuda_graph import Captured, CaptureError, capture_call, capturing
from moe_ops.graphs.lanes import TIMES, Lane, Lanes
from moe_ops.interop.interrupts import let_through

log = logging.getLogger("moe_ops")

KEPT = "keys and values"
Decoder = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardReport:
    """Forwards of one size, [sequences, tokens]: how often it came, how many calls a graph served,
    the memory of the graph, and why there is none where one could not be captured."""

    batch: int
    tokens: int
    masked: bool
    calls: int
    replays: int
    bytes: int
    refusal: str | None


@dataclass(slots=True)
class Place:
    """Where a layer's keys or values are in the buffer of all."""

    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass(slots=True)
class Kept:
    """The keys and values that a graph keeps, by layer, in a buffer of so many elements."""

    dtype: torch.dtype
    places: dict[int, tuple[Place, Place]] = field(default_factory=dict)
    elements: int = 0


@dataclass(slots=True)
class Size:
    """How often a size came, and what repeats it."""

    seen: int = 0
    replays: int = 0
    graph: Captured | None = None
    refusal: str | None = None
    buffers: dict[str, Buffer] = field(default_factory=dict)  # by what is in them
    make: Callable[[Buffer, int], ModelOutput] | None = None  # an output like the model's
    kept: Kept | None = None

    @property
    def is_ready(self) -> bool:
        return self.graph is not None and not any(b.retired for b in self.buffers.values())


class Forwards:
    """The graphs of a model's forwards, by size: sequences, tokens, masked or not.

    Run from Python a forward takes the host some hundred microseconds a layer; a graph takes it
    nothing. From `MOST_TOKENS` of `calls.py` on the kernels take as long. A capture costs several
    forwards, so it waits until a size comes the third time; the sizes that came last, as many as
    `lanes.py` says, are remembered. Sequences are padded at their ends, so that sizes share graphs.

    A graph ends with the states behind the last norm: heads and losses run after it. What a caller
    gets is a copy, which no later call changes. All graphs of a stream share memory.
    """

    def __init__(
        self,
        *,
        arena: Arena = shared,
        capture: Callable[..., Captured] = capture_call,
    ) -> None:
        self._arena = arena
        self._capture = capture
        self._lanes = Lanes[Size](arena, capture)

    def run(
        self,
        decoder: Decoder,
        unmasked: Decoder,
        config: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """What a decoder gives that `capture_refusal` does not refuse, by a graph if there is one.
        `unmasked` is the same decoder, whose layers get no mask."""
        ids = kwargs.get("input_ids")
        if isinstance(ids, Tensor) and ids.is_cuda and capturing():
            return recorded(decoder, unmasked, config, kwargs)
        call = call_of(kwargs, config)
        if call is None or not self._can_capture(call.ids.device, config):
            return decoder(**kwargs)
        lane, key = self._lanes.of_current(call.ids.device), (attention_of(config), *call.key)
        with lane.lock:
            size = lane.sizes.get(key) or Size()
            size.seen += 1
            lane.keep(key, size)
            if size.is_ready:
                return self._replayed(size, call, config)
        if size.seen < TIMES or size.refusal is not None:
            return decoder(**kwargs)
        with watched() as inputs:
            out = decoder(**kwargs)
        with lane.lock:
            if not size.is_ready:  # by another thread
                self._make(lane, size, (decoder, unmasked), config, call, out, inputs)
        return out

    @property
    def graphs(self) -> int:
        return sum(size.graph is not None for _, size in self._lanes.sizes())

    def forget(self) -> None:
        """Forget all graphs, and how often sizes came."""
        self._lanes.forget()

    def report(self) -> list[ForwardReport]:
        """The sizes that came last, the newest at the end."""
        return [
            ForwardReport(
                batch=key[1],
                tokens=key[2],
                masked=key[3],
                calls=size.seen,
                replays=size.replays,
                bytes=0 if size.graph is None else size.graph.bytes,
                refusal=size.refusal,
            )
            for key, size in self._lanes.sizes()
        ]

    def _can_capture(self, device: torch.device, config: Any) -> bool:
        if device.type != "cuda" and self._capture is capture_call:
            return False
        autocast = torch.is_autocast_enabled(device.type)
        return attention_of(config) in REPEATABLE and not autocast

    def _take(self, size: Size, purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer that a graph of this size reads or writes."""
        # By powers of two, as each growth makes others capture again.
        nbytes = 1 << (math.prod(shape) * like.dtype.itemsize - 1).bit_length()
        buffer = self._arena.take(f"{purpose} of forwards", nbytes, like.device)
        size.buffers[purpose] = buffer
        return buffer.view(shape, like.dtype)

    def _make(
        self,
        lane: Lane[Size],
        size: Size,
        decoders: tuple[Decoder, Decoder],
        config: Any,
        call: Call,
        out: Any,
        inputs: Inputs,
    ) -> None:
        """Capture a size, of which a call gave `out`, and its layers these inputs."""
        B, S = len(call.ids), call.tokens
        reason = output_refusal(out, call, config)
        if reason is None:
            size.graph, size.buffers, size.kept, start = None, {}, None, time.perf_counter()
            size.make = like_output(out, S)
            try:
                run = self._runner(size, decoders, config, call, out[STATES])
                _check(run, inputs)
                size.graph = lane.pool.capture(run, (), device=call.ids.device)
            except CaptureError as error:
                let_through(error)
                reason = str(error)
        size.refusal = reason
        if reason is not None:
            log.warning("forwards of %d x %d run uncaptured: %s", B, S, reason)
            return
        log.info("a graph of forwards of %d x %d took %.1f s", B, S, time.perf_counter() - start)

    def _runner(
        self,
        size: Size,
        decoders: tuple[Decoder, Decoder],
        config: Any,
        call: Call,
        like: Tensor,
    ) -> Callable[[], None]:
        """What runs a call on buffers, which hold this one."""
        B, S = len(call.ids), call.tokens
        ids, mask = self._take(size, "ids", (B, S), call.ids), call.mask
        if mask is not None:
            mask = self._take(size, "mask", (B, S), mask)
        states = self._take(size, STATES, (B, S, like.shape[2]), like)
        self._fill(size, call)
        decoder, unmasked = decoders
        layers = empty_cache(call, config).layers

        def run() -> None:
            cache = Collected(layers)
            given = {"input_ids": ids, "use_cache": call.caches, **call.constants}
            if call.caches:
                given[CACHE] = cache
            made = masks_of(config, like, mask, cache, ids)
            out = masked(decoder, unmasked, made, ids)(**given)
            states.copy_(out[STATES])
            self._keep(size, cache)

        return run

    def _keep(self, size: Size, cache: Collected) -> None:
        """Copy all keys and values into one buffer, in one launch for each few of them."""
        found = [
            (index, view.keys, view.values)
            for index, view in cache.views.items()
            if view.keys is not None and view.values is not None
        ]
        if not found:
            return
        kept, sources = Kept(found[0][1].dtype), []
        for index, keys, values in found:
            pair = []
            for x in (keys, values):
                x = x if is_dense(x) else x.contiguous()
                pair.append(Place(kept.elements, x.shape, x.stride()))
                kept.elements += x.numel()
                sources.append(x)
            kept.places[index] = pair[0], pair[1]
        size.kept = kept
        flat = self._take(size, KEPT, (kept.elements,), sources[0])
        targets = [place.of(flat) for pair in kept.places.values() for place in pair]
        torch._foreach_copy_(targets, sources)

    def _fill(self, size: Size, call: Call) -> None:
        B, S = call.ids.shape
        for purpose, x in (("ids", call.ids), ("mask", call.mask)):
            if x is not None:
                buffer = size.buffers[purpose].view((B, call.tokens), x.dtype)
                buffer[:, :S].copy_(x)
                buffer[:, S:].zero_()

    def _replayed(self, size: Size, call: Call, config: Any) -> Any:
        self._fill(size, call)
        assert size.graph is not None and size.make is not None
        size.graph.replay()
        size.replays += 1
        S = call.ids.shape[1]
        out = size.make(size.buffers[STATES], S)
        if call.caches:
            out[CACHE] = self._filled(size, empty_cache(call, config), S)
        return out

    def _filled(self, size: Size, cache: DynamicCache, tokens: int) -> DynamicCache:
        """An empty cache with a copy of what a graph kept of the first tokens."""
        kept = size.kept
        if kept is not None:
            flat = size.buffers[KEPT].view((kept.elements,), kept.dtype).clone()
            for index, (keys, values) in kept.places.items():
                view = Incoming()
                view.keys, view.values = (x.of(flat)[:, :, :tokens] for x in (keys, values))
                put_later(cache, index, view)
        return cache


def _check(run: Callable[[], None], inputs: Inputs) -> None:
    """Run what is to be captured. Raises CaptureError unless layers get what they got uncaptured:
    models make masks and positions in ways of their own."""
    try:
        with watched() as padded:
            run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        let_through(error)
        raise CaptureError(f"padded they fail: {error!r}") from error
    name = unlike(padded, inputs)
    if name is not None:
        raise CaptureError(f"padded their layers get another {name}")
