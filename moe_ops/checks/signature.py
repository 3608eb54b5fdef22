"""The arguments of an op by name and type, and in words what is wrong with those of a call."""

from __future__ import annotations

import difflib
import inspect
import re
import typing
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# What can be handed on as it is for each type.
PLAIN: dict[type, tuple[type, ...]] = {
    Tensor: (Tensor, torch.nn.Parameter),
    int: (int,),
    float: (float, int),
    bool: (bool, int),
    str: (str,),
}
# What torch's dispatcher turns into each type: the numbers of other packages and of its compilers.
METHODS: dict[type, tuple[str, ...]] = {
    Tensor: (),
    int: ("__index__",),
    float: ("__float__", "__index__"),
    bool: ("__bool__",),
    str: (),
}
# Keywords that had another name once: a call with the old one works, and warns, until a version
# in which all of them are gone. Other old names are in renamed.py.
RENAMED_GONE = "0.3"
RENAMED = {
    "experts_TK": "ids_TK",
    "alpha_E": "global_scale_E",
    "alpha13_E": "global_scale13_E",
    "alpha2_E": "global_scale2_E",
}
# How alike a name has to be to be suggested: one letter in three may be another. Where it is more
# alike than `SAME` it was misspelled, so that nothing else is meant.
CLOSE, SAME = 0.66, 0.85
# What people call things that have another name here.
CALLED = {
    "gpu": "triton",
    "cuda": "triton",
    "torch": "aten",
    "pytorch": "aten",
    "eager": "reference",
    "fp8": "float8_e4m3fn",
    "backend": "thresholds",
    "backends": "thresholds",
    "gather": "allgather_reducescatter",
    "exchange": "alltoall_high_throughput",
    "push": "alltoall_low_latency",
}
MARKS = "._:-"  # between the parts of a name
MOST_MEANT = 4  # names that are suggested
WORDS = {Tensor: "a Tensor", int: "an int", float: "a float", bool: "a bool", str: "a str"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument holds: a value of a type, or None, or several of them."""

    type: type
    optional: bool
    many: bool = False

    @classmethod
    def of(cls, hint: Any) -> Kind:
        args = typing.get_args(hint)
        if not args:
            return cls(hint, False)
        if typing.get_origin(hint) is Sequence:
            return replace(cls.of(args[0]), many=True)
        return cls(next(t for t in args if t is not type(None)), True)

    def __str__(self) -> str:
        one = f"{WORDS[self.type]}{' or None' if self.optional else ''}"
        return f"a list of which each is {one}" if self.many else one

    def fits(self, value: Any) -> bool:
        """Whether a value is of this kind, or such that torch's dispatcher makes it one."""
        if self.many:
            return isinstance(value, (list, tuple)) and all(
                map(replace(self, many=False).fits, value)
            )
        return (value is None and self.optional) or _fits(value, self.type)

    def is_plain(self, value: Any) -> bool:
        """Whether nothing in a value has to be converted, or has a say in the call."""
        if self.many:
            return type(value) in (list, tuple) and all(
                map(replace(self, many=False).is_plain, value)
            )
        return self.optional if value is None else type(value) in PLAIN[self.type]


class Signature:
    """What a function of tensors, numbers, flags, strings and lists takes, for a call to be held
    against.

    `name` is what messages call the function; annotations are types, not their names.
    """

    def __init__(self, name: str, signature: inspect.Signature) -> None:
        self.name = name
        self._signature = signature
        self._kinds = {n: Kind.of(p.annotation) for n, p in signature.parameters.items()}
        self.renamed = {old: new for old, new in RENAMED.items() if new in self._kinds}
        # Whether the types of a call's arguments tell that it is plain.
        self.by_type = not any(kind.many for kind in self._kinds.values())

    def require(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError, saying what it is, if a call has a fault."""
        fault = self.fault(args, kwargs)
        if fault is not None:
            raise TypeError(fault)

    def by_new_names(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords by the names that they have now; whoever called the caller is warned of others,
        unless it is being compiled. Raises TypeError for an argument under both names."""
        for old in kwargs:
            if old not in self.renamed:
                continue
            said = f"{self.name}: {old} is {self.renamed[old]} now"
            if self.renamed[old] in kwargs:
                raise TypeError(f"{said}, and the call gives both; leave out {old}")
            if not torch.compiler.is_dynamo_compiling():
                said += f"; use that, for the old name goes in {RENAMED_GONE}"
                warnings.warn(said, DeprecationWarning, stacklevel=3)
        return {self.renamed.get(name, name): value for name, value in kwargs.items()}

    def fault(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """What is wrong with the names or the types of a call's arguments, or None."""
        known = list(self._kinds)
        if len(args) > len(known):
            return (
                f"{self.name} takes at most {len(known)} arguments, got {len(args)}; "
                f"they are {', '.join(known)}"
            )
        for name in kwargs:
            if name not in self._kinds:
                hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
                return f"{self.name} has no argument {name!r}{hint}"
        given = dict(zip(known, args, strict=False))
        for name in kwargs:
            if name in given:
                return f"{self.name} got {name} twice, by position and by name; leave one out"
        given |= kwargs
        for name, parameter in self._signature.parameters.items():
            if parameter.default is parameter.empty and name not in given:
                return f"{self.name} needs {name}, and was called without it"
        for name, value in given.items():
            kind = self._kinds[name]
            if not kind.fits(value):
                return f"{self.name}: {name} must be {kind}, got {described(value)}"
            if kind.type is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
                return f"{self.name}: {name} must be an int of 64 bits, got {described(value)}"
        return None

    def is_plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether nothing in a call has to be converted, or has a say in it; names are known."""
        for name, value in (*zip(self._kinds, args, strict=False), *kwargs.items()):
            if not self._kinds[name].is_plain(value):
                return False
        return True


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known names that may be meant; empty if there are none.

    These are the one that is misspelled; else those that begin with what was given, or with its
    name here, as 'int4_w4a16' does with 'int4'; else those of which it is a part; else the closest.
    """
    if not isinstance(got, str):
        return ""
    meant = [repr(name) for name in _meant(got.lower(), list(known))[:MOST_MEANT]]
    listed = " or ".join([", ".join(meant[:-1]), meant[-1]] if len(meant) > 1 else meant)
    return f"; did you mean {listed}?" if meant else ""


def _meant(got: str, known: Sequence[str]) -> list[str]:
    words = {got, CALLED.get(got, got)}
    prefixes = tuple(f"{word}{mark}" for word in words for mark in MARKS)
    ways = (
        lambda: _closest(got, known, SAME),
        lambda: [n for n in known if n.lower() in words or n.lower().startswith(prefixes)],
        lambda: [n for n in known if words & {*re.split(f"[{MARKS}]", n.lower())}],
        lambda: _closest(got, known, CLOSE),
    )
    return next(filter(None, (way() for way in ways)), [])


def _closest(got: str, known: Sequence[str], cutoff: float) -> list[str]:
    by_lower = {name.lower(): name for name in known}
    return [by_lower[n] for n in difflib.get_close_matches(got, list(by_lower), n=1, cutoff=cutoff)]


def described(value: object) -> str:
    """A value for a message: itself if that is short, always its type."""
    if value is None:
        return "None"
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    short = repr(value) if isinstance(value, (bool, int, float, str)) else ""
    return f"{article} {kind}" + (f": {short}" if 0 < len(short) <= 60 else "")


def _fits(value: Any, kind: type) -> bool:
    """Whether a value is of a kind, or such that torch's dispatcher makes it one, or decides."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, PLAIN[kind]) or hasattr(type(value), "__torch_function__"):
        return True
    if value is None or isinstance(value, tuple(PLAIN)):
        return False
    return any(hasattr(type(value), method) for method in METHODS[kind])
