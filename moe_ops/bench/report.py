"""The tables of docs/performance/ that are made from the file of a run on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

from moe_ops.bench.formats import in_words
from moe_ops.bench.results import Results, geometric_mean, load

# Between these two lines the page is made: the name is that of the file, without .json.
BLOCK = re.compile(r"<!-- results (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def fill(page: str, folder: Path) -> str:
    """The page with the tables of every block made anew from its file."""

    def block(found: re.Match[str]) -> str:
        text = section(load(folder / f"{found[1]}.json"))
        return f"<!-- results {found[1]} -->\n\n{text}\n\n<!-- end -->"

    return BLOCK.sub(block, page)


def section(results: Results) -> str:
    """What was run, every cell, the means, the skew and the first calls."""
    parts = [_conditions, _cells, _controls, _bands, _skews, _first_calls]
    return "\n\n".join(text for part in parts if (text := part(results)))


def _conditions(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    format = f"{in_words(results.format)}, " if results.format else ""
    rates = f"{results.rates}"
    if results.earlier_rates:
        rates += f" (before: {'; '.join(str(earlier) for earlier in results.earlier_rates)})"
    text = f"One {results.device}, {results.dtype}, {format}{versions}; {rates}:"
    commands = "\n".join(f"    {command}" for command in results.command.splitlines())
    return f"{text}\n\n{commands}"


def _cells(results: Results) -> str:
    """A table of tokens by layer: microseconds (% of floor, times as fast as the best peer)."""
    layers = list(results.layers)
    tokens = sorted({c.tokens for c in results.cells})
    rows = []
    for count in tokens:
        row = [str(count)]
        for layer in layers:
            row.append(_cell(results, layer, count))
        rows.append(row)
    peers = ", times as fast as the best peer" if results.peers else ""
    by = " as multiples of the floors of what was drawn" if results.peer_floors else ""
    head = f"Uniform routing: µs (% of floor{peers}{by})."
    return f"{head}\n\n{_table(['tokens', *layers], rows)}"


def _controls(results: Results) -> str:
    """How far the peers' times can be trusted to hold for this run."""
    return "\n".join(
        f"`{name}` took {geometric_mean(ratios):.2f} times as long as it did among the peers, "
        f"{min(ratios):.2f} to {max(ratios):.2f}."
        for name, ratios in results.controls().items()
    )


def _cell(results: Results, layer: str, tokens: int) -> str:
    cell = results.find(layer, tokens, "uniform")
    if cell is None:
        return ""
    if cell.us is None:
        return cell.untimed
    ratio = results.times_as_fast(cell)
    versus = "" if ratio is None else f", {ratio:.2f}"
    return f"{cell.us:.1f} ({100 * cell.share:.0f} %{versus})"


def _bands(results: Results) -> str:
    head = ["tokens", "routing", "cells", "floor / time, geometric mean"]
    if results.given:
        product = results.given.product(results.eight_bit)
        head.append(f"by {results.given.copy_tbs:g} TB/s, {product:g} TFLOP/s")
    rows = []
    for b in results.bands():
        row = [f"{b.low} to {b.high}", b.routing, str(b.cells), f"{100 * b.share:.1f} %"]
        row += [] if b.given_share is None else [f"{100 * b.given_share:.1f} %"]
        rows.append(row)
    return _table(head, rows)


def _skews(results: Results) -> str:
    """The worst ratio of times at each number of tokens, where both routings ask for as much."""
    same = [skew for skew in results.skews() if skew.same_work]
    rows = []
    for tokens in sorted({skew.tokens for skew in same}):
        here = [skew for skew in same if skew.tokens == tokens]
        worst = max(here, key=lambda skew: skew.time_ratio)
        rows.append([str(tokens), str(len(here)), f"{worst.time_ratio:.2f}", worst.layer])
    if not rows:
        return ""
    head = (
        f"Zipf's law against uniform routing, in the {len(same)} cells where the floors are equal."
    )
    return f"{head}\n\n{_table(['tokens', 'cells', 'most zipf / uniform', 'in'], rows)}"


def _first_calls(results: Results) -> str:
    """A table by layer: the longest first call of ours, and the sum of all."""
    rows = []
    for layer in results.layers:
        cells = [c for c in results.ours() if c.layer == layer and c.first_s is not None]
        if cells:
            longest = max(cells, key=lambda c: c.first_s or 0.0)
            total = sum(c.first_s or 0.0 for c in cells)
            rows.append([layer, f"{longest.first_s:.1f}", str(longest.tokens), f"{total:.1f}"])
    if not rows:
        return ""
    head = "The first call of each cell, with what was compiled for it, in seconds."
    return f"{head}\n\n{_table(['layer', 'longest', 'at tokens', 'all cells'], rows)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
