"""The picture of README: how many times as fast as transformers' own, from files of figures.

    python -m tests.docs.picture

writes it. It is an SVG of bars that takes the colours of a light or a dark page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tests.docs.figures import RESULTS
from tests.sources import ROOT

PICTURE = ROOT / "docs" / "faster.svg"
WIDTH, LEFT, RIGHT, LINE, GAP, TOP = 760, 290, 60, 22, 34, 58  # pixels
FILES = (
    "generate_gpt_oss_20b_h200",
    "generate_qwen3_6_35b_12_layers_h100",
    "forward_qwen3_30b_12_layers_h200",
    "quickstart_epyc_batch32_layers4",
)
MOST = 12.0  # times as fast, at the right end
OURS, THEIRS = "moe_ops", "what transformers does itself"
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .paper { fill: #ffffff } .head { font-weight: 600 } .small { fill: #59636e }
  .bar { fill: #0072b2 } .slower { fill: #d55e00 } .one { stroke: #59636e; stroke-dasharray: 3 3 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .paper { fill: #0d1117 } .small { fill: #9198a1 }
    .bar { fill: #56b4e9 } .slower { fill: #e69f00 } .one { stroke: #9198a1 }
  }
"""


@dataclass(frozen=True)
class Bar:
    name: str
    ratio: float


@dataclass(frozen=True)
class Group:
    title: str
    bars: list[Bar]


def groups(folder: Path = RESULTS) -> list[Group]:
    """All that is compared with transformers' own in one run of one command."""
    read = {name: json.loads((folder / f"{name}.json").read_text()) for name in FILES}
    gpt, qwen, forward, cpu = read.values()
    return [
        Group("generate, gpt-oss-20b, H200", of_generate(gpt["speeds"])),
        Group("generate, Qwen3.6-35B-A3B, 12 layers, H100", of_generate(qwen["speeds"])),
        Group("a forward, Qwen3-30B-A3B, 12 layers, H200", of_forward(forward["forwards"])),
        Group("generate, 0.23 B parameters, two CPU cores", of_quickstart(cpu)),
    ]


def of_generate(speeds: list[dict[str, float]]) -> list[Bar]:
    rates = {(s["way"], s["batch"]): s["tokens_per_s"] for s in speeds}
    return [
        Bar(sequences(batch), rate / rates["default", batch])
        for (way, batch), rate in rates.items()
        if way == OURS
    ]


def of_forward(forwards: list[dict[str, float]]) -> list[Bar]:
    """Against the fastest of the stock ways."""
    stock = [f for f in forwards if f["way"] != OURS]
    return [
        Bar(
            f"{str(f['size']).replace('x', ' x ')} tokens",
            min(s["ms"] for s in stock if s["size"] == f["size"]) / f["ms"],
        )
        for f in forwards
        if f["way"] == OURS
    ]


def of_quickstart(figures: dict) -> list[Bar]:
    """Steps against the fastest of the stock ways, and prompts against theirs."""
    (ours,) = (s for s in figures["speeds"] if s["implementation"] == OURS)
    stock = [s for s in figures["speeds"] if s["implementation"] != OURS]
    steps = ours["decode_tokens_per_s"] / max(s["decode_tokens_per_s"] for s in stock)
    prompts = min(s["prefill_ms"] for s in stock) / ours["prefill_ms"]
    batch = sequences(figures["arguments"]["batch"])
    return [Bar(batch, steps), Bar("the prompts of these", prompts)]


def sequences(batch: int) -> str:
    return f"{batch} sequence{'s' if batch > 1 else ''}"


def drawn(groups: list[Group]) -> str:
    """The picture as SVG."""
    parts, y = [], TOP
    for group in groups:
        parts.append(f'<text class="head" x="16" y="{y}">{escape(group.title)}</text>')
        for bar in group.bars:
            y += LINE
            parts += one(bar, y)
        y += GAP
    height = y - GAP + 20
    title = f"Times as fast as {THEIRS}"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{height}" rx="6"/>',
        f'<text class="small" x="16" y="24">{title}: bfloat16, random weights, one run each</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def one(bar: Bar, y: int) -> list[str]:
    """A bar with its name and its number, and a stroke where it would be as fast; one that is
    behind has another colour."""
    end, same = LEFT + scaled(bar.ratio), LEFT + scaled(1)
    kind = "bar" if bar.ratio >= 1 else "slower"
    number = f"{bar.ratio:.1f}" if bar.ratio >= 2 else f"{bar.ratio:.2f}"
    return [
        f'<text x="{LEFT - 10}" y="{y}" text-anchor="end">{escape(bar.name)}</text>',
        f'<rect class="{kind}" x="{LEFT}" y="{y - 12}" width="{end - LEFT:.1f}" height="15" '
        f'rx="2"/>',
        f'<line class="one" x1="{same:.1f}" y1="{y - 16}" x2="{same:.1f}" y2="{y + 6}"/>',
        f'<text x="{max(end, same) + 8:.1f}" y="{y}">{number}</text>',
    ]


def scaled(ratio: float) -> float:
    return (WIDTH - LEFT - RIGHT) * ratio / MOST


if __name__ == "__main__":
    PICTURE.write_text(drawn(groups()))
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")
