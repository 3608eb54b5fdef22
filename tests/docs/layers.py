"""The tables of layers on GPUs that are made from files which were put together from runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from moe_ops.bench.rates import Rates
from moe_ops.bench.results import BANDS, load
from tests.docs import blocks

CELLS, FORMATS = blocks.block("cells"), blocks.block("formats")
MEANS = re.compile(r"<!-- means (\w+(?: \w+)*) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str, folder: Path) -> str:
    """The page with its `cells`, `formats` and `means` blocks made anew."""
    page = blocks.fill(page, folder, "cells", cells)
    page = blocks.fill(page, folder, "formats", formats)

    def filled(block: re.Match[str]) -> str:
        return f"<!-- means {block[1]} -->\n\n{means(block[1].split(), folder)}\n\n<!-- end -->"

    return MEANS.sub(filled, page)


def cells(figures: dict[str, Any]) -> str:
    """One format: tokens by layer."""
    times = {(c["layer"], c["tokens"]): c for c in figures["cells"]}
    layers = list(dict.fromkeys(layer for layer, _ in times))
    rows = [
        [str(tokens), *(_cell(times.get((layer, tokens))) for layer in layers)]
        for tokens in sorted({tokens for _, tokens in times})
    ]
    where = f"{_where(figures)}; {Rates(**figures['rates'])}:"
    what = "Uniform routing: µs (% of floor)."
    command = f"    {figures['command']}"
    return "\n\n".join([where, command, what, blocks.table(["tokens", *layers], rows)])


def formats(figures: dict[str, Any]) -> str:
    """Several formats, a table for each layer: formats by tokens, beside bfloat16."""
    by_format = {
        name: {(c["layer"], c["tokens"]): c for c in one["cells"]}
        for name, one in figures["formats"].items()
    }
    beside = by_format["bfloat16"]
    # The first command is bfloat16's. Not every machine takes the others, by rates of 8 bits.
    parts = [f"{_where(figures)}; further rows with `--format`:"]
    parts.append(f"    {figures['command'].splitlines()[0]}")
    for layer in dict.fromkeys(layer for layer, _ in beside):
        tokens = [t for one, t in beside if one == layer]
        rows = [
            [f"`{name}`", *(_cell(times.get((layer, t)), beside[layer, t]) for t in tokens)]
            for name, times in by_format.items()
        ]
        parts.append(blocks.table([f"{layer}, tokens", *map(str, tokens)], rows))
    return "\n\n".join(parts)


def means(names: list[str], folder: Path) -> str:
    """Several runs: the floor's share of the time, and cells that are behind a peer."""
    rows = []
    for name in names:
        run = load(folder / f"{name}.json")
        shares = {(b.low, b.high): b.share for b in run.bands() if b.routing == "uniform"}
        compared = sum(run.best_peer(cell) is not None for cell in run.ours())
        ahead = f"{compared - len(run.slower())} of {compared}"
        shown = [f"{100 * shares[band]:.1f} %" for band in BANDS]
        rows.append([f"`{run.format or run.dtype}`", *shown, ahead])
    spans = [f"{low} to {high} tokens" for low, high in BANDS]
    return blocks.table(["weights + inputs", *spans, "cells ahead of every peer"], rows)


def _where(figures: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    return f"One {figures['device']}, {versions}"


def _cell(cell: dict[str, Any] | None, beside: dict[str, Any] | None = None) -> str:
    """Microseconds (% of floor, times as fast as another)."""
    if cell is None:
        return ""
    ratio = f", {beside['us'] / cell['us']:.2f}" if beside else ""
    return f"{cell['us']:.1f} ({100 * cell['floor_us'] / cell['us']:.0f} %{ratio})"
