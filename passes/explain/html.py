"""An explanation as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from moe_ops.passes.explain.explanation import (
    LEGEND,
    Explanation,
    LayerText,
    at_cells,
    breaks,
    count,
    elsewhere,
    names,
    paths,
    ranges,
    refused,
    runs,
    si,
    sizes,
    span,
    unfound,
)
from moe_ops.passes.explain.roofline import COLOURS, roofline

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #59636e; --back: #fff; --box: #f4f6f8;
  --edge: #d1d9e0; --ours: #0550ae; --new: #dafbe1; --gone: #ffebe9;
  --s0: #0969da; --s1: #bc4c00; --s2: #1a7f37; --s3: #8250df; --s4: #bf3989; --s5: #7d4e00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --dim: #9198a1; --back: #0d1117;
  --box: #161b22; --edge: #3d444d; --ours: #79c0ff; --new: #12361f; --gone: #4a1d1f;
  --s0: #58a6ff; --s1: #f0883e; --s2: #3fb950; --s3: #bc8cff; --s4: #f778ba; --s5: #d4a72c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 90rem; color: var(--text);
  background: var(--back); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
p { margin: .3rem 0; } .dim, dt { color: var(--dim); }
.cards { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.cards div { background: var(--box); border: 1px solid var(--edge); border-radius: 6px;
  padding: .4rem .9rem; } .cards b { display: block; font-size: 1.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .4rem 0; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--edge); padding: .2rem .6rem; text-align: left;
  vertical-align: top; }
th { background: var(--box); font-weight: 600; } .n { text-align: right; white-space: nowrap; }
pre { background: var(--box); border: 1px solid var(--edge); border-radius: 6px; margin: 0;
  padding: .6rem; overflow-x: auto; font: 12px/1.5 ui-monospace, monospace; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: .3rem 0; }
dd { margin: 0; overflow-wrap: anywhere; }
.graphs { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
.graphs > div { min-width: 0; }
@media (max-width: 60rem) { .graphs { grid-template-columns: 1fr; } }
pre span { display: block; white-space: pre-wrap; overflow-wrap: anywhere;
  padding-left: 4ch; text-indent: -4ch; } pre i { color: var(--dim);
  font-style: normal; } .gone { background: var(--gone); } .new { background: var(--new); }
.ours { color: var(--ours); font-weight: 600; }
svg { display: block; width: 100%; max-width: 60rem; height: auto; background: var(--box);
  border: 1px solid var(--edge); border-radius: 6px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); } svg .axis { fill: var(--dim); }
.grid { stroke: var(--edge); stroke-width: 1; } .roof { stroke: var(--text); stroke-width: 2; }
polyline { fill: none; stroke-width: 1.5; } .ring { fill: var(--box); stroke-width: 2; }
.legend { display: inline-block; margin-right: 1.5rem; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 50%; }
"""
STYLE += "".join(
    f"polyline.s{n}, .ring.s{n} {{ stroke: var(--s{n}); }} "
    f".dot.s{n}, svg text.s{n} {{ fill: var(--s{n}); }} .key.s{n} {{ background: var(--s{n}); }}\n"
    for n in range(COLOURS)
)


def page(found: Explanation) -> str:
    """The whole page: summary, regions, roofline, plan, one layer before and after, and passes."""
    title = f"{found.title} under moe_ops"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(found.device.name)}: {escape(found.rates)}</p>',
        f"<p>{escape(found.summary)}</p>",
        _cards(found),
        _regions(found),
        _roofline(found),
        "<h2>Plan</h2>",
        f"<pre>{escape(str(found.plan))}</pre>",
        _layer(found.layer) if found.layer else "",
        _passes(found),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body>\n</html>\n"
    )


def _cards(found: Explanation) -> str:
    layers = sum(len(region.layers) for region in found.regions)
    rewrites = sum(p.rewrites for p in found.passes)
    ms = sum(p.ms for p in found.passes)
    cards = (
        (len(found.regions), "kinds of regions"),
        (layers, "layers"),
        (sum(len(left.layers) for left in found.left_alone), "left as they were"),
        (rewrites, "rewrites"),
        (f"{ms:.0f} ms", "in passes"),
        (found.graphs, "graphs"),
        (len(found.breaks), "places of graph breaks"),
    )
    texts = (f"<div><b>{number}</b>{what}</div>" for number, what in cards)
    return f'<div class="cards">{"".join(texts)}</div>'


def _regions(found: Explanation) -> str:
    parts = ["<h2>MoE regions</h2>"]
    for n, region in enumerate(found.regions, 1):
        key = f'<span class="key s{(n - 1) % COLOURS}"></span>'
        where = names(region.layers) or "no module"
        layers = count(len(region.layers), "layer")
        parts.append(f"<h3>{key} {n}. {region.op}, {layers}: {escape(where)}</h3>")
        lifted = region.lifted_from or ("the model calls the op itself",)
        facts: list[tuple[str, Sequence[str]]] = [("sizes", [sizes(region)])]
        facts += [("rows", [span(*region.rows)])]
        facts += [("padded", [region.padding])] if region.padding else []
        facts += [("shared", [region.shared])] if region.shared else []
        facts += [("lifted from", lifted), ("runs on", runs(region)), ("refused", refused(region))]
        facts += [("path", paths(region))]
        facts += [("elsewhere", away)] if (away := elsewhere(region)) else []
        parts.append(_facts(facts))
        head = ("tokens", "backend", "bytes", "flops", "floor", "bound by")
        if region.at:
            parts.append(_table(head, map(at_cells, region.at), "><>>><"))
        timed = ranges(region)
        if timed:
            head_timed = ("op", "rows", "backend", "why", "at", "floor", "measured")
            parts.append(_table(head_timed, timed, "<<<<>>>"))
    if found.regions:
        parts.append(f'<p class="dim">{escape(LEGEND)}</p>')
    else:
        parts += [f"<p>{escape(line)}</p>" for line in unfound(found)]
    if found.linears:
        parts.append("<h3>Linear layers in codes</h3>")
        coded = [(names(of.layers), of.format, si(of.bytes, "B"), of.runs) for of in found.linears]
        parts.append(_table(("layers", "format", "bytes", "runs on"), coded, "<<><"))
    if found.left_alone:
        cells = [(names(left.layers), left.rule, left.reason) for left in found.left_alone]
        parts.append("<h3>Left as they were</h3>")
        parts.append(_table(("layers", "pass", "reason"), cells, "<<<"))
    return "\n".join(filter(None, parts))


def _roofline(found: Explanation) -> str:
    plot = roofline(found.device, found.regions)
    if not plot:
        return ""
    keys = " ".join(
        f'<span class="legend"><span class="key s{(n - 1) % COLOURS}"></span> '
        f"{n}. {escape(f'{r.op}, {sizes(r)}')}</span>"
        for n, r in enumerate(found.regions, 1)
        if any(at.flops for at in r.curve)
    )
    about = (
        "Dots: the most that each region can reach at T tokens, with the cost of a launch. "
        "Rings: what was measured."
    )
    return f'<h2>Roofline</h2>\n<p>{keys}</p>\n{plot}\n<p class="dim">{about}</p>'


def _layer(layer: LayerText) -> str:
    before, after = layer.before.splitlines(), layer.after.splitlines()
    sides = (
        ("Before", before, "gone", set(after)),
        ("After", after, "new", set(before)),
    )
    columns = []
    for name, side, style, other in sides:
        code = "".join(_node(line, "" if line in other else style) for line in side)
        head = f"<h3>{name}: {count(len(side), 'node')}</h3>"
        columns.append(f"<div>{head}\n<pre>{code}</pre></div>")
    title = f"<h2>One layer: {escape(layer.module) or 'no module'}</h2>"
    return f'{title}\n<div class="graphs">{"".join(columns)}</div>'


def _node(line: str, style: str) -> str:
    call, mark, kind = line.partition("  # ")
    call = escape(call)
    if " = moe_ops." in call:
        start, equals, rest = call.partition(" = ")
        op, bracket, arguments = rest.partition("(")
        call = f'{start}{equals}<b class="ours">{op}</b>{bracket}{arguments}'
    return f'<span class="{style}">{call}<i>{mark}{escape(kind)}</i></span>'


def _passes(found: Explanation) -> str:
    cells = [(p.name, str(p.rewrites), f"{p.ms:.1f}") for p in found.passes]
    parts = ["<h2>Passes</h2>", _table(("pass", "rewrites", "ms"), cells, "<>>")]
    parts.append(f"<h2>Graphs</h2>\n<p>{count(found.graphs, 'graph')}, {breaks(found)}.</p>")
    if found.breaks:
        where = [(b.where or "unknown place", b.reason) for b in found.breaks]
        parts.append(_table(("break at", "reason"), where, "<<"))
    if found.stopped:
        parts.append(f"<p>Not explained further: {escape(found.stopped)}</p>")
    if found.captured is not None:
        parts.append(f"<h2>CUDA graphs</h2>\n<pre>{escape(str(found.captured))}</pre>")
    return "\n".join(parts)


def _facts(facts: Iterable[tuple[str, Sequence[str]]]) -> str:
    lines = (
        f"<dt>{name}</dt><dd>{'<br>'.join(map(escape, texts))}</dd>"
        for name, texts in facts
        if texts
    )
    return f"<dl>{''.join(lines)}</dl>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str) -> str:
    style = ["" if a == "<" else ' class="n"' for a in align]

    def line(cells: Sequence[str], tag: str) -> str:
        pairs = zip(cells, style, strict=True)
        return f"<tr>{''.join(f'<{tag}{s}>{escape(c)}</{tag}>' for c, s in pairs)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>\n{line(head, "th")}\n{body}\n</table></div>'
