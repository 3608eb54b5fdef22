"""Forwards whose sizes come again, as captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from moe_ops.forward.masks import attention_of, masked, masks_of
from moe_ops.graphs.cuda_graph import (
    NO_GPU,
    Captured,
    CaptureError,
    capture_call,
    capturing,
    refusing,
)
from moe_ops.graphs.report import ForwardReport, of_sizes
from moe_ops.graphs.room import with_room
from moe_ops.graphs.runner import TIMES, Lane, Lanes, Size, put
from moe_ops.interop.told import Told

KEPT = "keys and values"
Decoder = Callable[..., Any]
T = TypeVar("T")


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
class Forward(Size):
    """Forwards of one size: what a graph keeps of them."""

    make: Callable[[Buffer, int], ModelOutput] | None = None  # an output like the model's
    kept: Kept | None = None


class Forwards:
    """The graphs of a model's forwards, by size: sequences, tokens, masked or not.

    Run from Python a forward takes the host some hundred microseconds a layer; a graph takes it
    nothing. From `MOST_TOKENS` of `calls.py` on the kernels take as long. A capture costs several
    forwards, so it waits until a size comes the third time; the sizes that came last are
    remembered. Sequences are padded at their ends, so that sizes share graphs.

    A graph ends with the states behind the last norm: heads and losses run after it. What a caller
    gets is a copy, which no later call changes. All graphs of a stream share memory.
    """

    def __init__(
        self,
        *,
        arena: Arena = shared,
        capture: Callable[..., Captured] = capture_call,
    ) -> None:
        self._lanes = Lanes(arena, capture, Forward)
        self.refused: Counter[str] = Counter()  # calls by the reason why no graph serves them
        self.told: Told | None = None  # of the sizes of the call that runs

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
        if isinstance(call, str):
            self.refused[call] += 1
            return decoder(**kwargs)
        lane = self._lanes.of_current(call.ids.device)
        if not lane.pool.captures_on(call.ids.device):
            self.refused[NO_GPU] += 1
            return decoder(**kwargs)
        with lane.lock:
            size = lane.sizes.came((attention_of(config), *call.key))
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
        return self._lanes.graphs

    def with_room(self, run: Callable[[], T]) -> T:
        """What `run` returns; if memory does not suffice it runs again, without the graphs."""
        return with_room(run, lambda: self._lanes.drop("forwards"))

    def forget(self) -> None:
        """Forget all graphs, and how often sizes came."""
        self._lanes.forget()

    def report(self) -> tuple[ForwardReport, ...]:
        """The sizes that came last, the newest at the end."""
        return of_sizes(self._lanes.items())

    def _take(self, size: Forward, purpose: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return size.take(self._lanes.arena, purpose, "forwards", shape, like)

    def _make(
        self,
        lane: Lane[Forward],
        size: Forward,
        decoders: tuple[Decoder, Decoder],
        config: Any,
        call: Call,
        out: Any,
        inputs: Inputs,
    ) -> None:
        """Capture a size, of which a call gave `out`, and its layers these inputs."""
        what = f"forwards of {len(call.ids)} x {call.tokens}"
        reason = output_refusal(out, call, config)
        if reason is None:
            size.graph, size.buffers, size.kept = None, {}, None
            size.make = like_output(out, call.tokens)
            if self.told is not None:
                self.told.try_out(len(call.ids), call.tokens)
            run = self._runner(size, decoders, config, call, out[STATES])
            reason = _difference(run, inputs)
        if reason is not None:
            size.refuse(reason, what)
        else:
            size.capture(lane.pool, run, device=call.ids.device, what=what)

    def _runner(
        self,
        size: Forward,
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

    def _keep(self, size: Forward, cache: Collected) -> None:
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

    def _fill(self, size: Forward, call: Call) -> None:
        B, S = call.ids.shape
        for purpose, x in (("ids", call.ids), ("mask", call.mask)):
            if x is not None:
                buffer = size.buffers[purpose].view((B, call.tokens), x.dtype)
                put(x, buffer[:, :S])
                buffer[:, S:].zero_()

    def _replayed(self, size: Forward, call: Call, config: Any) -> Any:
        self._fill(size, call)
        if self.told is not None:
            self.told.pad(len(call.ids), call.tokens)
        size.replay()
        assert size.make is not None
        S = call.ids.shape[1]
        out = size.make(size.buffers[STATES], S)
        if call.caches:
            out[CACHE] = self._filled(size, empty_cache(call, config), S)
        return out

    def _filled(self, size: Forward, cache: DynamicCache, tokens: int) -> DynamicCache:
        """An empty cache with a copy of what a graph kept of the first tokens."""
        kept = size.kept
        if kept is not None:
            flat = size.buffers[KEPT].view((kept.elements,), kept.dtype).clone()
            for index, (keys, values) in kept.places.items():
                view = Incoming()
                view.keys, view.values = (x.of(flat)[:, :, :tokens] for x in (keys, values))
                put_later(cache, index, view)
        return cache


def _difference(run: Callable[[], None], inputs: Inputs) -> str | None:
    """Run what is to be captured; why it cannot be, unless layers get what they got uncaptured, or
    None: models make masks and positions in ways of their own."""
    try:
        with watched() as padded, refusing("padded they fail"):
            run()
    except CaptureError as error:
        return str(error)
    name = unlike(padded, inputs)
    return None if name is None else f"padded their layers get another {name}"
