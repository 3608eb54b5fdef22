"""Compiled code whose calls of sizes that come again are captured as CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.arena import Arena, shared
from moe_ops.graphs.cuda_graph import NO_GPU, Captured, capture_call, capturing
from moe_ops.graphs.report import SizeReport
from moe_ops.graphs.room import with_room
from moe_ops.graphs.runner import TIMES, Lane, Lanes, Size, put

PLAIN = (Tensor, nn.Parameter)


@dataclass(slots=True)
class Calls(Size):
    """Calls of one size, what is copied for them and what stays where it is."""

    shapes: tuple[tuple[int, ...], ...] = ()
    addresses: tuple[int, ...] = ()  # of what stays where it is
    inputs: dict[int, Tensor] = field(default_factory=dict)  # buffers, by place in the call
    staying: frozenset[int] = frozenset()  # the places of results that are inputs that stay


class Repeated:
    """Calls `function`, code that torch.compile made of a graph, and captures sizes that come a
    third time.

    `stays` has the places of inputs that stay where they are, parameters and buffers: a graph reads
    them there, and is made anew where one came to lie elsewhere. Other tensors are copied into
    buffers that graphs share. What a caller gets is a copy, which no later call changes. Not
    captured are calls that ask for a gradient, change an input that does not stay, give a part of
    one, or that CUDA refuses; `report` says why.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        stays: frozenset[int],
        *,
        arena: Arena = shared,
        capture: Callable[..., Captured] = capture_call,
    ) -> None:
        self._function = function
        self._stays = stays
        self._capture = capture
        self._lanes = Lanes(arena, capture, Calls)
        self.refused: Counter[str] = Counter()  # calls by the reason why no graph serves them

    def __call__(self, *args: Any) -> Any:
        device = self._device(args)
        if isinstance(device, str):
            self.refused[device] += 1
            return self._function(*args)
        lane = self._lanes.of_current(device)
        return with_room(lambda: self._run(lane, args), self._drop, lambda: self._function(*args))

    def _drop(self) -> str:
        if not self._lanes.graphs:
            return ""
        self.forget()
        self._lanes.arena.trim()
        return "the graphs of a compiled function are dropped"

    def forget(self) -> None:
        """Forget all graphs, and how often sizes came."""
        self._lanes.forget()

    def report(self) -> list[SizeReport]:
        """The sizes that came last, the newest at the end."""
        return [
            SizeReport(
                shapes=size.shapes,
                calls=size.seen,
                replays=size.replays,
                bytes=size.bytes,
                refusal=size.refusal,
            )
            for _, size in self._lanes.items()
        ]

    def _device(self, args: Sequence[Any]) -> torch.device | str:
        """Where a call could be captured, or why it cannot be."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        devices = {x.device for x in tensors}
        if len(devices) != 1:
            return "its tensors are on several devices" if devices else "it has no tensors"
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return "a gradient is asked for"
        (device,) = devices
        if device.type != "cuda" and self._capture is capture_call:
            return NO_GPU
        if device.type == "cuda" and capturing():
            return "the caller captures a graph itself"
        return device

    def _run(self, lane: Lane[Calls], args: Sequence[Any]) -> Any:
        with lane.lock:
            size = self._came(lane, args)
            if size.is_ready:
                for i, buffer in size.inputs.items():
                    put(args[i], buffer)
                return [
                    x.clone() if isinstance(x, Tensor) and i not in size.staying else x
                    for i, x in enumerate(size.replay())
                ]
        if size.seen < TIMES or size.refusal is not None:
            return self._function(*args)
        before = [_version(x) for x in args]
        out = self._function(*args)
        changed = [i for i, x in enumerate(args) if _version(x) != before[i]]
        with lane.lock:
            self._make(lane, size, args, changed, out)
        return out

    def _came(self, lane: Lane[Calls], args: Sequence[Any]) -> Calls:
        key = tuple(_identity(x) for x in args)
        addresses = tuple(args[i].data_ptr() for i in self._stays)
        size = lane.sizes.came(key)
        if size.seen > 1 and size.addresses != addresses:  # weights came to lie elsewhere
            size = lane.sizes.renew(key)
        if size.seen == 1:
            copied = (x for i, x in enumerate(args) if i not in self._stays)
            size.shapes = tuple(tuple(x.shape) for x in copied if isinstance(x, Tensor))
            size.addresses = addresses
        return size

    def _make(
        self, lane: Lane[Calls], size: Calls, args: Sequence[Any], changed: Sequence[int], out: Any
    ) -> None:
        """Capture a size, of which a call gave `out` and changed inputs at these places."""
        what = f"calls of a compiled function of {size.shapes}"
        reason = self._refusal(args, changed, out)
        if reason is not None:
            size.refuse(reason, what)
            return
        held = {_storage(args[i]) for i in self._stays}
        tensors = [(i, x) for i, x in enumerate(out) if isinstance(x, Tensor)]
        size.staying = frozenset(i for i, x in tensors if _storage(x) in held)
        with torch.inference_mode(False), torch.no_grad():
            size.inputs = {
                i: self._input(size, i, x)
                for i, x in enumerate(args)
                if isinstance(x, Tensor) and i not in self._stays
            }
            call = [size.inputs.get(i, x) for i, x in enumerate(args)]
            # Of tensors of inference mode nobody knows whether they were changed.
            state = [args[i] for i in self._stays if i in changed or args[i].is_inference()]
            device = next(x.device for x in args if isinstance(x, Tensor))
            size.capture(lane.pool, lambda: self._function(*call), state, device=device, what=what)
        if size.refusal is not None:
            size.inputs = {}

    def _input(self, size: Calls, place: int, x: Tensor) -> Tensor:
        """A copy of an input at a place that stays, with the strides of a clone."""
        if type(x) not in PLAIN or x.layout != torch.strided:
            return x.clone()
        like = torch.empty_like(x, device="meta")
        arena, shape = self._lanes.arena, (like.numel(),)
        buffer = size.take(arena, f"input {place}", "compiled calls", shape, x)
        return buffer.as_strided(like.shape, like.stride()).copy_(x)

    def _refusal(self, args: Sequence[Any], changed: Sequence[int], out: Any) -> str | None:
        others = [i for i in changed if i not in self._stays]
        if others:
            return f"it changes its argument {others[0]}"
        if not isinstance(out, (list, tuple)):
            return f"it gives a {type(out).__name__}"
        copied = [x for i, x in enumerate(args) if i not in self._stays]
        held = {_storage(x) for x in copied if isinstance(x, Tensor)}
        if any(_storage(x) in held for x in out if isinstance(x, Tensor)):
            return "it gives a part of an argument"
        return None


def _identity(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return type(x), x


def _version(x: Any) -> int:
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
