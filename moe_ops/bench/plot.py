"""A picture of a run of `bench layer`: times over tokens for each layer, and the roofline.

Colours are those of Okabe and Ito, which the colour-blind tell apart; each curve has a marker of
its own and its name at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_ops.bench.contenders import OURS
from moe_ops.bench.formats import in_words
from moe_ops.bench.rates import digits
from moe_ops.bench.results import Results

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
FLOOR = -1  # the number of a curve that has no colour
COLUMNS, PIXELS = 3, 1600
ROW_INCHES, DPI = 4.4, 100
LETTER = 9  # points
UNIFORM = "uniform"

Curve = tuple[str, list[int], list[float]]  # a name, x and y
End = tuple[float, float, str, str]  # of a curve: x, y, its name and its colour


def draw(results: Results, path: Path) -> None:
    """Write the picture, 1600 pixels wide, as PNG. Raises RuntimeError without matplotlib."""
    plt = pyplot()
    layers = list(results.layers)
    rows = math.ceil(len(layers) / COLUMNS)
    size = (PIXELS / DPI, ROW_INCHES * (rows + 1))
    inch = 1 / size[1]
    with plt.rc_context(
        {"font.size": LETTER, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = plt.figure(figsize=size, dpi=DPI)
        # Labels stand right of the axes, and are placed by their final positions.
        grid = figure.add_gridspec(
            rows + 1, COLUMNS,
            left=0.05, right=0.91, wspace=0.42, bottom=0.5 * inch, top=1 - 0.8 * inch, hspace=0.3,
        )  # fmt: skip
        for i, layer in enumerate(layers):
            _times(figure.add_subplot(grid[i // COLUMNS, i % COLUMNS]), results, layer)
        _roofline(figure.add_subplot(grid[rows, : COLUMNS - 1]), results)
        _shares(figure.add_subplot(grid[rows, COLUMNS - 1]), results)
        format = f", {in_words(results.format)}" if results.format else ""
        title = f"{results.device}, {results.dtype}{format}, uniform routing; {results.rates}"
        figure.text(0.05, 1 - 0.35 * inch, title)
        figure.savefig(path, dpi=DPI, format="png")
        plt.close(figure)


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: pip install 'torch-moe-ops[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _times(axes: Any, results: Results, layer: str) -> None:
    """Microseconds over tokens: the floor, ours, what ran beside it and the peers of a file."""
    axes.set_title(layer, loc="left", fontweight="bold")
    axes.set_xlabel("tokens")
    axes.set_ylabel("µs")
    mine = [c for c in results.cells if (c.layer, c.routing, c.contender) == (layer, UNIFORM, OURS)]
    floor = ("floor", [c.tokens for c in mine], [c.floor_us for c in mine])
    names = _names(results)
    ends: list[End] = []
    for name, xs, ys in (floor, *(_times_of(results, layer, name) for name in names)):
        if xs:
            style = _style(names.index(name) if name in names else FLOOR, thick=name == OURS)
            axes.loglog(xs, ys, **style)
            ends.append((xs[-1], ys[-1], name, style["color"]))
    _ticks(axes, [c.tokens for c in mine])
    _label(axes, ends)


def _names(results: Results) -> list[str]:
    """Ours, what ran beside it, and the peers of a file that did not; each keeps its colour."""
    times = [by for by_tokens in results.peers.values() for by in by_tokens.values()]
    return list(dict.fromkeys([OURS, *results.others(), *(name for by in times for name in by)]))


def _times_of(results: Results, layer: str, name: str) -> Curve:
    """The times of one contender over tokens: from this run if it was measured there, else from the
    file of peers."""
    mine = [c for c in results.cells if c.layer == layer and c.routing == UNIFORM]
    if name in (OURS, *results.others()):
        timed = [(c.tokens, c.us) for c in mine if c.contender == name and c.us is not None]
    else:
        by_tokens = results.peers.get(layer, {})
        counts = sorted({c.tokens for c in mine} & by_tokens.keys())
        timed = [(t, by_tokens[t][name]) for t in counts if name in by_tokens[t]]
    return name, [t for t, _ in timed], [us for _, us in timed]


def _style(number: int, thick: bool = False) -> dict[str, Any]:
    """The look of a curve."""
    if number == FLOOR:
        return {"color": "#000000", "linestyle": "--", "linewidth": 1.2}
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 6 if thick else 4,
        "linewidth": 2.4 if thick else 1.2,
        "zorder": 3 if thick else 2,
    }


def _ticks(axes: Any, tokens: Sequence[int]) -> None:
    """A tick at each number of tokens, and a light grid."""
    from matplotlib.ticker import NullLocator

    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    _grid(axes)


def _grid(axes: Any) -> None:
    axes.grid(True, which="major", linewidth=0.4, color="#cccccc")
    axes.set_axisbelow(True)


def _label(axes: Any, ends: Sequence[End]) -> None:
    """Names right of the curves' ends, pushed down so that none covers another."""
    area = axes.get_window_extent()
    apart = 1.25 * LETTER * axes.figure.dpi / 72
    below = area.y1 + apart
    for x, y, name, colour in sorted(ends, key=lambda end: -end[1]):
        below = min(axes.transData.transform((x, y))[1], below - apart)
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.03, (below - area.y0) / area.height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6},
        )


def _roofline(axes: Any, results: Results) -> None:
    """TFLOP/s of ours over the arithmetic intensity, below both ceilings."""
    mine = [c for c in results.ours() if c.routing == UNIFORM]
    axes.set_title("Roofline of moe_ops", loc="left", fontweight="bold")
    axes.set_xlabel("arithmetic intensity, FLOP per byte")
    axes.set_ylabel("TFLOP/s")
    copy, matmul = results.rates.copy_tbs, results.rates.product(results.eight_bit)
    ridge = matmul / copy
    xs = [ridge, *(c.flops / c.bytes for c in mine)]
    left, right = min(xs) / 1.5, max(xs) * 1.5
    axes.loglog([left, ridge, right], [left * copy, matmul, matmul], **_style(FLOOR))
    beside = {"textcoords": "offset points", "color": "#000000"}
    middle = math.sqrt(left * ridge)
    axes.annotate(f"{digits(copy)} TB/s", (middle, middle * copy), (-8, 6), ha="right", **beside)
    axes.annotate(f"{digits(matmul)} TFLOP/s", (right, matmul), (0, 6), ha="right", **beside)
    for i, layer in enumerate(results.layers):
        points = sorted((c.flops / c.bytes, c.tflops) for c in mine if c.layer == layer)
        axes.loglog([x for x, _ in points], [y for _, y in points], label=layer, **_style(i))
    # All curves end at the same level, so the names of this plot stand in its empty corner.
    axes.legend(loc="lower right", frameon=False)
    _grid(axes)


def _shares(axes: Any, results: Results) -> None:
    """How much of our time the floor is, over tokens."""
    axes.set_title("Floor / time of moe_ops", loc="left", fontweight="bold")
    axes.set_xlabel("tokens")
    axes.set_ylabel("%")
    ends: list[End] = []
    tokens: set[int] = set()
    for i, layer in enumerate(results.layers):
        mine = [c for c in results.ours() if (c.layer, c.routing) == (layer, UNIFORM)]
        if mine:
            shares = [100 * c.share for c in mine]
            axes.semilogx([c.tokens for c in mine], shares, **_style(i))
            ends.append((mine[-1].tokens, shares[-1], layer, _style(i)["color"]))
            tokens.update(c.tokens for c in mine)
    axes.set_ylim(0, max([110.0, *(1.05 * share for _, share, _, _ in ends)]))
    _ticks(axes, sorted(tokens))
    _label(axes, ends)
