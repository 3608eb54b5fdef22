"""One launch of a compiled kernel, repeated with other addresses.

Triton's launcher is Python code around a function in C. At every launch it encodes each TMA
descriptor among the arguments, which takes longer than the launch itself. So a recorded launch
calls the function in C, and keeps what descriptors were encoded to, by address. Where a version of
Triton has another launcher than those known here, the launcher is called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int]  # which of a call's bases, and the bytes from its beginning
Function = Callable[..., Any]
Encode = Callable[[list[int]], list[Any]]  # of the address of each descriptor of a launch

MOST_ENCODED = 1024  # addresses of one TMA descriptor


@dataclass(slots=True)
class Address:
    """What a TMA descriptor asks of its tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """Stands for what every launch has anew: an address, or the stream, which has no place."""

    place: Place | None = None


@dataclass(slots=True, kw_only=True)
class _Descriptor:
    """Where the arguments hold a TMA descriptor, and as what, by the address of its tensor."""

    at: int
    place: Place
    encoded: dict[int, Any] = field(default_factory=dict)

    def keep(self, address: int, made: Any) -> None:
        if len(self.encoded) >= MOST_ENCODED:
            self.encoded.clear()
        self.encoded[address] = made


@dataclass(slots=True, kw_only=True)
class Launch:
    """What repeats a launch: a function, and its arguments. Ahead of them is `head` where the
    function takes all of a kernel's as one tuple. It keeps no tensor alive."""

    function: Function
    head: list[Any] | None
    args: list[Any]
    stream_at: int  # in `head` or, without one, in `args`
    places: list[tuple[int, int, int]]  # of addresses in `args`: base and offset
    descriptors: list[_Descriptor]
    encode: Encode  # all descriptors at once: what is around that takes as long as a few of them

    def run(self, bases: Sequence[int], stream: int) -> None:
        """Launch for tensors at these addresses."""
        args = self.args.copy()
        for at, base, offset in self.places:
            args[at] = bases[base] + offset
        for d in self.descriptors:
            found = d.encoded.get(bases[d.place[0]] + d.place[1])
            if found is None:
                self._encode_for(args, bases)
                break
            args[d.at] = found
        if self.head is None:
            args[self.stream_at] = stream
            self.function(*args)
        else:
            head = self.head.copy()
            head[self.stream_at] = stream
            self.function(*head, tuple(args))

    def _encode_for(self, args: list[Any], bases: Sequence[int]) -> None:
        """Put all descriptors into `args`, and keep them."""
        addresses = [bases[d.place[0]] + d.place[1] for d in self.descriptors]
        made = self.encode(addresses)
        for d, address, value in zip(self.descriptors, addresses, made, strict=True):
            args[d.at] = value
            d.keep(address, value)


def recorded(
    compiled: Any, grid: tuple[int, ...], args: Sequence[Any], place_of: Callable[[int], Place]
) -> Launch:
    """A launch as it can be repeated; `place_of` tells to which tensor of a call an address
    belongs."""
    kept, at_first = list(args), dict[int, int]()
    for at, value in enumerate(args):
        if isinstance(value, Tensor):
            kept[at] = _Mark(place_of(value.data_ptr())) if value.numel() else 0
        elif isinstance(getattr(value, "base", None), Tensor):
            at_first[at] = value.base.data_ptr()
            kept[at] = moved(value, at_first[at])
    x, y, z = (*grid, 1, 1)[:3]
    head = [x, y, z, _Mark(), compiled.function, compiled.packed_metadata, None, None, None]
    launcher = compiled.run
    places = [place_of(address) for address in at_first.values()]
    made = _within(launcher, head, kept, at_first, places)
    if made is not None:
        return made
    behind_head = [len(head) + i for i in at_first]
    firsts = [kept[i] for i in at_first]

    def encode(addresses: list[int]) -> list[Any]:
        return list(map(moved, firsts, addresses))

    return _launch(launcher, None, [*head, *kept], _descriptors(behind_head, places), encode)


def _descriptors(at: Sequence[int], places: Sequence[Place]) -> list[_Descriptor]:
    return [_Descriptor(at=i, place=place) for i, place in zip(at, places, strict=True)]


def moved(descriptor: Any, address: int) -> Any:
    """A copy of a TMA descriptor with another address; it keeps no tensor alive."""
    made = copy.copy(descriptor)
    made.base = Address(address, descriptor.base.dtype)
    return made


def _within(
    launcher: Any, head: list[Any], args: list[Any], at_first: dict[int, int], places: list[Place]
) -> Launch | None:
    """The launch by the function in C that a launcher of Triton calls; None for a launcher that
    allocates for each launch, or is not known. `at_first`: the addresses of descriptors."""
    scratch = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    known = scratch == [0, 0] and hasattr(launcher, "launch")
    if not known or getattr(launcher, "gsan_enabled", False):
        return None
    found = _noted(launcher, [*head, *args])
    if found is None:
        return None
    function, given = found
    last = given[-1]
    as_one = isinstance(last, (tuple, list)) and last is not args[-1]
    of_kernel = list(last) if as_one else given
    before = {id(value) for value in (*head, *args)}
    encoded = [
        at
        for at, value in enumerate(of_kernel)
        if id(value) not in before and not isinstance(value, (int, float, str, NoneType))
    ]
    marks = _marks([*given[:-1], *of_kernel] if as_one else given)
    if len(encoded) != len(at_first) or marks != _marks([*head, *args]):
        return None

    def encode(addresses: list[int]) -> list[Any]:
        elsewhere = list(args)
        for at, address in zip(at_first, addresses, strict=True):
            elsewhere[at] = moved(args[at], address)
        again = _noted(launcher, [*head, *elsewhere])
        assert again is not None
        made = again[1][-1] if as_one else again[1]
        return [made[at] for at in encoded]

    ahead = given[:-1] if as_one else None
    return _launch(function, ahead, of_kernel, _descriptors(encoded, places), encode)


def _marks(values: Sequence[Any]) -> int:
    return sum(isinstance(value, _Mark) for value in values)


def _noted(launcher: Any, given: list[Any]) -> tuple[Function, list[Any]] | None:
    """The function in C that a launcher calls, and with what, found by a copy of the launcher that
    launches nothing."""
    function, noted = launcher.launch, list[Any]()

    def note(*args: Any) -> None:
        noted.extend(args)

    spy = copy.copy(launcher)
    spy.launch = note
    if isinstance(function, FunctionType):  # around the one in C, for TMA descriptors
        wrapper, names = function, function.__code__.co_freevars
        cells = dict(zip(names, wrapper.__closure__ or (), strict=True))
        if "launcher" not in cells:
            return None
        function = cells["launcher"].cell_contents
        cells["launcher"] = CellType(note)
        spy.launch = FunctionType(
            wrapper.__code__, wrapper.__globals__, closure=tuple(cells.values())
        )
    spy(*given)
    return function, noted


def _launch(
    function: Function, head: list[Any] | None, args: list[Any], descriptors: list[_Descriptor],
    encode: Encode,
) -> Launch:  # fmt: skip
    """A launch by a function that was given these arguments."""
    marked = [(at, v.place) for at, v in enumerate(args) if isinstance(v, _Mark)]
    (stream_at,) = [
        at for at, v in enumerate(head or args) if isinstance(v, _Mark) and v.place is None
    ]
    return Launch(
        function=function,
        head=head,
        args=args,
        stream_at=stream_at,
        places=[(at, *place) for at, place in marked if place is not None],
        descriptors=descriptors,
        encode=encode,
    )
