"""What was decided for a call, for the calls like it: which function runs it.

Calls are alike if nothing that a check or a backend's `supports` may look at tells them apart: the
names and types of arguments, whatever is no tensor, of tensors the shape, strides, dtype, device
and whether they require grad, the grad mode, whether calls have to be batch invariant, and the
context variables that a backend names. Of some tensors it is also where they begin in their memory,
modulo 16 bytes: of those of single bytes, which kernels read as words, of all where the backend
says so, and of those that begin at no multiple of 16, for which one that says so may have been
passed over. Values of tensors are not among it, and tensors are not held.

What decides is kept when a call like it comes the second time: what is kept of calls that never
come again, as of a text that grows by a token, would lie between freed results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from moe_ops.checks.signature import Signature
from moe_ops.registry.backend import ALIGNMENT, Backend, is_aligned
from moe_ops.registry.invariance import INVARIANT

# What gives the value of a context variable, and the value that it had.
Setting = tuple[Callable[[object], Any], Any]
UNSET = object()  # the value of one that has none

MOST_KEYS = 4096  # of one op's calls of the same types
MOST_OF_A_KEY = 8  # such as layers of several sizes, which the tokens do not tell apart

_grad, _invariant = torch.is_grad_enabled, INVARIANT.get
# A symbol only where somebody traces, whom no memo serves.
_offset: Callable[[Tensor], int] = Tensor.storage_offset  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided for a call: what runs it, and which later calls may run the same way."""

    run: Callable[[Any], Any]  # of a record
    direct: Callable[..., Any] | None  # of the arguments of a call, if there is one
    fits: Callable[..., bool]  # of tensors
    settings: tuple[Setting, ...]
    placed: Callable[[Any], tuple[Tensor, ...]] | None  # tensors whose places count, if any
    begin: tuple[int, ...]  # where these do, in elements


class Memo:
    """What is known of the calls of an op that need no dispatcher, by the types and names of their
    arguments. With `remembers` also what runs them."""

    def __init__(self, signature: Signature, remembers: bool) -> None:
        self._signature, self.remembers = signature, remembers and signature.by_type
        self._known: dict[tuple[Any, ...], Alike] = {}
        self.find, self.clear = self._known.get, self._known.clear

    def alike(
        self, types: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Alike | None:
        """The calls like one whose types are new, if they need no dispatcher. Raises TypeError if
        the call has a fault."""
        self._signature.require(args, kwargs)
        if not self._signature.is_plain(args, kwargs):
            return None
        alike = Alike((*args, *kwargs.values()), self.remembers)
        if self._signature.by_type:
            self._known[types] = alike
        return alike


class Alike:
    """The calls of an op whose arguments have the same names and types."""

    __slots__ = ("_known", "_rest", "_seen", "_tensors", "remembers")

    def __init__(self, values: Sequence[Any], remembers: bool) -> None:
        tensors = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        self._tensors = _items(tensors)
        self._rest = _items([i for i in range(len(values)) if i not in tensors])
        self._known: dict[tuple[Any, ...], tuple[Decided, ...]] = {}
        self._seen: set[int] = set()  # hashes of keys that came once
        self.remembers = remembers and bool(tensors)

    def find(self, values: tuple[Any, ...]) -> Decided | None:
        """What runs a call of these arguments, if one like it was kept."""
        tensors = self._tensors(values)
        key = (_grad(), _invariant(), tensors[0].shape, self._rest(values))
        for found in self._known.get(key, ()):
            if found.fits(*tensors):
                for get, value in found.settings:
                    now = get(UNSET)
                    if now is not value and now != value:
                        break
                else:
                    if found.placed is None or _begin_alike(found.placed(tensors), found.begin):
                        return found
        return None

    def keep(
        self, values: tuple[Any, ...], call: Any, backend: Backend, asked: Sequence[Backend]
    ) -> None:
        """Keep which of the backends, the last of which is the reference, ran a call for the calls
        like it, if one came before. Not every call has what tells it apart: what has no strides,
        and a tensor that is given twice."""
        if any(other.asks is None for other in asked[:-1]):
            self.remembers = False
            return
        tensors = self._tensors(values)
        key = (_grad(), _invariant(), tensors[0].shape, self._rest(values))
        if self._is_new(key):
            return
        strided = all(t.layout is torch.strided for t in tensors)
        if not strided or len(set(map(id, tensors))) < len(tensors):
            return
        settings = dict.fromkeys(s for other in asked[:-1] for s in other.asks or ())
        places = [i for i, t in enumerate(tensors) if _is_placed(t, call, backend, asked)]
        placed = _items(places) if places else None
        sizes: dict[str, Any] = {
            "dynamic_dims_sizes": [[*t.shape] for t in tensors],
            "dynamic_dims_strides": [[*t.stride()] for t in tensors],
        }
        decided = Decided(
            run=backend.run,
            direct=None if backend.alike is None else backend.alike(call),
            fits=TensorGuards(*tensors, **sizes).check,
            settings=tuple((setting.get, setting.get(UNSET)) for setting in settings),
            placed=placed,
            begin=tuple(map(_offset, placed(tensors))) if placed else (),
        )
        if len(self._known) >= MOST_KEYS:
            self._known.clear()
        self._known[key] = (decided, *self._known.get(key, ())[: MOST_OF_A_KEY - 1])

    def _is_new(self, key: tuple[Any, ...]) -> bool:
        """Whether no call of this key came before, which is noted. Keys of one hash may be taken
        for each other: then one is kept a call too early."""
        hashed = hash(key)
        if hashed in self._seen:
            return False
        if len(self._seen) >= MOST_KEYS:
            self._seen.clear()
        self._seen.add(hashed)
        return True


def _items(places: list[int]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the items at these places of a sequence as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    first = places[0] if places else 0
    return itemgetter(slice(first, first + len(places)))


def _is_placed(t: Tensor, call: Any, backend: Backend, asked: Sequence[Backend]) -> bool:
    """Whether the address of a tensor matters: a backend ran the call there, and others may have
    refused it for the address."""
    if backend.aligned or t.dtype.itemsize == 1:
        return True
    return not is_aligned(t) and any(
        other.aligned and not (other.ignores is not None and other.ignores(call)) for other in asked
    )


def _begin_alike(tensors: tuple[Tensor, ...], begin: tuple[int, ...]) -> bool:
    """Whether tensors begin where others of the same dtypes did, modulo 16 bytes."""
    now = tuple(map(_offset, tensors))
    return now == begin or all(
        (a - b) * t.itemsize % ALIGNMENT == 0 for a, b, t in zip(now, begin, tensors, strict=True)
    )
