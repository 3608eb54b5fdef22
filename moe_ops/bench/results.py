"""What a run of `bench layer` found, as it is written to a file, and what follows from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe_ops.bench import formats
from moe_ops.bench.cells import Cell
from moe_ops.bench.contenders import OURS
from moe_ops.bench.rates import Rates
from moe_ops.testing import Case

SCHEMA = 1
BANDS = ((1, 4), (16, 256), (1024, 16384))
SAME_FLOOR = 0.01  # floors of two routings that differ by less ask the same of a layer

Peers = dict[str, dict[int, dict[str, float]]]  # microseconds by layer, tokens and name
Floors = dict[str, dict[int, float]]  # microseconds by layer and tokens
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The geometric mean of floor / time over our cells in a range of tokens."""

    routing: str
    low: int
    high: int
    cells: int
    share: float
    given_share: float | None  # by the rates that were given


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """A skewed routing against the uniform one: of the times, and of what must be done."""

    layer: str
    tokens: int
    routing: str
    time_ratio: float
    floor_ratio: float

    @property
    def same_work(self) -> bool:
        return abs(self.floor_ratio - 1) < SAME_FLOOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """One run, or several in turn on devices of one name, whose commands are lines. Versions are
    those of packages by name; `given` are rates that were not measured. The floors of a cell are by
    the rates of its own run.
    """

    command: str
    device: str
    dtype: str
    format: str = ""  # WEIGHTS or WEIGHTS+INPUTS; empty: not quantised
    backend: str | None = None  # that ours was forced to run on
    seconds: float | None = None  # that each measurement loaded the device, if that was given
    versions: dict[str, str]
    rates: Rates
    earlier_rates: list[Rates] = field(default_factory=list)  # of the runs before the last
    given: Rates | None = None
    layers: dict[str, Case]
    cells: list[Cell] = field(default_factory=list)
    peers: Peers = field(default_factory=dict)
    peer_floors: Floors = field(default_factory=dict)  # by the given rates

    @property
    def eight_bit(self) -> bool:
        """Whether products are held against the rate in 8 bits."""
        return bool(self.format) and formats.eight_bit(formats.parse(self.format))

    def ours(self) -> Iterator[Cell]:
        """Our cells that were timed."""
        return (c for c in self.cells if c.contender == OURS and c.us is not None)

    def find(self, layer: str, tokens: int, routing: str, contender: str = OURS) -> Cell | None:
        wanted = (layer, tokens, routing, contender)
        found = (c for c in self.cells if (c.layer, c.tokens, c.routing, c.contender) == wanted)
        return next(found, None)

    def others(self) -> list[str]:
        return list(dict.fromkeys(c.contender for c in self.cells if c.contender != OURS))

    def best_peer(self, cell: Cell) -> tuple[str, float] | None:
        """The name and the microseconds of the fastest peer, which were given uniform routing."""
        times = self.peers.get(cell.layer, {}).get(cell.tokens, {})
        if not times or cell.routing != "uniform":
            return None
        return min(times.items(), key=lambda item: item[1])

    def times_as_fast(self, cell: Cell) -> float | None:
        """How many times as fast as the best peer a cell is; None if one of them has no time.

        Random routings of a few tokens use more or fewer experts. So times are compared as
        multiples of their floors, by the same rates, where both floors are known.
        """
        peer = self.best_peer(cell)
        if peer is None or cell.us is None:
            return None
        floor = self.peer_floors.get(cell.layer, {}).get(cell.tokens)
        work = 1.0 if floor is None or cell.given_floor_us is None else cell.given_floor_us / floor
        return work * peer[1] / cell.us

    def bands(self) -> list[Band]:
        """The bands of tokens of each routing, without bands that have no cell."""
        found = []
        for routing in dict.fromkeys(c.routing for c in self.cells):
            for low, high in BANDS:
                here = [c for c in self.ours() if c.routing == routing and low <= c.tokens <= high]
                if here:
                    found.append(self._band(routing, low, high, here))
        return found

    def _band(self, routing: str, low: int, high: int, cells: list[Cell]) -> Band:
        given = [c.given_share for c in cells if c.given_share is not None]
        return Band(
            routing=routing,
            low=low,
            high=high,
            cells=len(cells),
            share=geometric_mean(c.share for c in cells),
            given_share=geometric_mean(given) if self.given else None,
        )

    def skews(self) -> list[Skew]:
        """How uneven routing compares with uniform routing, for each cell of ours that was timed
        with both."""
        found = []
        for cell in self.ours():
            uniform = self.find(cell.layer, cell.tokens, "uniform")
            if cell is uniform or uniform is None or uniform.us is None or cell.us is None:
                continue
            skew = Skew(
                layer=cell.layer,
                tokens=cell.tokens,
                routing=cell.routing,
                time_ratio=cell.us / uniform.us,
                floor_ratio=cell.floor_us / uniform.floor_us,
            )
            found.append(skew)
        return found

    def controls(self) -> dict[str, list[float]]:
        """For each contender beside ours that is in the file of peers too, the times of this run
        over those of the file. Far from 1, the file is not one to compare this run with."""
        found: dict[str, list[float]] = {}
        for c in self.cells:
            earlier = self.peers.get(c.layer, {}).get(c.tokens, {}).get(c.contender)
            if c.us is not None and earlier is not None and c.routing == "uniform":
                found.setdefault(c.contender, []).append(c.us / earlier)
        return found

    def slower(self) -> list[tuple[Cell, str, float]]:
        """Our cells that the best peer beats, with its name and its microseconds."""
        found = []
        for cell in self.ours():
            peer, ratio = self.best_peer(cell), self.times_as_fast(cell)
            if peer is not None and ratio is not None and ratio < 1:
                found.append((cell, *peer))
        return found

    def wrong(self) -> list[Cell]:
        return [c for c in self.cells if c.wrong]


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def dump(results: Results) -> dict[str, Any]:
    """Results as JSON. What follows from the cells is written out for readers without this code."""
    return {
        "schema": SCHEMA,
        **asdict(results),
        "bands": [asdict(band) for band in results.bands()],
        "skews": [asdict(skew) for skew in results.skews()],
    }


def write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def load(path: Path) -> Results:
    """Raises ValueError for another schema."""
    values = json.loads(path.read_text())
    if values.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {values.get('schema')}, this reads {SCHEMA}: measure it again"
        )
    given = values["given"]
    return Results(
        command=values["command"],
        device=values["device"],
        dtype=values["dtype"],
        format=values.get("format", ""),
        backend=values.get("backend"),
        seconds=values.get("seconds"),
        versions=values["versions"],
        rates=Rates(**values["rates"]),
        earlier_rates=[Rates(**rates) for rates in values.get("earlier_rates", ())],
        given=None if given is None else Rates(**given),
        layers={name: Case(**case) for name, case in values["layers"].items()},
        cells=[Cell(**cell) for cell in values["cells"]],
        peers=by_number(values["peers"]),
        peer_floors=by_number(values.get("peer_floors", {})),
    )


def read_peers(path: Path) -> tuple[Peers, Floors]:
    """The times of a file of peers, {"us": {layer: {tokens: {name: microseconds}}}}, and what a
    floor was for them, {"floor_us": {layer: {tokens: microseconds}}}, if it says so.
    """
    values = json.loads(path.read_text())
    if "us" not in values:
        raise ValueError(f'{path} has no "us": {{layer: {{tokens: {{name: microseconds}}}}}}')
    return by_number(values["us"]), by_number(values.get("floor_us", {}))


def by_number(of_layers: dict[str, dict[str, Value]]) -> dict[str, dict[int, Value]]:
    """The values of each layer by numbers of tokens. In JSON these keys are texts."""
    return {
        layer: {int(tokens): value for tokens, value in by_tokens.items()}
        for layer, by_tokens in of_layers.items()
    }
