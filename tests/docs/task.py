"""The table of docs/performance/ACCURACY.md that is made from what `bench task` wrote, on one
device or on several: `<!-- task NAME NAME -->`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from moe_ops.bench import task
from moe_ops.bench.task import TaskResults, percent
from moe_ops.bench.task_scores import Pair, TaskCell
from tests.docs import blocks

BLOCK = re.compile(r"<!-- task (\w+(?: \w+)*) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str, folder: Path) -> str:
    """The page with its `task` blocks made anew; the first file orders the rows."""

    def filled(block: re.Match[str]) -> str:
        runs = [
            task.loaded(json.loads((folder / f"{n}.json").read_text())) for n in block[1].split()
        ]
        return f"<!-- task {block[1]} -->\n\n{text(runs)}\n\n<!-- end -->"

    return BLOCK.sub(filled, page)


def text(runs: Sequence[TaskResults]) -> str:
    """Where it was measured, what the model makes of the text before it is quantised, and schemes
    by what they lose, the least first."""
    places = [
        f"- {where(run, 1)}: {run.device}, torch {run.versions['torch']}. In float32 arithmetic "
        f"the perplexity is {math.exp(run.float32[0]):.3f}, and {100 * run.float32[1]:.2f} % are "
        "right."
        for run in runs
    ]
    columns = [(run, n) for run in runs for n in sorted({c.ranks for c in run.cells})]
    head = ["scheme", "weights", "inputs", "bits", "perplexity", "right, %"]
    head += [f"lost, {where(run, n)}, %" for run, n in columns]
    first = {c.key[0]: c for c in reversed(runs[0].cells)}
    ordered = sorted(first.items(), key=lambda item: item[1].lost_nats)
    rows = [row(pair, cell, columns) for pair, cell in ordered]
    return "\n\n".join(["\n".join(places), blocks.table(head, rows)])


def where(run: TaskResults, ranks: int) -> str:
    device = run.device.split()[1] if run.device.startswith("NVIDIA ") else "CPU"
    return f"{device}, {ranks} ranks" if ranks > 1 else device


def row(pair: Pair, cell: TaskCell, columns: Sequence[tuple[TaskResults, int]]) -> list[str]:
    scheme, *formats = pair
    found = [f"`{scheme}`", *(name or "16-bit" for name in formats), f"{cell.bits_per_weight:.2f}"]
    found += [f"{cell.perplexity:.3f}", percent(cell)[2]]
    for i, (run, ranks) in enumerate(columns):
        here = next((c for c in run.cells if c.key == (pair, ranks)), None)
        lost, error, _ = percent(here) if here is not None else ("", "", "")
        found.append(f"{lost} ± {error}" if here is not None and not i else lost)
    return found
