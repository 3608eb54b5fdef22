"""The arguments of an op as one value, a record, and how a flat call becomes one.

An op's arguments are declared once, as a dataclass with slots: `check`, backends, fakes and costs
take a record. What torch sees is flat, as its schemas are, and made from the record. A record whose
fields are records is flat as well: its `FLAT` names the argument behind each flat name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch.library import infer_schema

EMPTY = inspect.Parameter.empty


class Arguments:
    """The flat arguments of a record, and the way from the one to the other.

    `of(*args, **kwargs)` makes a record of a call, `flat(record)` its arguments by position.
    `FLAT` of a record of records maps flat names to paths, in the order of a call; what it leaves
    out has its default, or is None. `MUTATED` names the tensors that an op writes to, `HOST` those
    that the host reads, which stay on a CPU, and `ROWS` the number that plans range over, where
    that is not the rows of the first argument.
    """

    def __init__(self, record: type) -> None:
        self.record = record
        paths: dict[str, str] = getattr(record, "FLAT", None) or {n: n for n in _fields(record)}
        self.paths = paths
        found = {name: _find(record, path) for name, path in paths.items()}
        self.signature = inspect.Signature(
            [
                inspect.Parameter(
                    name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind
                )
                for name, (kind, default) in found.items()
            ]
        )
        self.flat: Callable[[Any], tuple[Any, ...]] = attrgetter(*paths.values())
        self.first: Callable[[Any], Any] = attrgetter(next(iter(paths.values())))
        self.of: Callable[..., Any] = record if _is_flat(record) else self._maker(paths)

        # The place among the arguments of the number that plans range over.
        named: str | None = getattr(record, "ROWS", None)
        self.rows_at = None if named is None else list(paths).index(named)
        self._rows = None if named is None else attrgetter(paths[named])
        # Names of the tensors that the op writes to; a result is none of them.
        self.mutated: tuple[str, ...] = getattr(record, "MUTATED", ())
        self.host: tuple[str, ...] = getattr(record, "HOST", ())

    def rows(self, record: Any) -> Any:
        """What plans and limits of backends range over: the number that `ROWS` names, else the rows
        of the first argument."""
        return self.first(record).shape[0] if self._rows is None else self._rows(record)

    def by_name(self, record: Any) -> dict[str, Any]:
        """The arguments of a record by flat name, in the order of a call."""
        return dict(zip(self.signature.parameters, self.flat(record), strict=True))

    def in_order(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call by position, given by flat name; what is left out has its
        default. Raises TypeError for a name that is none, and for one that is missing."""
        bound = self.signature.bind(**named)
        bound.apply_defaults()
        return bound.args

    def differing(self, wanted: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
        """A function that gives, by name, the arguments of a record that are not as wanted."""

        def differing(record: Any) -> dict[str, Any]:
            given = self.by_name(record)
            return {n: given[n] for n, value in wanted.items() if _differs(given[n], value)}

        return differing

    def any_differing(self, wanted: Mapping[str, Any]) -> Callable[[Any], bool] | None:
        """A function that tells whether there is one; None where nothing is wanted. Its code is
        written out, as every call asks."""
        space: dict[str, Any] = {}
        absent, tests = [], []
        for name, value in wanted.items():
            given, other = f"record.{self.paths[name]}", f"wanted_{name}"
            if value is None:
                absent.append(given)
                continue
            space[other] = value
            tests.append(f"({given} is not {other} and {given} != {other})")
        if absent:
            tests.append(f"not ({' is '.join(absent)} is None)")
        if not tests:
            return None
        exec(f"def any_differs(record):\n return {' or '.join(tests)}", space)
        any_differs: Callable[[Any], bool] = space["any_differs"]
        return any_differs

    def schema(self, returns: Any) -> str:
        """What `torch.library` calls a function of these arguments that returns this type."""

        def prototype(*args: Any) -> None: ...

        # Of a function that gives nothing, type hints say the type of None, and torch wants None.
        given = None if returns is type(None) else returns
        signature = self.signature.replace(return_annotation=given)
        prototype.__signature__ = signature  # type: ignore[attr-defined]
        return infer_schema(prototype, mutates_args=self.mutated)

    def _maker(self, paths: dict[str, str]) -> Callable[..., Any]:
        """A function of the flat arguments. Its code is written out, as to bind a call to a
        signature takes ten times as long."""
        names = {path: name for name, path in paths.items()}
        space: dict[str, Any] = {"record": self.record}
        parts = []
        for part, (kind, _) in _fields(self.record).items():
            if part in names:
                parts.append(names[part])
                continue
            space[f"make_{part}"] = kind
            inner = (
                f"{field}={names.get(f'{part}.{field}') or _left_out(default)}"
                for field, (_, default) in _fields(kind).items()
            )
            parts.append(f"make_{part}({', '.join(inner)})")
        taken = []
        for name, parameter in self.signature.parameters.items():
            space[f"default_{name}"] = parameter.default
            taken.append(name if parameter.default is EMPTY else f"{name}=default_{name}")
        exec(f"def of({', '.join(taken)}):\n return record({', '.join(parts)})", space)
        of: Callable[..., Any] = space["of"]
        return of


@dataclasses.dataclass(frozen=True, slots=True)
class Annotations:
    """The types of what a function takes and gives, None where they are left out."""

    taken: tuple[Any, ...]
    given: Any

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Annotations:
        hints = typing.get_type_hints(function, include_extras=True)  # as in `_fields`
        if isinstance(function, FunctionType):  # to make its signature takes a hundred calls
            code = function.__code__
            names: Iterable[str] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        else:
            names = inspect.signature(function).parameters
        return cls(tuple(hints.get(name) for name in names), hints.get("return"))

    @property
    def record(self) -> type:
        """The record that is taken. Raises TypeError if anything else is."""
        kind = self.taken[0] if len(self.taken) == 1 else None
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise TypeError(
                "an op's function must take one record, such as `call: RouteCall`, and be "
                f"annotated with it; this one is {self}"
            )
        return kind

    def __str__(self) -> str:
        return f"({', '.join(map(_said, self.taken))}) -> {_said(self.given)}"


def _differs(value: Any, wanted: Any) -> bool:
    return value is not wanted and (wanted is None or bool(value != wanted))


def _said(hint: Any) -> str:
    return hint.__qualname__ if isinstance(hint, type) else str(hint)


@functools.cache  # to find out what strings of annotations name takes long
def _fields(record: type) -> dict[str, tuple[Any, Any]]:
    """What the fields of a record hold, and their defaults."""
    # To look for extras to leave out takes as long as all else, and there are none.
    hints = typing.get_type_hints(record, include_extras=True)
    return {
        field.name: (hints[field.name], _default(field)) for field in dataclasses.fields(record)
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return EMPTY if field.default is dataclasses.MISSING else field.default


def _is_flat(record: type) -> bool:
    return not any(dataclasses.is_dataclass(kind) for kind, _ in _fields(record).values())


def _left_out(default: Any) -> str:
    """What a field with this default is that no argument sets, as code."""
    return "None" if default is EMPTY else repr(default)


def _find(record: type, path: str) -> tuple[Any, Any]:
    """What a field holds, and its default."""
    *outer, last = path.split(".")
    for part in outer:
        record, _ = _fields(record)[part]
    return _fields(record)[last]
