"""The arguments of an op by name and type, and in words what is wrong with those of a call."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Iterable, Mapping
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
WORDS = {Tensor: "a Tensor", int: "an int", float: "a float", bool: "a bool", str: "a str"}


class Signature:
    """What a function of tensors, numbers, flags and strings takes, for a call to be held against.

    `name` is what messages call the function; annotations are types, not their names.
    """

    def __init__(self, name: str, signature: inspect.Signature) -> None:
        self.name = name
        self._signature = signature
        self._kinds = {n: _kind(p.annotation) for n, p in signature.parameters.items()}

    def require(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise TypeError, saying what it is, if a call has a fault."""
        fault = self.fault(args, kwargs)
        if fault is not None:
            raise TypeError(fault)

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
            kind, optional = self._kinds[name]
            if not (value is None and optional) and not _fits(value, kind):
                wanted = f"{WORDS[kind]}{' or None' if optional else ''}"
                return f"{self.name}: {name} must be {wanted}, got {described(value)}"
            if kind is int and isinstance(value, int) and not -(2**63) <= value < 2**63:
                return f"{self.name}: {name} must be an int of 64 bits, got {described(value)}"
        return None

    def is_plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether nothing in a call has to be converted, or has a say in it; names are known."""
        for name, value in (*zip(self._kinds, args, strict=False), *kwargs.items()):
            kind, optional = self._kinds[name]
            if not (optional if value is None else type(value) in PLAIN[kind]):
                return False
        return True


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of the known names; empty if none is close."""
    close = difflib.get_close_matches(got, list(known), n=1) if isinstance(got, str) else ()
    return f"; did you mean {close[0]!r}?" if close else ""


def described(value: object) -> str:
    """A value for a message: itself if that is short, always its type."""
    if value is None:
        return "None"
    kind = type(value).__name__
    article = "an" if kind[0].lower() in "aeiou" else "a"
    short = repr(value) if isinstance(value, (bool, int, float, str)) else ""
    return f"{article} {kind}" + (f": {short}" if 0 < len(short) <= 60 else "")


def _kind(hint: Any) -> tuple[type, bool]:
    """The type that a hint names, and whether None may stand for it."""
    members = [t for t in typing.get_args(hint) if t is not type(None)]
    return (members[0], True) if members else (hint, False)


def _fits(value: Any, kind: type) -> bool:
    """Whether a value is of a kind, or such that torch's dispatcher makes it one, or decides."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, PLAIN[kind]) or hasattr(type(value), "__torch_function__"):
        return True
    if value is None or isinstance(value, tuple(PLAIN)):
        return False
    return any(hasattr(type(value), method) for method in METHODS[kind])
