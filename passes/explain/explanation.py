"""What `explain` found out, as data, as text for a terminal and as JSON."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from textwrap import wrap
from typing import Any

from moe_ops.graphs.report import GraphReport
from moe_ops.passes.explain.codes import LinearsInCodes
from moe_ops.passes.explain.trace import Break
from moe_ops.passes.report.names import names
from moe_ops.planning.cost import Device
from moe_ops.planning.plan import Plan, Range
from moe_ops.registry.spec import REFERENCE

VERSION = 5
WIDTH = 100
LEGEND = (
    "E: experts (P: of all ranks), K of them for each token. D: the model's width, I: an expert's. "
    "Rows: tokens, or K for each token after dispatch. Floor: the least time this device needs."
)

# What a model without a region is told.
LOOKED_FOR = (
    "No MoE region was found. Looked for: ops of moe_ops; and routers (scores, then topk) with "
    "experts as grouped products (torch._grouped_mm or transformers' grouped_mm) or as batched "
    "ones (bmm of tokens with the weights of their experts)."
)
NOTHING_SEEN = "Seen instead: no topk, so nothing that chooses experts."
ADVICE = (
    'To have one: call set_experts_implementation("grouped_mm") on a model of transformers; write '
    "a layer of your own with moe_ops.MoELayer or moe_ops.moe."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one op of a region runs on: a backend for each range of its rows, who refused, who
    emulates inputs, what backends of other devices lack here, by which path a backend runs, and how
    tokens are sent."""

    op: str
    ranges: tuple[Range, ...]
    refusals: dict[str, str]
    emulated: tuple[str, ...] = ()
    elsewhere: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    sends: str = ""
    opaque: bool = False  # its definition runs as it is, an op at a time

    @property
    def is_compiled(self) -> bool:
        """Whether the definition is compiled in place of the op."""
        return not self.opaque and tuple(r.backend for r in self.ranges) == (REFERENCE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """A region at a number of tokens; bytes, operations and the floor are None if not known."""

    tokens: int
    backend: str  # of the op that does most of the work; empty if another graph has that number
    bytes: float | None = None
    flops: float | None = None
    floor_us: float | None = None  # the least that the device needs
    measured_us: float | None = None
    bound: str = ""  # what that floor is made of: "memory", "compute", "launch" or "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Equal MoE layers: what they are, where they came from and what they run on."""

    op: str
    layers: tuple[str, ...]  # modules of the model
    shapes: dict[str, int]  # by the letters of `moe_ops/checks/shapes.py`
    dtype: str
    format: str
    rows: tuple[int, int | None]
    lifted_from: tuple[str, ...]  # empty: the model itself calls the op
    runs: tuple[Run, ...]  # the op, or the ops that its definition is made of
    at: tuple[At, ...]
    curve: tuple[At, ...]  # the same at numbers of tokens to plot
    padding: str = ""  # sizes that the layer rounds up, and who asked for it; empty: none
    shared: str = ""  # of shared experts on a second stream: which, and why; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """What a pass would not rewrite, in equal words for some layers."""

    rule: str
    reason: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a model has in the place of a region, in modules, or at lines of its code."""

    what: str
    where: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTotal:
    """What one pass did to all graphs."""

    name: str
    rewrites: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerText:
    """The nodes of one module before the first pass and after the last."""

    module: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the passes make of a model. `str` gives tables of at most 100 columns."""

    title: str
    summary: str  # what `compile` logs of the model
    device: Device
    regions: tuple[Region, ...]
    left_alone: tuple[LeftAlone, ...]
    instead: tuple[Seen, ...]  # of regions; empty if there are any
    passes: tuple[PassTotal, ...]
    plan: Plan
    graphs: int
    breaks: tuple[Break, ...]
    stopped: str  # why the rest of the model is not explained; empty: all of it is
    layer: LayerText | None  # of the first region
    linears: tuple[LinearsInCodes, ...] = ()
    captured: GraphReport | None = None  # of a compiled model, as `graph_report` has it

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str) -> Explanation:
        """Read what `to_json` wrote. Raises ValueError for another version or unknown keys."""
        values = json.loads(text)
        version = values.pop("version", None)
        if version != VERSION:
            raise ValueError(
                f"the explanation has version {version}, this is moe_ops with explanations of "
                f"version {VERSION}; make it again"
            )
        return typing.cast(Explanation, _restore(Explanation, values))

    def __str__(self) -> str:
        head = (_wrapped(f"{self.title} on {self.device.name}", ""), _wrapped(self.rates, "  "))
        parts = ["\n".join(head), _wrapped(self.summary, "  ")]
        parts += [_region(n, region) for n, region in enumerate(self.regions, 1)]
        if self.regions:
            parts.append(_wrapped(LEGEND, ""))
        else:
            parts.append("\n".join(_wrapped(line, "") for line in unfound(self)))
        if self.linears:
            parts.append("\n".join(["Linear layers in codes", *map(_linears, self.linears)]))
        if self.left_alone:
            parts.append("\n".join(["Left as it was", *map(_left_alone, self.left_alone)]))
        cells = [("pass", "rewrites", "ms")]
        cells += [(p.name, str(p.rewrites), f"{p.ms:.1f}") for p in self.passes]
        parts += [table(cells, "<>>"), self._graphs()]
        return "\n\n".join(parts)

    @property
    def rates(self) -> str:
        """What the device reaches, as text."""
        levels: dict[float, list[str]] = {}
        for dtype, rate in self.device.flops_per_second.items():
            levels.setdefault(rate, []).append(dtype)
        flops = (f"{si(rate, 'FLOP/s')} {', '.join(of)}" for rate, of in levels.items())
        return "; ".join([si(self.device.bytes_per_second, "B/s"), *flops])

    def _graphs(self) -> str:
        found = [f"{count(self.graphs, 'graph')}, {breaks(self)}"]
        for place in self.breaks:
            found.append(_wrapped(f"{place.where or 'unknown place'}: {place.reason}", "  "))
        if self.stopped:
            found.append(_wrapped(f"Not explained further: {self.stopped}", ""))
        if self.captured is not None:
            found += ["", "CUDA graphs"]
            found += [_wrapped(line, "  ") for line in str(self.captured).splitlines()]
        return "\n".join(found)


def unfound(found: Explanation) -> list[str]:
    """Lines for a model without a region: what was looked for, what was seen, what to do."""
    saw = []
    for seen in found.instead:
        where = f" ({names(seen.where)})" if any(seen.where) else ""
        saw.append(f"Seen instead: {seen.what}{where}.")
    return [LOOKED_FOR, *(saw or [NOTHING_SEEN]), ADVICE]


def _region(number: int, region: Region) -> str:
    n = len(region.layers)
    where = f": {names(region.layers)}" if any(region.layers) else ""
    found = [_wrapped(f"{number}. {region.op}, {count(n, 'layer')}{where}", "")]
    found += [_named("sizes", sizes(region)), _named("rows", span(*region.rows))]
    found += [_named("padded", region.padding)] if region.padding else []
    found += [_named("shared", region.shared)] if region.shared else []
    lifted = region.lifted_from or ("the model calls the op itself",)
    found += [_named("lifted from" if i == 0 else "", text) for i, text in enumerate(lifted)]
    found += [_named("runs on" if i == 0 else "", text) for i, text in enumerate(runs(region))]
    found += [_named("path" if i == 0 else "", text) for i, text in enumerate(paths(region))]
    found += [_named("refused" if i == 0 else "", text) for i, text in enumerate(refused(region))]
    away = elsewhere(region)
    found += [_named("elsewhere" if i == 0 else "", text) for i, text in enumerate(away)]
    cells: list[tuple[str, ...]] = [("tokens", "backend", "bytes", "flops", "floor", "bound by")]
    cells += [at_cells(at) for at in region.at]
    if region.at:
        found.append(table(cells, "><>>><", indent=3))
    timed = ranges(region)
    if timed:
        cells = [("op", "rows", "backend", "why", "at", "floor", "measured"), *timed]
        found.append(table(cells, "<<<<>>>", indent=3))
    return "\n".join(found)


def sizes(region: Region) -> str:
    """The sizes of a region as text, such as "E=128 K=8 D=2048 I=768, bfloat16"."""
    letters = [f"{letter}={n}" for letter, n in region.shapes.items() if letter != "F"]
    return ", ".join(filter(None, (" ".join(letters), region.dtype, region.format)))


def runs(region: Region) -> list[str]:
    """A line for each op of a region: its backend for each range of rows."""
    found = []
    for run in region.runs:
        if not run.is_compiled:
            texts = [f"{name_of(r.backend)}{_upto(r, len(run.ranges))}" for r in run.ranges]
            emulated = any(r.backend in run.emulated for r in run.ranges)
            inputs = "; inputs emulated in 16 bits" if emulated else ""
            sends = f"; {run.sends}" if run.sends else ""
            opaque = ", not compiled" if run.opaque else ""
            found.append(f"{run.op}: {', '.join(texts)}{opaque}{inputs}{sends}")
    compiled = list(dict.fromkeys(run.op for run in region.runs if run.is_compiled))
    if compiled:
        found.append(f"{', '.join(compiled)}: its definition, compiled with what is around it")
    return found


def _upto(r: Range, of: int) -> str:
    if of == 1:
        return ""
    return " beyond" if r.upto is None else f" up to {r.upto} rows"


def paths(region: Region) -> list[str]:
    """A line for each backend that runs an op by one of several paths."""
    return _reasons((run.op, run.paths) for run in region.runs)


def refused(region: Region) -> list[str]:
    """A line for each backend that cannot run an op of a region."""
    return _reasons((run.op, run.refusals) for run in region.runs)


def elsewhere(region: Region) -> list[str]:
    """A line for each backend of another device that says what it lacks here."""
    return _reasons((run.op, run.elsewhere) for run in region.runs)


def _reasons(runs: Iterable[tuple[str, dict[str, str]]]) -> list[str]:
    lines = (f"{op} on {name}: {why}" for op, whys in runs for name, why in whys.items())
    return list(dict.fromkeys(lines))


def at_cells(at: At) -> tuple[str, ...]:
    """Tokens, backend, bytes, operations, floor and its bound."""
    return (
        str(at.tokens),
        name_of(at.backend) or "-",
        "-" if at.bytes is None else si(at.bytes, "B"),
        "-" if at.flops is None else si(at.flops, "FLOP"),
        microseconds(at.floor_us),
        at.bound or "-",
    )


def ranges(region: Region) -> list[tuple[str, ...]]:
    """A row for each range of an op on a backend: op, rows, backend, source, at, floor, measured.

    Nothing if no time is known.
    """
    found, timed = [], False
    for run in region.runs:
        low = region.rows[0] if run.op == region.op else 0
        for r in () if run.is_compiled else run.ranges:
            timed = timed or r.predicted_us is not None or r.measured_us is not None
            times = (microseconds(r.predicted_us), microseconds(r.measured_us))
            rows = span(low, r.upto)
            found.append((run.op, rows, name_of(r.backend), r.source, str(r.at or "-"), *times))
            low = (r.upto or 0) + 1
    return list(dict.fromkeys(found)) if timed else []


def name_of(backend: str) -> str:
    return "its definition" if backend == REFERENCE else backend


def span(low: int, high: int | None) -> str:
    """A range of rows as text, such as "8", "2-160" or "161 or more"."""
    if high is None:
        return f"{low} or more" if low else "any"
    return str(low) if low == high else f"{low}-{high}"


def si(value: float, unit: str) -> str:
    """A number with three digits and a decimal prefix, such as 1.21 GB."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{_three(value / factor)} {prefix}{unit}"
    return f"{_three(value)} {unit}"


def microseconds(us: float | None) -> str:
    if us is None:
        return "-"
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= factor:
            return f"{_three(us / factor)} {unit}"
    return f"{_three(us)} µs"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:#.3g}"


def count(n: int, what: str) -> str:
    return f"{n or 'no'} {what}{'' if n == 1 else 's'}"


def breaks(found: Explanation) -> str:
    n = len(found.breaks)
    return f"breaks at {count(n, 'place')}" if n else "no breaks"


def table(cells: Sequence[Sequence[str]], align: str, indent: int = 0) -> str:
    """Columns, each aligned by its sign: "<" or ">"."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = (f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True))
        lines.append(" " * indent + "  ".join(padded).rstrip())
    return "\n".join(lines)


def _left_alone(left: LeftAlone) -> str:
    n = len(left.layers)
    where = names(left.layers) if any(left.layers) else f"{n} times"
    return _wrapped(f"{where}: {left.rule}: {left.reason}", "  ")


def _linears(of: LinearsInCodes) -> str:
    text = f"{of.format} [{of.rows}, {of.columns}], {si(of.bytes, 'B')}, by {of.runs}"
    return _wrapped(f"{names(of.layers)}: {text}", "  ")


def _named(name: str, text: str) -> str:
    return "\n".join(wrap(text, WIDTH, initial_indent=f"   {name:<13}", subsequent_indent=" " * 16))


def _wrapped(text: str, indent: str) -> str:
    return "\n".join(
        wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ",
             break_on_hyphens=False, break_long_words=False)
    )  # fmt: skip


def _restore(kind: Any, value: Any) -> Any:
    """A value of a type as `asdict` and JSON left it."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (kind,) = (k for k in of if k is not type(None))
        return None if value is None else _restore(kind, value)
    if origin is tuple:
        kinds = of if of[-1] is not Ellipsis else [of[0]] * len(value)
        return tuple(_restore(k, v) for k, v in zip(kinds, value, strict=True))
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return value
    hints = typing.get_type_hints(kind)
    unknown = value.keys() - {f.name for f in fields(kind)}
    if unknown:
        raise ValueError(f"an explanation's {kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**{name: _restore(hints[name], v) for name, v in value.items()})
