"""Sizes of calls that come again, and the graphs of each stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from moe_ops.arena import Arena, current_stream
from moe_ops.graphs.cuda_graph import Captured, GraphPool

TIMES = 3  # that a size has to come before it is captured
MOST_SIZES = 48  # of a stream, that are remembered

Key = tuple[Any, ...]  # what calls of one size have in common
Size = TypeVar("Size")


@dataclass(slots=True)
class Lane(Generic[Size]):
    """What one stream has to itself, as graphs of different streams may run at the same time."""

    lock: Any
    pool: GraphPool
    sizes: OrderedDict[Key, Size] = field(default_factory=OrderedDict)

    def keep(self, key: Key, size: Size) -> None:
        """Make a size the one that came last; one that came long ago is forgotten."""
        self.sizes[key] = size
        self.sizes.move_to_end(key)
        if len(self.sizes) > MOST_SIZES:
            self.sizes.popitem(last=False)


class Lanes(Generic[Size]):
    """The lanes of all streams, with graphs that `capture` makes."""

    def __init__(self, arena: Arena, capture: Callable[..., Captured]) -> None:
        self._arena = arena
        self._capture = capture
        self._lanes: dict[tuple[torch.device, int], Lane[Size]] = {}

    def of_current(self, device: torch.device) -> Lane[Size]:
        """That of the current stream of a device."""
        key = device, current_stream(device)
        if key not in self._lanes:
            new = Lane[Size](self._arena.lock(device), GraphPool(self._capture))
            self._lanes.setdefault(key, new)  # unless another thread just did
        return self._lanes[key]

    def sizes(self) -> list[tuple[Key, Size]]:
        """The sizes of all streams, with what their calls have in common, the newest at the end."""
        return [item for lane in list(self._lanes.values()) for item in list(lane.sizes.items())]

    def forget(self) -> None:
        """Forget all sizes, with their graphs."""
        for lane in list(self._lanes.values()):
            with lane.lock:
                lane.sizes.clear()
