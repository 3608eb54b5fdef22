"""The results of `bench layer` as text: a table for each layer, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence

from moe_ops.bench.cells import Cell
from moe_ops.bench.contenders import OURS, label
from moe_ops.bench.formats import in_words
from moe_ops.bench.rates import digits
from moe_ops.bench.results import Band, Results, geometric_mean


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Rows of equal length as columns, flush right but for the one of this number."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if i == left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def layer_table(results: Results, layer: str) -> str:
    """One line for each of our cells of a layer."""
    case = results.layers[layer]
    others = results.others()
    head = ["backend", "tokens", "routing", "µs", "TB/s", "TFLOP/s", "floor µs", "% of floor"]
    head += ["% of given"] if results.given else []
    head += [f"x vs {name}" for name in others]
    head += ["best peer µs", "x vs peer"] if results.peers else []
    mine = [c for c in results.cells if c.layer == layer and c.contender == OURS]
    rows = [head, *(_row(results, cell, others) for cell in mine)]
    title = f"{layer}: E={case.E} K={case.K} D={case.D} I={case.I}, {results.dtype}"
    title += f", {in_words(results.format)}" if results.format else ""
    remarks = []
    if any(not c.cold for c in mine):
        remarks.append("~ some weights may have come from the cache: the layer is too small")
    if any(cell.layer == layer for cell, *_ in results.slower()):
        remarks.append("< slower than the best peer")
    return "\n".join([title, aligned(rows), *remarks])


def _row(results: Results, cell: Cell, others: Sequence[str]) -> list[str]:
    mark = "" if cell.cold else "~"
    row = [label(cell.ran), str(cell.tokens), cell.routing]
    if cell.us is None:
        row += [cell.untimed.upper(), "", "", f"{cell.floor_us:.1f}", ""]
    else:
        row += [f"{mark}{cell.us:.1f}", digits(cell.tbs), digits(cell.tflops)]
        row += [f"{cell.floor_us:.1f}", f"{100 * cell.share:.1f}"]
    if results.given:
        row.append("" if cell.given_share is None else f"{100 * cell.given_share:.1f}")
    for name in others:
        row.append(_ratio(cell, results.find(cell.layer, cell.tokens, cell.routing, name)))
    if results.peers:
        row += _peer(results, cell)
    return row


def _ratio(cell: Cell, other: Cell | None) -> str:
    if cell.us is None or other is None:
        return ""
    return other.untimed if other.us is None else f"{other.us / cell.us:.2f}x"


def _peer(results: Results, cell: Cell) -> list[str]:
    peer = results.best_peer(cell)
    if peer is None:
        return ["", ""]
    name, us = peer
    ratio = results.times_as_fast(cell)
    if ratio is None:
        return [f"{name} {us:.1f}", ""]
    return [f"{name} {us:.1f}", f"{'< ' if ratio < 1 else ''}{ratio:.2f}x"]


def _band(band: Band) -> str:
    given = ""
    if band.given_share is not None:
        given = f", {100 * band.given_share:.1f} % by given rates"
    return (
        f"floor / time, geometric mean of {band.cells} cells, {band.routing}, "
        f"{band.low} to {band.high} tokens: {100 * band.share:.1f} %{given}"
    )


def summary(results: Results) -> str:
    """Bands, skew, cells that a peer beats, and what was wrong."""
    lines = [_band(band) for band in results.bands()]
    same = [skew for skew in results.skews() if skew.same_work]
    if same:
        worst = max(same, key=lambda skew: skew.time_ratio)
        lines.append(
            f"{worst.routing} / uniform where floors are equal, {len(same)} cells: at most "
            f"{worst.time_ratio:.2f}x ({worst.layer}, {worst.tokens} tokens)"
        )
    if results.peers:
        slower = [
            f"{c.layer} at {c.tokens} ({name} {us:.1f} µs, ours {c.us:.1f}: "
            f"{results.times_as_fast(c):.3f}x)"
            for c, name, us in results.slower()
        ]
        compared = sum(results.best_peer(c) is not None for c in results.ours())
        by = ", as multiples of their floors" if results.peer_floors else ""
        lines.append(f"slower than the best peer in {len(slower)} of {compared} cells{by}")
        lines += [f"  {text}" for text in slower]
    lines += [
        f"{name} in this run / in the file of peers, {len(ratios)} cells: geometric mean "
        f"{geometric_mean(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}"
        for name, ratios in results.controls().items()
    ]
    lines += [
        f"WRONG, not timed: {c.contender} on {c.layer}, {c.tokens} tokens {c.routing}: "
        + c.wrong.splitlines()[0]
        for c in results.wrong()
    ]
    refused = {(c.contender, c.layer): c.refused for c in results.cells if c.refused}
    lines += [f"{name} does not take {layer}: {why}" for (name, layer), why in refused.items()]
    return "\n".join(lines)
