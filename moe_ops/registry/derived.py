"""What is made of tensors that are seldom written to, at addresses that stay: made once, and anew
after each write.

A write is seen in two ways. An eager call compares the versions of what it is given. A CUDA graph
runs no code of the host, so whoever writes to what an expert has between replays, as moves and
loads do, says so by `written`, and what follows is made anew then. Other writes are seen by the
next eager call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moe_ops.registry.backend import PLAIN

Place = tuple[str, int]  # the device and the address of a tensor
State = tuple[int, int]  # where a tensor is, and how often it was written to


class Derived:
    """What a function writes of some sources, which it is given as aliases, to where it keeps it.
    It lives as long as whoever holds it. Of sources it holds the memory, and not the tensors."""

    __slots__ = ("__weakref__", "_aliases", "_seen", "_sources", "_write")

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._sources: tuple[weakref.ref[Tensor], ...] = ()
        self._seen: tuple[State, ...] | None = None
        self._aliases: tuple[Tensor, ...] = ()

    def follow(self, *sources: Tensor) -> None:
        """Make it of these, unless it was made of the same tensors, none of which was written to
        since; from now on also after writes that `written` tells of."""
        state = _state(sources)
        same = [of() is t for of, t in zip(self._sources, sources, strict=False)]
        if state is not None and state == self._seen and len(same) == len(sources) and all(same):
            return
        self._sources = tuple(map(weakref.ref, sources))
        self._aliases = tuple(map(alias, sources))
        for t in sources:
            _followers.setdefault(_place(t), weakref.WeakSet()).add(self)
        self.make()

    def make(self) -> None:
        """Make it of its sources as they are, unless one of them is gone."""
        sources = [t for of in self._sources if (t := of()) is not None]
        if len(sources) < len(self._sources):
            return
        self._seen = _state(sources)
        with torch.inference_mode(False), torch.no_grad():
            self._write(*self._aliases)


_followers: dict[Place, weakref.WeakSet[Derived]] = {}
MOST_PLACES = 4096  # before those of whom nobody is left are forgotten


def written(tensors: Iterable[Tensor]) -> None:
    """Make anew what was made of any of these tensors, each once."""
    if not _followers:
        return
    if len(_followers) > MOST_PLACES:
        for place in [place for place, of in _followers.items() if not of]:
            del _followers[place]
    plain = (t for t in tensors if type(t) in PLAIN and not t.is_meta)
    found = {id(d): d for t in plain for d in _followers.get(_place(t), ())}
    for derived in found.values():
        derived.make()


def alias(t: Tensor) -> Tensor:
    """A tensor on the memory of `t` that, unlike a view, does not keep `t` alive."""
    made = torch.empty(0, dtype=t.dtype, device=t.device)
    return made.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def _place(t: Tensor) -> Place:
    return str(t.device), t.data_ptr()


def _state(tensors: Iterable[Tensor]) -> tuple[State, ...] | None:
    """None if one of them, made in inference mode, does not tell."""
    found = tuple(tensors)
    if any(t.is_inference() for t in found):
        return None
    return tuple([(t.data_ptr(), t._version) for t in found])
