"""Checks of options that are no tensors: each raises an error that names the option."""

from __future__ import annotations

import functools
import math
import numbers
import os
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moe_ops.checks.signature import described

LEAST_INT, MOST_INT = -(2**63), 2**63 - 1  # of 64 bits
MOST_SIZE = 2**31 - 1  # of an axis


def check_int(name: str, value: Any, least: int = LEAST_INT, most: int = MOST_INT) -> None:
    """Raise TypeError unless `value` is a whole number, ValueError if it is below the least or
    above the most.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {described(value)}")
    if int(value) < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    if int(value) > most:
        raise ValueError(f"{name}={value} must be at most {most}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {described(value)}")


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {described(value)}")


def check_text(name: str, value: Any) -> None:
    """Raise TypeError unless `value` is a string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {described(value)}")


def check_finite(name: str, value: Any) -> None:
    """Raise ValueError if a number is infinite or not a number."""
    if not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number")


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Raise TypeError, saying what is wanted, unless `value` is of one of these classes."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name} must be {wanted}, got {described(value)}")


def check_ints(name: str, values: Any, least: int) -> tuple[int, ...]:
    """The whole numbers of an iterable. Raises TypeError or ValueError for anything else, and for
    none.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be several ints, such as (1, 64), got {described(values)}")
    found = tuple(values)
    for value in found:
        check_int(f"each of {name}", value)
        if value < least:
            raise ValueError(f"{name} must be numbers from {least} on, got {value}")
    if not found:
        raise ValueError(f"{name} is empty; give at least one number from {least} on")
    return tuple(map(int, found))


def check_writable(name: str, path: Any) -> None:
    """Raise TypeError unless `path` is one, and OSError unless a file can be written there."""
    check_type(name, path, (str, os.PathLike), "a path")
    file = Path(path)
    if file.is_dir():
        raise IsADirectoryError(f"{name}={str(file)!r} is a folder; give a file in it")
    if not file.parent.is_dir():
        raise FileNotFoundError(
            f"{name}={str(file)!r}: there is no folder {str(file.parent)!r}; make it first"
        )
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(f"{name}={str(file)!r} may not be written; give another path")


CHECKS: dict[Any, Callable[[str, Any], None]] = {
    int: check_int, float: check_number, bool: check_flag, str: check_text,
}  # fmt: skip


def check_fields(options: object, prefix: str = "") -> None:
    """Raise TypeError unless the numbers, flags and strings of a dataclass are of their types."""
    for name, check, optional in _checks(type(options)):  # type: ignore[arg-type]
        value = getattr(options, name)
        if not (optional and value is None):
            check(prefix + name, value)


@functools.cache
def _checks(kind: type) -> tuple[tuple[str, Callable[[str, Any], None], bool], ...]:
    """The fields of a dataclass that have a check, and whether None may stand for each."""
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        members = [t for t in typing.get_args(hint) if t is not type(None)] or [hint]
        if len(members) == 1 and members[0] in CHECKS:
            found.append((name, CHECKS[members[0]], members != [hint]))
    return tuple(found)
