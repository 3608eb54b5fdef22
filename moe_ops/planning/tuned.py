"""Tables of measured times: what `tune` writes and the choice of backends reads.

Tables lie in `moe_ops/tuned/`, as shipped, and where the user says. A table is a list of
layers, each with the microseconds of every backend by number of tokens and by routing.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moe_ops.checks.options import check_fields, check_int, check_number, check_type
from moe_ops.quant.formats import Format
from moe_ops.registry.ranges import Ranges

VERSION = 1
SHIPPED = Path(__file__).parents[1] / "tuned"
ADVICE = "mend it, or let moe_ops.tune write a new file"
# A backend must be this much faster than that of fewer tokens to take over.
MARGIN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLayer:
    """What times depend on, besides tokens, routing and backend."""

    device: str  # the name of a cost.Device
    op: str
    E: int
    K: int
    D: int
    I: int  # noqa: E741
    dtype: str
    w_format: str = ""
    x_format: str = ""
    transposed: bool = False  # an expert's weights, in memory: by columns
    layout: str = ""  # that weights were prepared in


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement: what was run."""

    tokens: int
    routing: str
    backend: str


Table = dict[TunedLayer, dict[Cell, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of one layer, by number of tokens and backend: the geometric mean over routings."""

    by_tokens: dict[int, dict[str, float]] = field(default_factory=dict)
    possible: Mapping[str, int | None] = field(default_factory=dict)  # rows; None: any number

    @staticmethod
    def of(
        cells: dict[Cell, float],
        possible: Mapping[str, int | None],
        paths: frozenset[str] = frozenset(),
    ) -> Times:
        """The times of the backends in `possible`, each with the most tokens that it can run (None:
        any number). A number of tokens is left out unless all backends that can run it were
        measured on the same number of routings; `paths`, ways in which backends run, count where
        they were measured.
        """
        logs: dict[int, dict[str, list[float]]] = {}
        for cell, us in cells.items():
            if cell.backend in possible:
                logs.setdefault(cell.tokens, {}).setdefault(cell.backend, []).append(math.log(us))
        found: dict[int, dict[str, float]] = {}
        for tokens in sorted(logs):
            at = logs[tokens]
            able = {b for b, upto in possible.items() if upto is None or tokens <= upto}
            able -= paths - at.keys()
            if at.keys() == able and len({len(values) for values in at.values()}) == 1:
                found[tokens] = {b: math.exp(sum(v) / len(v)) for b, v in at.items()}
        return Times(by_tokens=found, possible=possible)

    def ranges(self) -> Ranges:
        """The fastest backend by number of tokens; between two counts it changes halfway, or where
        a backend can run no more.
        """
        chosen: list[tuple[int, str]] = []
        for tokens, times in self.by_tokens.items():
            best = min(times, key=times.__getitem__)
            before = times.get(chosen[-1][1]) if chosen else None
            if before is not None and times[best] > (1 - MARGIN) * before:
                best = chosen[-1][1]
            chosen.append((tokens, best))
        found: list[tuple[int | None, str]] = []
        for (tokens, backend), (after, other) in itertools.pairwise(chosen):
            if backend != other:
                found.append((self._within(backend, (tokens + after) // 2), backend))
        if not chosen:
            return ()
        last, backend = chosen[-1]
        if self.possible.get(backend) is None:
            return (*found, (None, backend))
        times = {b: t for b, t in self.by_tokens[last].items() if self.possible.get(b) is None}
        if not times:
            return ()
        return (
            *found,
            (self._within(backend, None), backend),
            (None, min(times, key=times.__getitem__)),
        )

    def _within(self, backend: str, upto: int | None) -> int | None:
        limits = [n for n in (self.possible.get(backend), upto) if n is not None]
        return min(limits, default=None)

    def largest(self, low: int, high: int | None) -> int | None:
        """The largest measured number of tokens from low to high."""
        inside = [t for t in self.by_tokens if low <= t and (high is None or t <= high)]
        return max(inside, default=None)


def layer_of_call(device: str, op: str, a: Any) -> TunedLayer | None:
    """The key of a call; None if the op is not tuned, or a size not known."""
    if op != "experts":
        return None
    w13, K = a.w13_EFD, a.ids_TK.shape[1]
    E, (D, width) = w13.shape[0], a.widths
    if not all(isinstance(n, int) for n in (E, K, D, width)):
        return None
    return TunedLayer(
        device=device,
        op=op,
        E=E,
        K=K,
        D=D,
        I=width,
        dtype=str(a.x_TD.dtype).removeprefix("torch."),
        w_format=_common_name(a.w_format),
        x_format=_common_name(a.x_format),
        transposed=a.transposed and w13.stride(1) != 1,  # else only by its shape
        layout=a.layout,
    )


def _common_name(format: str) -> str:
    """The one name of a format that may have several; empty for 16 bits."""
    return Format.of(format).name if format else ""


def tables(users: str | None) -> list[Path]:
    """The files that a choice reads, later ones winning; their contents are part of any cache key.

    Raises FileNotFoundError if the user's is not there.
    """
    found = sorted(SHIPPED.glob("*.json"))
    if users is not None:
        if not Path(users).is_file():
            raise FileNotFoundError(f"there is no tuned table {users}; moe_ops.tune writes one")
        found.append(Path(users))
    return found


def load(users: str | None) -> Table:
    """The shipped tables, and over them the user's."""
    found: Table = {}
    for path in tables(users):
        for layer, cells in read(path).items():
            found[layer] = found.get(layer, {}) | cells
    return found


def users_table(users: str | None) -> Table:
    """The user's table alone, empty if there is none. Raises as `tables` and `read` do."""
    return {} if users is None else read(tables(users)[-1])


def read(path: Path) -> Table:
    """The table in a file. Raises ValueError, naming the file, for anything else that it holds."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; moe_ops.tune writes a table") from None
    if not isinstance(values, dict) or not isinstance(values.get("layers"), list):
        raise ValueError(f"{path} is no tuned table: it has no list of layers; {ADVICE}")
    if values.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {values.get('version')}, this is moe_ops with tables of version "
            f"{VERSION}; tune again into a new file"
        )
    found: Table = {}
    for i, entry in enumerate(values["layers"]):
        try:
            layer, cells = _layer(entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error} (layer {i}); {ADVICE}") from None
        found[layer] = found.get(layer, {}) | cells
    return found


def _layer(entry: Any) -> tuple[TunedLayer, dict[Cell, float]]:
    """One layer of a table, with its times. Raises TypeError or ValueError for anything else."""
    check_type("a layer", entry, dict, "an object")
    names = {f.name for f in fields(TunedLayer)}
    unknown = entry.keys() - names - {"times"}
    if unknown:
        raise ValueError(f"a layer has no {', '.join(sorted(unknown))}")
    needed = {f.name for f in fields(TunedLayer) if f.default is MISSING} | {"times"}
    if needed - entry.keys():
        raise ValueError(f"a layer lacks {', '.join(sorted(needed - entry.keys()))}")
    layer = TunedLayer(**{name: value for name, value in entry.items() if name != "times"})
    check_fields(layer)
    # Tables of before may have another name of a format.
    w_format, x_format = map(_common_name, (layer.w_format, layer.x_format))
    layer = replace(layer, w_format=w_format, x_format=x_format)
    check_type("times", entry["times"], list, "a list")
    return layer, dict(map(_time, entry["times"]))


def _time(values: Any) -> tuple[Cell, float]:
    if not isinstance(values, list) or len(values) != 4:
        raise ValueError(f"a time is [tokens, routing, backend, microseconds], got {values!r}")
    tokens, routing, backend, us = values
    check_int("the tokens of a time", tokens, least=1)
    cell = Cell(tokens=tokens, routing=routing, backend=backend)
    check_fields(cell)
    check_number("the microseconds of a time", us)
    if not 0 < us < math.inf:
        raise ValueError(f"the microseconds of a time must be above 0, got {us}")
    return cell, us


def write(path: Path, table: Table) -> None:
    """Write a table so that a reader, or an interruption, never sees half of it."""
    layers = [
        {
            **asdict(layer),
            "times": [[c.tokens, c.routing, c.backend, round(us, 2)] for c, us in cells.items()],
        }
        for layer, cells in table.items()
    ]
    lines = ",\n".join(json.dumps(layer) for layer in layers)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    written.write_text(f'{{"version": {VERSION}, "layers": [\n{lines}\n]}}\n')
    os.replace(written, path)
