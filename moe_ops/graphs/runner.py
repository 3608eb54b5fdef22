"""What runs captured calls, whoever captures them: sizes that come again, the graph of each, and
what a stream has to itself."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from moe_ops.arena import Arena, Buffer, current_stream
from moe_ops.graphs.cuda_graph import Captured, CaptureError, GraphPool
from moe_ops.interop.interrupts import let_through

log = logging.getLogger("moe_ops")

TIMES = 3  # that a size has to come before it is captured
MOST_SIZES = 48  # of a stream, that are remembered


@dataclass(slots=True)
class Size:
    """Calls of one size: how often they came, and what repeats them, or why nothing does.

    A graph reads its inputs from buffers that stay: those of the arena, which it holds, and others
    that the captured function holds. `put` fills them.
    """

    seen: int = 0
    replays: int = 0
    graph: Captured | None = None
    refusal: str | None = None
    buffers: dict[str, Buffer] = field(default_factory=dict)  # of the arena, by what is in them

    @property
    def is_ready(self) -> bool:
        """Whether there is a graph, and none of its buffers was replaced."""
        return self.graph is not None and not self.is_retired

    @property
    def is_retired(self) -> bool:
        return any(buffer.retired for buffer in self.buffers.values())

    @property
    def bytes(self) -> int:
        """The memory of the graph."""
        return 0 if self.graph is None else self.graph.bytes

    def take(
        self, arena: Arena, purpose: str, whose: str, shape: tuple[int, ...], like: Tensor
    ) -> Tensor:
        """A contiguous buffer that the graph reads or writes, of a tensor's dtype and device. All
        graphs of a stream share it, so it holds what it does until the next of them runs."""
        # By powers of two, as each growth makes others capture again.
        nbytes = 1 << (max(1, math.prod(shape) * like.dtype.itemsize) - 1).bit_length()
        self.buffers[purpose] = buffer = arena.take(f"{purpose} of {whose}", nbytes, like.device)
        return buffer.view(shape, like.dtype)

    def capture(
        self,
        pool: GraphPool,
        function: Callable[[], Any],
        state: Sequence[Tensor] = (),
        *,
        device: torch.device,
        what: str = "",
    ) -> None:
        """Warm a call up and capture it; `refusal` says why there is no graph then. It is logged
        what came of `what`, unless that is empty. Raises what the call raises while it warms up."""
        self.graph, start = None, time.perf_counter()
        try:
            self.graph = pool.capture(function, state, device=device)
        except CaptureError as error:
            let_through(error)
            self.refuse(str(error), what)
            return
        self.refusal = None
        if what:
            log.info("a graph of %s took %.1f s", what, time.perf_counter() - start)

    def refuse(self, reason: str, what: str = "") -> None:
        """Have no graph, for a reason, which is logged."""
        self.refusal = reason
        self.buffers.clear()
        if what:
            log.warning("%s run uncaptured: %s", what, reason)

    def replay(self) -> Any:
        """Run the graph on what is in the buffers. Returns what the captured call gave, anew."""
        assert self.graph is not None
        self.graph.replay()
        self.replays += 1
        return self.graph.output


S = TypeVar("S", bound=Size)


class Recent(Generic[S]):
    """The sizes that came last, of calls that have a key in common. One that came long ago is
    forgotten, with its graph: where more than `most` take turns none comes often enough, and
    nothing is captured in vain."""

    def __init__(self, new: Callable[[], S], most: int) -> None:
        self._new = new
        self._most = most
        self._sizes: OrderedDict[Hashable, S] = OrderedDict()

    def came(self, key: Hashable) -> S:
        """The size of a call, which came once more. Raises TypeError for a key without a hash."""
        size = self._sizes.pop(key, None) or self._new()
        self._sizes[key] = size
        size.seen += 1
        if len(self._sizes) > self._most:
            _, last = self._sizes.popitem(last=False)
            if last.graph is not None:
                log.info(
                    "more than %d sizes take turns: a graph that served long ago is gone",
                    self._most,
                )
        return size

    def renew(self, key: Hashable) -> S:
        """A size in place of one that came, whose graph is of no use any more."""
        del self._sizes[key]
        return self.came(key)

    def forget(self, key: Hashable | None = None) -> None:
        """Forget a size, or all, with their graphs."""
        if key is None:
            self._sizes.clear()
        else:
            del self._sizes[key]

    def items(self) -> list[tuple[Any, S]]:
        """Sizes with their keys, the newest at the end."""
        return list(self._sizes.items())

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._sizes.values()))

    @property
    def graphs(self) -> int:
        return sum(size.graph is not None for size in self)


@dataclass(frozen=True, slots=True)
class Lane(Generic[S]):
    """What one stream has to itself, as graphs of different streams may run at the same time. Its
    lock is that of its buffers: held from filling them until the replay is queued."""

    lock: Any
    pool: GraphPool
    sizes: Recent[S]


class Lanes(Generic[S]):
    """The lanes of all streams, with graphs that `capture` makes."""

    def __init__(
        self,
        arena: Arena,
        capture: Callable[..., Captured],
        new: Callable[[], S],
        most: int | None = None,
    ) -> None:
        self.arena = arena
        self._capture = capture
        self._new = new
        self._most = most
        self._lanes: dict[tuple[torch.device, int], Lane[S]] = {}

    def of_current(self, device: torch.device) -> Lane[S]:
        """That of the current stream of a device."""
        key = device, current_stream(device)
        if key not in self._lanes:
            sizes = Recent(self._new, MOST_SIZES if self._most is None else self._most)
            new = Lane(self.arena.lock(device), GraphPool(self._capture), sizes)
            self._lanes.setdefault(key, new)  # unless another thread just did
        return self._lanes[key]

    def items(self) -> list[tuple[Any, S]]:
        """The sizes of all streams, with what their calls have in common, the newest at the end."""
        found: list[tuple[Any, S]] = []
        for lane in list(self._lanes.values()):
            with lane.lock:
                found += lane.sizes.items()
        return found

    @property
    def graphs(self) -> int:
        return sum(size.graph is not None for _, size in self.items())

    def drop(self, whose: str) -> str:
        """Forget all sizes, and free buffers that nobody uses then. Says so, for `with_room`."""
        graphs = self.graphs
        if graphs:
            self.forget()
        freed = self.arena.trim()
        if graphs:
            return f"the graphs of {whose} are dropped"
        return "buffers that nobody uses are freed" if freed else ""

    def forget(self) -> None:
        """Forget all sizes, with their graphs."""
        for lane in list(self._lanes.values()):
            with lane.lock:
                lane.sizes.forget()


def put(x: Tensor, buffer: Tensor) -> Tensor:
    """The buffer, with x in it: copied, unless it is there already."""
    there = x.data_ptr() == buffer.data_ptr() and x.stride() == buffer.stride()
    if not there or x.dtype != buffer.dtype or x.device != buffer.device:
        buffer.copy_(x)
    return buffer
