"""By when the figures of a page were measured, and which changed the code that they measure since.

A block `<!-- measured NAME NAME -->` ends with `<!-- end -->`. It is made from the date and the
commit in NAME.json: those of the run, or of the commit that brought the file.
"""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path

BLOCK = re.compile(r"<!-- measured (\w+(?: \w+)*) -->\n.*?<!-- end -->", re.DOTALL)
WIDTH = 125


@dataclass(frozen=True)
class Change:
    """The last commit that may have changed what some files of figures hold."""

    what: str  # as in "the last change of ..."
    date: str
    commit: str
    files: tuple[str, ...]  # patterns of their names
    where: tuple[str, ...] = ()  # the code that they measure


CPU, TRITON = "moe_ops/kernels/cpu/", "moe_ops/kernels/triton/"
STEPS = ("moe_ops/generation", "moe_ops/graphs")
# `python -m tests.docs.measured` lists what changed since. Moves, renames, words and kernels of
# other formats are none. A file that was measured since needs no edit here.
CHANGES = (
    Change(
        "the CPU kernels of experts in floats", "2026-11-28 14:59", "73cd9c3",
        ("layer_lifted_epyc_*", "layer_*_cpu_*", "layer_*_epyc_*"),
        tuple(
            f"{CPU}{name}"
            for name in (
                "experts.cpp", "layer.h", "products.h", "tiles.h", "float_panels.h", "columns.h",
            )
        ),
    ),
    Change(
        "the CPU kernel of routers", "2026-11-26 20:01", "d99227a", ("block_*",),
        (f"{CPU}route.cpp",),
    ),
    Change(
        "the CPU kernels of quantised experts", "2026-11-28 11:36", "e3ebb3a",
        ("quantised_*epyc", "accuracy_cpu", "task_cpu"),
        tuple(
            f"{CPU}{name}"
            for name in ("quantized.cpp", "codes.h", "weights.h", "inputs.h", "panels.h")
        ),
    ),
    Change("`generate` on a CPU", "2026-11-28 00:12", "ee5dabb", ("quickstart_*",), STEPS),
    Change("the passes", "2026-11-28 08:16", "1870eef", ("compile_cpu",), ("passes",)),
    Change(
        "`moe_ops/quant/`", "2026-11-28 09:29", "95016d6", ("packing_cpu",), ("moe_ops/quant",),
    ),
    Change(
        "`moe_ops/weights/`", "2026-11-28 09:41", "769cb28", ("loading_epyc",),
        ("moe_ops/weights",),
    ),
    Change(
        "calling an op", "2026-11-28 09:58", "cbaeea1", ("overhead_epyc",),
        ("moe_ops/registry/spec.py", "moe_ops/registry/memo.py"),
    ),
    Change(
        "the Triton kernels of experts", "2026-11-28 10:08", "c766305",
        ("layer_h?00_*", "counters_*", "*_tiles_*", "rows_or_grouped_*", "ep_layers_*",
         "ep_codes_*", "ep_shared_*", "ep_batched_*", "generate_*", "forward_*"),
        (f"{TRITON}experts", f"{TRITON}launch.py", f"{TRITON}recorded.py", f"{TRITON}replay.py"),
    ),
    Change("how steps are compiled", "2026-11-28 00:12", "ee5dabb", ("generate_*",), STEPS),
    Change("how forwards run", "2026-11-28 01:06", "797da9f", ("forward_*",), ("moe_ops/forward",)),
    Change(
        "`quantize` on a GPU", "2026-11-26 20:25", "d2ea4d1", ("quantize_h100", "accuracy_h100"),
        (f"{TRITON}quantize.py", f"{TRITON}quantize_blocks.py"),
    ),
    Change(
        "the kernels of push", "2026-11-26 00:04", "6a406dd",
        ("ep_probe_*", "ep_peers_*", "ep_transport_*"),
        (f"{TRITON}push.py", f"{TRITON}push_sum.py"),
    ),
)  # fmt: skip


def fill(page: str, folder: Path) -> str:
    """The page with its `measured` blocks made anew."""

    def filled(block: re.Match[str]) -> str:
        return f"<!-- measured {block[1]} -->\n\n{text(block[1].split(), folder)}\n\n<!-- end -->"

    return BLOCK.sub(filled, page)


def text(names: list[str], folder: Path) -> str:
    """A sentence for the files that one change has outdated, and one for the others."""
    together: dict[Change | None, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    runs = [(name, json.loads((folder / f"{name}.json").read_text())) for name in names]
    for name, figures in sorted(runs, key=lambda run: run[1]["date"]):
        commit = f" ({figures['commit']})" if figures["commit"] else ""
        when = f"{day(figures['date'])}{commit}"
        together[older_than(name, figures["date"])][when].append(f"`{name}.json`")
    mark = "- " if len(together) > 1 else ""
    return "\n".join(
        textwrap.fill(
            mark + sentence(change, of_dates), WIDTH, subsequent_indent=" " * len(mark),
            break_long_words=False, break_on_hyphens=False,
        )
        for change, of_dates in together.items()
    )  # fmt: skip


def sentence(change: Change | None, of_dates: dict[str, list[str]]) -> str:
    """What outdated these files, and when each was measured."""
    measured = ". By ".join(f"{when}: {', '.join(files)}" for when, files in of_dates.items())
    if change is None:
        return f"Measured by {measured}."
    last = f"the last change of {change.what} ({day(change.date)}, {change.commit})"
    return f"Older than {last}. Measured by {measured}."


def older_than(name: str, date: str) -> Change | None:
    """The last change since a date of what the file measures."""
    found = [c for c in CHANGES if c.date > date and any(fnmatch(name, f) for f in c.files)]
    return max(found, key=lambda c: c.date, default=None)


def day(date: str) -> str:
    then = datetime.strptime(date, "%Y-%m-%d %H:%M")
    return f"{then.day} {then:%B %Y}"


def since(change: Change) -> str:
    """The commits that touched what some files measure after its last change, one a line."""
    log = ("git", "log", "--no-merges", "--format=  %h %ad %s", "--date=short")
    paths = (f"{change.commit}..HEAD", "--", *change.where)
    return subprocess.run((*log, *paths), capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for change in CHANGES:
        print(f"{change.what} ({change.commit})\n{since(change)}", end="")
