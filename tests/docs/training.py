"""The tables of docs/performance/ that are made from what `bench train` wrote."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from moe_ops.bench import train
from moe_ops.bench.train_cells import TrainCell
from tests.docs import blocks

BLOCK = blocks.block("train")
HEAD = [
    "layer", "tokens", "implementation", "forward, µs", "with backward, µs", "of its products, %",
    "peak, MB", "saved, B a token",
]  # fmt: skip


def fill(page: str, folder: Path) -> str:
    """The page with the tables of its `train` blocks made anew."""
    return blocks.fill(page, folder, "train", tables)


def tables(figures: dict[str, Any]) -> str:
    results = train.loaded(figures)
    versions = ", ".join(
        f"{name} {results.versions[name]}" for name in ("torch", "transformers", "liger-kernel")
        if name in results.versions
    )  # fmt: skip
    place = f"One {results.device}, {results.dtype}, {versions}; {results.rates}:"
    commands = "\n".join(f"    {line}" for line in results.command.splitlines())
    rows = []
    for _, cells in groupby(results.cells, lambda c: c.key[:3]):
        timed = [c for c in cells if c.both is not None]
        rows += [_row(c, first=i == 0) for i, c in enumerate(timed)]
    return "\n\n".join([place, commands, blocks.table(HEAD, rows)])


def _row(cell: TrainCell, first: bool) -> list[str]:
    assert cell.forward is not None and cell.both is not None and cell.share is not None
    assert cell.peak_bytes is not None and cell.saved_bytes is not None
    layer = f"{cell.layer}, frozen" if cell.frozen else cell.layer
    return [
        layer if first else "", f"{cell.tokens}" if first else "", f"`{cell.contender}`",
        f"{cell.forward.us:.0f}", f"{cell.both.us:.0f}", f"{100 * cell.share:.0f}",
        f"{cell.peak_bytes / 1e6:.0f}", f"{cell.saved_bytes / cell.tokens:.0f}",
    ]  # fmt: skip
