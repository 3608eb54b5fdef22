"""The table of docs/ESTIMATE.md: each measured model beside what is expected without its figures.

    python -m tests.estimate.page

writes it anew.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from moe_ops.estimate.fit import Miss, misses, spread
from moe_ops.estimate.measured import shipped
from tests.sources import ROOT

PAGE = ROOT / "docs" / "ESTIMATE.md"
BLOCK = re.compile(r"<!-- misses -->\n.*?<!-- end -->", re.DOTALL)
NEAR = 0.2
DEVICES = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}


def filled(page: str, found: Sequence[Miss]) -> str:
    """The page with its table made anew."""
    return BLOCK.sub(lambda _: f"<!-- misses -->\n\n{table(found)}\n\n<!-- end -->", page)


def table(found: Sequence[Miss]) -> str:
    """A row for each model, device and formats, and a sentence of all."""
    rows: dict[tuple[str, ...], list[Miss]] = defaultdict(list)
    for miss in found:
        run = miss.run
        linears = (
            "" if run.formats.linears == "bfloat16" else f", linear layers {run.formats.linears}"
        )
        formats = f"{run.formats.experts}{linears}"
        rows[run.name, DEVICES[run.device], formats].append(miss)
    lines = [
        "| model | on | experts | batch | steps, measured / expected | prompts |",
        "|---|---|---|---|---|---|",
    ]
    for (name, device, formats), own in rows.items():
        own.sort(key=lambda miss: miss.run.batch)
        batches = ", ".join(str(m.run.batch) for m in own)
        ratios = (", ".join(f"{getattr(m, what):.2f}" for m in own) for what in ("step", "prompt"))
        lines.append(f"| {name} | {device} | {formats} | {batches} | {' | '.join(ratios)} |")
    return "\n".join([*lines, "", *map(_summary, ("step", "prompt"), (found, found))])


def off(ratio: float) -> float:
    """By which share an expected time is off a measured one."""
    return abs(1 / ratio - 1)


def _summary(what: str, found: Sequence[Miss]) -> str:
    ratios = [getattr(miss, what) for miss in found]
    near = sum(off(ratio) <= NEAR for ratio in ratios)
    low, high = spread(ratios)
    return (
        f"Of {len(ratios)} {what}s, {near} are within 20 %, the worst is off by "
        f"{max(map(off, ratios)) * 100:.0f} %; nine of ten are {low:.2f} to {high:.2f} times as "
        "long as expected."
    )


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), misses(shipped())), encoding="utf-8")
