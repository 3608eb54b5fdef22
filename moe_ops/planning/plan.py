"""The plan: which backend runs each op of a graph, for which sizes, and why.

The text and the JSON of a plan are for people and tools; a compiled graph holds its own part of it
as the `plan` argument of `moe_ops::NAME.planned`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from moe_ops.checks.options import check_fields, check_int, check_text, check_type
from moe_ops.registry.invariance import PLANNED
from moe_ops.registry.registration import REFERENCE

VERSION = 1

# The user's thresholds; measurements of `tune`; the numbers of rows up to which backends say that
# they are the better choice; or nothing to choose from.
Source = Literal["forced", "tuned", "limit", "only candidate"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The backend for the numbers of rows from the last range's end on, up to `upto`.

    Rows are those of the op's first argument: tokens, or routed rows for ops behind `dispatch`. The
    backend "reference" means that the definition is compiled in place of the op, if it has all of
    the sizes. Times are those of `at` rows: predicted is the least that the op can take on the
    device, whichever the backend (`moe_ops/planning/cost.py`); measured is what `tune` saw.
    """

    upto: int | None  # None: no end
    backend: str
    source: Source
    at: int | None = None
    predicted_us: float | None = None
    measured_us: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("upto", "at"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=0)
        if self.source not in get_args(Source):
            raise ValueError(
                f"source {self.source!r} is unknown; choose one of {', '.join(get_args(Source))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was decided for one node, and what else could have been."""

    node: str
    op: str
    layer: str  # the module in the model; empty if unknown
    rows: tuple[int, int | None]  # the smallest and the largest number; None: unbounded
    shapes: dict[str, int]  # by the letters of `moe_ops/checks/shapes.py`, as far as they are known
    dtype: str
    format: str  # of the weights and of the inputs, such as mxfp4 or nvfp4+nvfp4
    candidates: tuple[str, ...]  # in the order in which they are asked
    refusals: dict[str, str]  # why the other backends cannot run it
    ranges: tuple[Range, ...]
    emulated: tuple[str, ...] = ()  # the candidates that emulate its inputs in 16 bits
    # What backends of other devices lack on this machine, if they say what they need.
    elsewhere: dict[str, str] = field(default_factory=dict)
    # In words, by which of its paths a backend of the ranges runs it, and why not by better ones.
    paths: dict[str, str] = field(default_factory=dict)
    sends: str = ""  # in words, how tokens travel to other ranks that quantise them
    batch_invariant: bool = False  # whether a row's bits depend on no other row

    @property
    def text(self) -> str:
        """The ranges as people read them."""
        return written((r.upto, r.backend) for r in self.ranges)

    @property
    def plan(self) -> str:
        """The op's `plan` argument. That of one backend for any number of rows begins with a colon,
        as its kernels are compiled for all of them; that of a call that has to be batch invariant
        says so before."""
        low, high = self.rows
        text = f":{self.text}" if len(self.ranges) == 1 and low != high else self.text
        return f"{PLANNED}{text}" if self.batch_invariant else text

    @property
    def is_definition(self) -> bool:
        """Whether the definition is compiled in place of the op. One that has to be batch invariant
        is called instead: a compiler sums in an order of its own."""
        return self.backends == (REFERENCE,) and not self.batch_invariant

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(r.backend for r in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The choices of one or more graphs on a device."""

    device: str
    choices: tuple[Choice, ...]

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what `to_json` wrote. Raises ValueError for another version, and ValueError or
        TypeError for keys and values that a plan has not.
        """
        check_text("text", text)
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"text is no plan: {error}; take what to_json wrote") from None
        check_type("a plan", values, dict, "an object")
        version = values.pop("version", None)
        if version != VERSION:
            raise ValueError(
                f"the plan has version {version}, this is moe_ops with plans of version {VERSION}; "
                "make it again"
            )
        listed = values.pop("choices", [])
        check_type("the choices of a plan", listed, list, "a list")
        choices = tuple(map(_choice, listed))
        return _build(Plan, {**values, "choices": choices})

    def __str__(self) -> str:
        """A short table, nodes of the same decision in one line."""
        lines: dict[tuple[str, str, str, str, str], int] = {}
        for c in self.choices:
            low, high = c.rows
            rows = str(low) if low == high else f"{low}-{'' if high is None else high}"
            sizes = " ".join(f"{letter}={n}" for letter, n in c.shapes.items())
            sizes = " ".join(filter(None, (sizes, c.dtype, c.format)))
            why = ", ".join(dict.fromkeys(r.source for r in c.ranges))
            line = (c.op, rows, sizes, c.text, why)
            lines[line] = lines.get(line, 0) + 1
        cells = [("op", "rows", "sizes", "plan", "why", "nodes")]
        cells += [(*line, str(count)) for line, count in lines.items()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        body = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
        return "\n".join([self.device, *body])


def written(ranges: Iterable[tuple[int | None, str]]) -> str:
    """Ranges as the `plan` argument of an op: "cpu", or "64:cpu,:aten"."""
    pairs = tuple(ranges)
    if len(pairs) == 1:
        return pairs[0][1]
    return ",".join(f"{'' if upto is None else upto}:{backend}" for upto, backend in pairs)


def _choice(values: dict[str, Any]) -> Choice:
    check_type("a choice of a plan", values, dict, "an object")
    values = dict(values)
    for name in ("rows", "candidates", "ranges", "emulated"):
        check_type(f"{name} of a plan's choice", values.get(name, []), list, "a list")
        values[name] = tuple(values.get(name, ()))
    values["ranges"] = tuple(_build(Range, r) for r in values["ranges"])
    return _build(Choice, values)


def _build(cls: type[T], values: dict[str, Any]) -> T:
    """An object of a dataclass from exactly its fields."""
    check_type(f"a plan's {cls.__name__}", values, dict, "an object")
    known = {
        f.name: f.default is f.default_factory is MISSING
        for f in fields(cls)  # type: ignore[arg-type]
    }
    unknown = values.keys() - known.keys()
    if unknown:
        raise ValueError(f"a plan's {cls.__name__} has no {', '.join(sorted(unknown))}")
    lacking = [name for name, needed in known.items() if needed and name not in values]
    if lacking:
        raise ValueError(f"a plan's {cls.__name__} lacks {', '.join(lacking)}")
    made = cls(**values)
    check_fields(made, f"a plan's {cls.__name__}: ")
    return made
