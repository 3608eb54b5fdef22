"""A roofline plot as inline SVG: operations per second over operations per byte, both logarithmic.

What a device can reach is below a slope, its memory's rate, and below a level for each dtype. The
colours are those of classes `s0` to `s5`, `roof` and `grid` of the page around it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from moe_ops.passes.explain.explanation import At, Region, si
from moe_ops.planning.cost import Device

COLOURS = 6
WIDTH, HEIGHT = 860, 460
LEFT, RIGHT, TOP, BOTTOM = 92, 32, 16, 52
LETTER, LINE = 6.6, 14  # the size of a letter and of a line of 12 pixels

Box = tuple[float, float, float, float]  # left, top, right, bottom


def roofline(device: Device, regions: Sequence[Region]) -> str:
    """The plot, with a point for each region at each number of tokens of its curve; empty if no
    region has matrix products."""
    curves = {n: points for n, r in enumerate(regions, 1) if (points := _points(r))}
    if not curves:
        return ""
    plot = _Plot.around(device, [p for points in curves.values() for p in points])
    _axes(plot)
    _roofs(plot, device)
    for n, points in curves.items():
        _curve(plot, n, points)
    labels = [(n, p) for n, points in curves.items() for p in (points[0], *points[:0:-1])]
    for n, point in labels:
        plot.label(point.x, point.y, f"T={point.at.tokens}", f"s{(n - 1) % COLOURS}")
    title = f"Roofline of {escape(device.name)}"
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg {view} role="img" aria-label="{title}">\n{"".join(plot.drawn)}</svg>'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    x: float  # operations per byte
    y: float  # operations per second
    at: At
    measured: float | None  # operations per second


def _points(region: Region) -> list[_Point]:
    return [
        _Point(
            x=at.flops / at.bytes,
            y=at.flops / at.floor_us * 1e6,
            at=at,
            measured=at.flops / at.measured_us * 1e6 if at.measured_us else None,
        )
        for at in region.curve
        if at.flops and at.bytes and at.floor_us
    ]


@dataclass(kw_only=True)
class _Plot:
    """What is drawn, and where text stands already. Ranges are powers of ten."""

    x: tuple[int, int]
    y: tuple[int, int]
    drawn: list[str] = field(default_factory=list)
    taken: list[Box] = field(default_factory=list)

    @staticmethod
    def around(device: Device, points: Sequence[_Point]) -> _Plot:
        """A plot with room for the points and for where the roofs begin."""
        rates = list(device.flops_per_second.values())
        xs = [p.x for p in points] + [5 * rate / device.bytes_per_second for rate in rates]
        ys = [v for p in points for v in (p.y, p.measured) if v] + [1.5 * rate for rate in rates]
        spans = [(math.floor(math.log10(min(v))), math.ceil(math.log10(max(v)))) for v in (xs, ys)]
        return _Plot(x=spans[0], y=spans[1])

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Values in pixels."""
        across = (math.log10(x) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(y) - self.y[0]) / (self.y[1] - self.y[0])
        px = LEFT + across * (WIDTH - LEFT - RIGHT)
        return px, HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def line(self, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
        """A straight line between two pairs of values."""
        (x1, y1), (x2, y2) = self.place(*start), self.place(*end)
        at = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.drawn.append(f'<line class="{style}" {at}/>\n')

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        """Text at a pixel, kept free of later labels."""
        self.taken.append(_box(x, y, text, anchor))
        at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.drawn.append(f'<text class="{style}" {at}>{escape(text)}</text>\n')

    def label(self, x: float, y: float, text: str, style: str) -> None:
        """Text next to a point, where there is room; nowhere if there is none."""
        px, py = self.place(x, y)
        for dx, dy, anchor in (
            (9, 14, "start"), (-9, -7, "end"), (9, -7, "start"), (-9, 16, "end"),
            (0, 22, "middle"), (0, -13, "middle"),
        ):  # fmt: skip
            box = _box(px + dx, py + dy, text, anchor)
            inside = box[0] > LEFT and box[2] < WIDTH - RIGHT
            inside = inside and box[1] > TOP and box[3] < HEIGHT - BOTTOM
            if inside and not any(_overlap(box, other) for other in self.taken):
                self.text(px + dx, py + dy, text, style, anchor)
                return


def _axes(plot: _Plot) -> None:
    bottom, left = 10.0 ** plot.y[0], 10.0 ** plot.x[0]
    for power in range(plot.x[0], plot.x[1] + 1):
        plot.line((10.0**power, bottom), (10.0**power, 10.0 ** plot.y[1]), "grid")
        px, py = plot.place(10.0**power, bottom)
        plot.text(px, py + 18, f"{10.0**power:g}", "axis", "middle")
    for power in range(plot.y[0], plot.y[1] + 1):
        plot.line((left, 10.0**power), (10.0 ** plot.x[1], 10.0**power), "grid")
        px, py = plot.place(left, 10.0**power)
        plot.text(px - 8, py + 4, si(10.0**power, "FLOP/s"), "axis", "end")
    middle = (LEFT + WIDTH - RIGHT) / 2
    name = "arithmetic intensity, FLOP per byte"
    plot.text(middle, HEIGHT - 12, name, "axis", "middle")


def _roofs(plot: _Plot, device: Device) -> None:
    levels: dict[float, list[str]] = defaultdict(list)
    for dtype, rate in device.flops_per_second.items():
        levels[rate].append(dtype)
    bandwidth, right = device.bytes_per_second, 10.0 ** plot.x[1]
    for rate, dtypes in levels.items():
        plot.line((rate / bandwidth, rate), (right, rate), "roof")
        px, py = plot.place(right, rate)
        text = f"{si(rate, 'FLOP/s')} {', '.join(dtypes)}"
        plot.text(px - 6, py - 6, text, "axis", "end")
    start = max(10.0 ** plot.x[0], 10.0 ** plot.y[0] / bandwidth)
    end = max(levels) / bandwidth
    plot.line((start, start * bandwidth), (end, max(levels)), "roof")
    middle = math.sqrt(start * end)
    px, py = plot.place(middle, middle * bandwidth)
    plot.text(px - 10, py - 6, f"{si(bandwidth, 'B/s')} memory", "axis", "end")


def _curve(plot: _Plot, number: int, points: Sequence[_Point]) -> None:
    style = f"s{(number - 1) % COLOURS}"
    path = " ".join("{:.1f},{:.1f}".format(*plot.place(p.x, p.y)) for p in points)
    plot.drawn.append(f'<polyline class="{style}" points="{path}"/>\n')
    for p in points:
        about = f"region {number}, {p.at.tokens} tokens on {p.at.backend or 'another graph'}"
        _dot(plot, p.x, p.y, f"{style} dot", f"{about}: at most {si(p.y, 'FLOP/s')}")
        if p.measured:
            _dot(plot, p.x, p.measured, f"{style} ring", f"{about}: {si(p.measured, 'FLOP/s')}")


def _dot(plot: _Plot, x: float, y: float, style: str, about: str) -> None:
    px, py = plot.place(x, y)
    plot.taken.append((px - 4, py - 4, px + 4, py + 4))
    at = f'cx="{px:.1f}" cy="{py:.1f}" r="4"'
    plot.drawn.append(f'<circle class="{style}" {at}><title>{escape(about)}</title></circle>\n')


def _box(x: float, y: float, text: str, anchor: str) -> Box:
    width = LETTER * len(text)
    left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
    return left, y - LINE + 3, left + width, y + 3


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
