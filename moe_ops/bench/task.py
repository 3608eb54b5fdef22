"""`bench task`: what every scheme loses on a real task, from options to a file of figures, which a
later run goes on in, and to a table.

A small MoE model is trained once on text that Python ships, to a useful perplexity, and kept in a
file. Random weights show errors of layers; only trained ones show what the errors cost. Then its
held-out text is scored in every scheme, on one rank and on several, beside bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moe_ops.bench import progress, resume
from moe_ops.bench.grid import device_name, versions
from moe_ops.bench.results import write
from moe_ops.bench.tables import aligned
from moe_ops.bench.task_model import About, Recipe, Trained, about_of, trained
from moe_ops.bench.task_scores import (
    Pair,
    Shared,
    TaskCell,
    cells,
    in_formats,
    over_ranks,
    pairs,
    score,
    some_rows,
)
from moe_ops.bench.task_text import python_help

SCHEMA = "task 1"
RECIPE = Recipe()
NONE: Pair = ("none", "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """One run, or several in turn on devices of one name, whose commands are lines.

    rows: of held-out text that were scored; float32: nats and accuracy of the same weights in
    float32 arithmetic on one rank.
    """

    command: str
    device: str
    versions: dict[str, str]
    about: About
    rows: int
    float32: tuple[float, float]
    cells: list[TaskCell] = field(default_factory=list)


def measure_task(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Train, unless the file of --weights holds the model; measure what the file of --json does not
    hold, writing it after each cell; print all."""
    begun, device = time.monotonic(), torch.device(args.device)
    recipe = replace(RECIPE, steps=args.steps or RECIPE.steps, seed=args.seed)
    model = some_rows(trained(Path(args.weights), recipe, python_help(), device), args.rows)
    results = begin(args, command, model)
    wanted = pairs(args.schemes, args.every_format)
    if NONE not in wanted:
        wanted = [NONE, *wanted]
    for cell in measure(results, wanted, args, model):
        results.cells.append(cell)
        results.cells.sort(key=lambda c: (c.ranks, ordered().index(c.key[0])))
        if args.json:
            write(Path(args.json), dump(results))
        if args.seconds is not None and time.monotonic() - begun > args.seconds:
            break
    progress.done()
    print(table(results))
    return dump(results)


def begin(args: argparse.Namespace, command: str, model: Trained) -> TaskResults:
    """The results before anything is measured, with the cells of the file of --json. Raises
    ValueError if it holds another model's, or those of another device."""
    same: dict[str, Any] = {
        "device": device_name(torch.device(args.device)), "versions": versions(transformers=True),
        "about": model.about, "rows": len(model.rows_NS),
    }  # fmt: skip
    earlier = resume.alike(Path(args.json), load, same) if args.json else None
    if earlier is not None:
        return replace(earlier, command=resume.joined_commands(earlier.command, command))
    device = torch.device(args.device)
    plain, _ = in_formats(model.model.float(), NONE, device)
    found = score(plain, model.rows_NS.to(device))
    model.model.bfloat16()  # which changes no weight back
    return TaskResults(command=command, float32=(found.nats, found.accuracy), **same)


def measure(
    results: TaskResults, wanted: Sequence[Pair], args: argparse.Namespace, model: Trained
) -> Iterator[TaskCell]:
    """The cells that the results lack, as they are done."""
    done = {cell.key for cell in results.cells}
    for ranks in args.ranks:
        missing = [pair for pair in wanted if (pair, ranks) not in done]
        if not missing:
            continue
        found: Generator[TaskCell]
        if ranks == 1:
            found = cells(model, missing, torch.device(args.device))
        else:
            found = over_ranks(
                Shared(
                    path=Path(args.weights), rows=len(model.rows_NS), device=args.device,
                    ranks=ranks,
                ),
                missing,
            )  # fmt: skip
        with closing(found):
            for i, cell in enumerate(found):
                progress.tell(f"{ranks} ranks: {i + 1} of {len(missing)}  {cell.scheme}")
                yield cell


def ordered() -> list[Pair]:
    """All pairs, in the order of the schemes; of a scheme the default formats first."""
    from moe_ops.quant.schemes import SCHEMES

    names = list(SCHEMES)
    return list(dict.fromkeys([*pairs(names, False), *pairs(names, True)]))


def dump(results: TaskResults) -> dict[str, Any]:
    """Results as JSON. What follows from a cell is written out for readers without this code."""
    found = [
        asdict(cell) | {"perplexity": cell.perplexity, "lost": cell.lost} for cell in results.cells
    ]
    return {"schema": SCHEMA, **asdict(results), "cells": found}


def load(path: Path) -> TaskResults:
    """Raises ValueError for another schema."""
    values = json.loads(path.read_text())
    if values.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {values.get('schema')}, this reads {SCHEMA}")
    return loaded(values)


def loaded(values: dict[str, Any]) -> TaskResults:
    """What `dump` gave."""
    kept = TaskCell.__dataclass_fields__
    return TaskResults(
        **{name: values[name] for name in ("command", "device", "versions", "rows")},
        about=about_of(values["about"]),
        float32=tuple(values["float32"]),
        cells=[TaskCell(**{name: cell[name] for name in kept}) for cell in values["cells"]],
    )


def table(results: TaskResults) -> str:
    """The cells by what is lost on the fewest ranks, the least first: one line for each pair."""
    about, ranks = results.about, sorted({cell.ranks for cell in results.cells})
    first = {c.key[0]: c for c in reversed(results.cells)}  # on the fewest ranks
    head = ["scheme", "weights", "inputs", "bits", "perplexity", "lost, %", "±", "accuracy, %"]
    head += [f"lost on {n} ranks, %" for n in ranks if n > 1]
    rows = [head]
    for pair, cell in sorted(first.items(), key=lambda item: item[1].lost_nats):
        row = [pair[0], *(name or "16-bit" for name in pair[1:])]
        row += [f"{cell.bits_per_weight:.2f}", f"{cell.perplexity:.4f}", *percent(cell)]
        more = {c.ranks: c for c in results.cells if c.key[0] == pair}
        rows.append([*row, *(percent(more[n])[0] if n in more else "" for n in ranks if n > 1)])
    nats, accuracy = results.float32
    lines = [
        f"{about.parameters / 1e6:.1f} million parameters, {about.recipe.steps} steps of "
        f"{about.recipe.batch} x {about.recipe.length} bytes in {about.seconds:.0f} s; "
        f"{results.rows * (about.recipe.length - 1)} bytes scored.",
        f"float32 arithmetic: perplexity {math.exp(nats):.4f}, {100 * accuracy:.2f} % accuracy; "
        "lost: perplexity above bfloat16's on one rank, ± a standard error",
    ]
    return "\n".join([*lines, aligned(rows)])


def percent(cell: TaskCell) -> list[str]:
    """What is lost, its standard error, and how much is right."""
    return [
        f"{100 * cell.lost:+.2f}", f"{100 * cell.lost_error:.2f}", f"{100 * cell.accuracy:.2f}"
    ]  # fmt: skip
