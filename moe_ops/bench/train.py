"""`bench train`: from options to a file of figures, which a later run goes on in, and to tables."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from moe_ops.bench import grid, resume
from moe_ops.bench.contenders import OURS, label
from moe_ops.bench.rates import Rates, digits, measure_rates
from moe_ops.bench.results import write
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Timing
from moe_ops.bench.train_cells import Place, TrainCell, TrainGrid, measure
from moe_ops.bench.train_contenders import CONTENDERS, NAMES
from moe_ops.bench.train_inputs import TRAINED, TrainLayer
from moe_ops.checks.shapes import DTYPES
from moe_ops.ops.activate import Activation
from moe_ops.testing import Case

SCHEMA = "train 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResults:
    """One run, or several in turn on devices of one name, whose commands are lines."""

    command: str
    device: str
    dtype: str
    versions: dict[str, str]
    rates: Rates
    earlier_rates: list[Rates] = field(default_factory=list)  # of the runs before the last
    layers: dict[str, TrainLayer]
    cells: list[TrainCell] = field(default_factory=list)

    def at(self, place: Place) -> list[TrainCell]:
        return [cell for cell in self.cells if cell.key[:3] == place]


def measure_train(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure and print what the file of --json does not hold; what is known so far is written
    after each number of tokens."""
    path = Path(args.json) if args.json else None
    asked = grid_of(args)
    same = {
        "device": grid.device_name(asked.device),
        "dtype": args.dtype,
        "versions": versions(),
    }
    earlier = resume.held(path, load, same, asked.layers) if path else None
    missing = [p for p in asked.places() if earlier is None or not is_done(earlier, asked, p)]
    rates = earlier.rates if earlier and not missing else _rates(asked, same["device"])
    results = TrainResults(
        command=command, rates=rates, layers={one.name: one for one in asked.layers}, **same
    )
    if earlier is not None:
        results = joined(earlier, results, missing)
    for cells in measure(asked, rates, missing):
        results.cells.extend(cells)
        results.cells.sort(key=lambda cell: order(results, cell))
        if path is not None:
            write(path, dump(results))
    print(report(results, asked.places()))
    return dump(results)


def grid_of(args: argparse.Namespace) -> TrainGrid:
    """What the options ask for."""
    return TrainGrid(
        layers=[TRAINED[name] for name in args.layers],
        tokens=args.tokens,
        contenders=[c for c in CONTENDERS if c.name.startswith(OURS) or c.name in args.against],
        dtype=DTYPES[args.dtype],
        device=torch.device(args.device),
        frozen=args.frozen,
        repeats=args.repeats,
    )


def _rates(asked: TrainGrid, device: str) -> Rates:
    rates = measure_rates(asked.device, asked.dtype)
    dtype = str(asked.dtype).removeprefix("torch.")
    print(f"{device}, {dtype}: {rates}\n", flush=True)
    return rates


def versions() -> dict[str, str]:
    """The versions of the packages that have a part in the times."""
    found = grid.versions(transformers=True)
    with contextlib.suppress(metadata.PackageNotFoundError):  # its cells say so
        found["liger-kernel"] = metadata.version("liger-kernel")
    return found


def is_done(results: TrainResults, asked: TrainGrid, place: Place) -> bool:
    """Whether all implementations of a place that there are were timed."""
    timed = {cell.contender for cell in results.at(place) if cell.both is not None}
    wanted = asked.wanted(results.layers.get(place[0], TRAINED[place[0]]))
    return {contender.name for contender in wanted} <= timed


def joined(earlier: TrainResults, now: TrainResults, missing: Sequence[Place]) -> TrainResults:
    """A run that has measured nothing yet, with what a file holds but for the places that it will
    measure: implementations take turns in one run."""
    if not missing:
        return earlier
    return TrainResults(
        command=resume.joined_commands(earlier.command, now.command),
        device=now.device,
        dtype=now.dtype,
        versions=earlier.versions | now.versions,
        rates=now.rates,
        earlier_rates=[*earlier.earlier_rates, earlier.rates],
        layers=earlier.layers | now.layers,
        cells=[cell for cell in earlier.cells if cell.key[:3] not in missing],
    )


def order(results: TrainResults, cell: TrainCell) -> tuple[int, bool, int, int]:
    """Where one run would have measured a cell."""
    layer, name = list(results.layers).index(cell.layer), NAMES.index(cell.contender)
    return layer, cell.frozen, cell.tokens, name


def dump(results: TrainResults) -> dict[str, Any]:
    return {"schema": SCHEMA, **asdict(results)}


def load(path: Path) -> TrainResults:
    """Raises ValueError for another schema."""
    values = json.loads(path.read_text())
    if values.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {values.get('schema')}, this reads {SCHEMA}")
    return loaded(values)


def loaded(values: dict[str, Any]) -> TrainResults:
    """What `dump` gave."""
    names = ("command", "device", "dtype", "versions")
    return TrainResults(
        **{name: values[name] for name in names},
        rates=Rates(**values["rates"]),
        earlier_rates=[Rates(**rates) for rates in values["earlier_rates"]],
        layers={name: _layer(layer) for name, layer in values["layers"].items()},
        cells=[_cell(cell) for cell in values["cells"]],
    )


def _layer(values: dict[str, Any]) -> TrainLayer:
    made = {"case": Case(**values["case"]), "activation": Activation(**values["activation"])}
    return TrainLayer(**(values | made))


def _cell(values: dict[str, Any]) -> TrainCell:
    times = {n: None if values[n] is None else Timing(**values[n]) for n in ("forward", "both")}
    return TrainCell(**(values | times))


def report(results: TrainResults, places: Sequence[Place]) -> str:
    """A table for each layer, and what was not timed."""
    layers = dict.fromkeys((layer, frozen) for layer, _, frozen in places)
    parts = [layer_table(results, [p for p in places if (p[0], p[2]) == one]) for one in layers]
    cells = [cell for place in places for cell in results.at(place)]
    untold = [
        f"WRONG, not timed: {c.contender} on {c.layer}, {c.tokens} tokens: {c.wrong}"
        for c in cells
        if c.wrong
    ]
    refused: dict[tuple[str, str], list[str]] = {}
    for c in cells:
        if c.refused and c.layer not in refused.setdefault((c.contender, c.refused), []):
            refused[c.contender, c.refused].append(c.layer)
    untold += [
        f"{name} does not take {', '.join(found)}: {why}" for (name, why), found in refused.items()
    ]
    return "\n\n".join([*parts, *(["\n".join(untold)] if untold else [])])


def layer_table(results: TrainResults, places: Sequence[Place]) -> str:
    """One line for each implementation at each number of tokens of a layer."""
    name, _, frozen = places[0]
    layer, cells = results.layers[name], [c for place in places for c in results.at(place)]
    case, products = layer.case, cells[0].products
    title = f"{name}: E={case.E} K={case.K} D={case.D} I={case.I}, {results.dtype}"
    title += ", frozen experts" if frozen else ""
    head = [
        "implementation", "tokens", "forward µs", "forward + backward µs", f"x {OURS}",
        f"% of {products} products", "peak MB", "saved B/token",
    ]  # fmt: skip
    rows = [head, *(_row(cell, results.at(cell.key[:3])) for cell in cells if not cell.refused)]
    ran = {label(cell.ran) for cell in cells if cell.contender == OURS and cell.ran}
    return "\n".join([title, aligned(rows), *(f"{OURS} ran {text}" for text in sorted(ran))])


def _row(cell: TrainCell, beside: Sequence[TrainCell]) -> list[str]:
    row = [cell.contender, str(cell.tokens)]
    if cell.forward is None or cell.both is None or cell.share is None:
        return [*row, "WRONG", *[""] * 5]
    ours = next((c.both for c in beside if c.contender == OURS), None)
    row += [f"{cell.forward.us:.1f}", f"{cell.both.us:.1f}"]
    row.append("" if ours is None else f"{cell.both.us / ours.us:.2f}x")
    row.append(f"{100 * cell.share:.1f}")
    row.append("" if cell.peak_bytes is None else digits(cell.peak_bytes / 1e6))
    row.append("" if cell.saved_bytes is None else f"{cell.saved_bytes / cell.tokens:.0f}")
    return row
