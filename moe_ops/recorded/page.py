"""Statistics of a routing as one page: HTML that loads nothing, in the colours of the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from moe_ops.recorded.statistics import COLUMNS, RoutingStatistics

STYLE = """
:root { color-scheme: light dark; --text: #1c2330; --soft: #5b6472; --line: #d8dde5;
  --back: #ffffff; --over: #c2500a; --under: #2463a8; --bar: #2463a8; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --soft: #9aa4b2; --line: #333b47;
  --back: #14181f; --over: #f0873a; --under: #5b9fe6; --bar: #5b9fe6; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
p { color: var(--soft); margin: .2rem 0 .8rem; max-width: 46rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 10px; }
svg rect { shape-rendering: crispEdges; }
.frame { fill: none; stroke: var(--line); } .over { fill: var(--over); }
.under { fill: var(--under); } .bar { fill: var(--bar); } .at { stroke: var(--soft);
  stroke-dasharray: 3 3; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
"""
WIDTH, LEFT, HEIGHT = 1000, 40, 130  # of charts
LABELS = 12  # along an axis, at most


def page(found: RoutingStatistics, title: str) -> str:
    """The page of statistics."""
    shown = escape(title)
    known = f"{found.tokens} tokens, " if found.tokens else ""
    parts = [
        "<!doctype html>", '<html lang="en">', '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Routing of {shown}</title>", f"<style>{STYLE}</style>",
        f"<h1>Routing of {shown}</h1>",
        f"<p>{known}{len(found.layers)} layers of {found.num_experts} experts.</p>",
        "<h2>Load of each expert</h2>",
        "<p>A row for each layer, from the first down, and a column for each expert: orange above "
        "the mean load of its layer, blue below it, and no colour at the mean. Twice the mean and "
        "half of it are as deep as each other.</p>",
        heatmap(found),
        "<h2>Highest load over the mean one</h2>",
        "<p>Of each layer. At 1 all experts have the same load.</p>",
        bars(found.imbalance_L.tolist(), found.layers, least=1.0),
        "<h2>Entropy of loads</h2>",
        "<p>Of each layer, over that of equal loads. At 1 all experts have the same load, at 0 one "
        "has all of it.</p>",
        bars(found.entropy_L.tolist(), found.layers, least=0.0, most=1.0),
        "<h2>Layers</h2>", layers_table(found),
    ]  # fmt: skip
    if any(found.together):
        parts += [
            "<h2>Experts chosen together</h2>",
            "<p>The pairs that most tokens chose both of. Lift is their number over what it would "
            "be if the choice of one said nothing of the other.</p>",
            together_table(found),
        ]
    return "\n".join(parts) + "\n"


def heatmap(found: RoutingStatistics) -> str:
    """A rectangle for each layer and expert whose load is not the mean one."""
    L, E = len(found.layers), found.num_experts
    ratios = (found.shares_LE * E).tolist()
    span = math.log2(max([2.0, *(max(row) for row in ratios)]))
    cell = (WIDTH - LEFT) / E
    tall = max(min(cell, 14.0), 4.0)
    rects = []
    for y, row in enumerate(ratios):
        inside = []
        for x, ratio in enumerate(row):
            depth = min(1.0, abs(math.log2(ratio)) / span) if ratio > 0 else 1.0
            kind = "over" if ratio > 1 else "under"
            if depth >= 0.005:
                inside.append(
                    f'<rect class="{kind}" x="{LEFT + x * cell:.1f}" y="{y * tall:.1f}" '
                    f'width="{cell:.1f}" height="{tall:.1f}" fill-opacity="{depth:.2f}"/>'
                )
        rects.append(f"<g><title>{escape(found.layers[y])}</title>{''.join(inside)}</g>")
    bottom = L * tall
    texts = [
        f'<text x="{LEFT - 6}" y="{(y + 0.5) * tall + 3:.1f}" text-anchor="end">{y}</text>'
        for y in marks(L)
    ]
    texts += [
        f'<text x="{LEFT + (x + 0.5) * cell:.1f}" y="{bottom + 13:.1f}" text-anchor="middle">'
        f"{x}</text>"
        for x in marks(E)
    ]
    frame = f'<rect class="frame" x="{LEFT}" y="0" width="{WIDTH - LEFT}" height="{bottom:.1f}"/>'
    return svg(bottom + 18, [*rects, frame, *texts], "load of each expert by layer")


def bars(
    values: Sequence[float], names: Sequence[str], *, least: float, most: float | None = None
) -> str:
    """A bar for each layer, from `least` up."""
    top = max([*values, least + 0.1]) if most is None else most
    wide = (WIDTH - LEFT) / max(1, len(values))
    parts = []
    for i, (value, name) in enumerate(zip(values, names, strict=True)):
        tall = HEIGHT * (value - least) / (top - least)
        parts.append(
            f'<rect class="bar" x="{LEFT + i * wide + wide * 0.15:.1f}" y="{HEIGHT - tall:.1f}" '
            f'width="{wide * 0.7:.1f}" height="{tall:.1f}"><title>{escape(name)}: {value:.3f}'
            "</title></rect>"
        )
    for at in (least, (least + top) / 2, top):
        y = HEIGHT * (1 - (at - least) / (top - least))
        parts.append(f'<line class="at" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        text = max(y + 3, 9.0)
        parts.append(f'<text x="{LEFT - 6}" y="{text:.1f}" text-anchor="end">{at:.2f}</text>')
    parts += [
        f'<text x="{LEFT + (i + 0.5) * wide:.1f}" y="{HEIGHT + 13}" text-anchor="middle">{i}</text>'
        for i in marks(len(values))
    ]
    return svg(HEIGHT + 18, parts, "a bar for each layer")


def marks(count: int) -> range:
    """The numbers that are written along an axis."""
    step = 1
    while count > LABELS * step:
        step *= 2
    return range(0, count, step)


def svg(height: float, parts: Sequence[str], label: str) -> str:
    box = f"0 -4 {WIDTH} {height + 4:.1f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def layers_table(found: RoutingStatistics) -> str:
    rows = [(f"{i}: {name}", *cells) for i, (name, *cells) in enumerate(found.rows())]
    return table(COLUMNS, rows)


def together_table(found: RoutingStatistics) -> str:
    head = ("layer", "experts", "tokens", "lift")
    rows = [
        (f"{i}: {name}", f"{p.first}, {p.second}", str(p.tokens), f"{p.lift:.2f}")
        for i, (name, pairs) in enumerate(zip(found.layers, found.together, strict=True))
        for p in pairs[:3]
    ]
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [line(head, "th"), *(line(row, "td") for row in rows)]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'
