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
from functools import partial
from types import CellType, FunctionType, NoneType
from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int]  # which of a call's bases, and the bytes from its beginning
Function = Callable[..., Any]

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
    encode: Callable[[int], Any]
    encoded: dict[int, Any] = field(default_factory=dict)

    def at_address(self, address: int) -> Any:
        found = self.encoded.get(address)
        if found is None:
            if len(self.encoded) >= MOST_ENCODED:
                self.encoded.clear()
            found = self.encoded[address] = self.encode(address)
        return found


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

    def run(self, bases: Sequence[int], stream: int) -> None:
        """Launch for tensors at these addresses."""
        args = self.args.copy()
        for at, base, offset in self.places:
            args[at] = bases[base] + offset
        for d in self.descriptors:
            args[d.at] = d.at_address(bases[d.place[0]] + d.place[1])
        if self.head is None:
            args[self.stream_at] = stream
            self.function(*args)
        else:
            head = self.head.copy()
            head[self.stream_at] = stream
            self.function(*head, tuple(args))


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
    return made or _launch(
        launcher,
        None,
        [*head, *kept],
        [
            _Descriptor(at=len(head) + at, place=place, encode=partial(moved, kept[at]))
            for at, place in zip(at_first, places, strict=True)
        ],
    )


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
    if len(encoded) != len(at_first):
        return None

    def encode(at: int, address: int) -> Any:
        elsewhere = [
            moved(value, address) if i in at_first else value for i, value in enumerate(args)
        ]
        again = _noted(launcher, [*head, *elsewhere])
        assert again is not None
        return (again[1][-1] if as_one else again[1])[at]

    return _launch(
        function,
        given[:-1] if as_one else None,
        of_kernel,
        [
            _Descriptor(at=at, place=place, encode=partial(encode, at))
            for at, place in zip(encoded, places, strict=True)
        ],
    )


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
    function: Function, head: list[Any] | None, args: list[Any], descriptors: list[_Descriptor]
) -> Launch:
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
    )
