"""The pages that show measured figures, and what of them is made from files of results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from moe_ops.bench import report
from tests.docs import (
    costs,
    forwards,
    generation,
    layers,
    linears,
    measured,
    models,
    task,
    training,
)
from tests.sources import ROOT

FOLDERS = {name: ROOT / "benchmarks" / name for name in ("results", "peers")}
RESULTS = FOLDERS["results"]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# What these pages call NAME.json is a file of figures; elsewhere it may be one of a user's.
OF_FIGURES = ("DIARY.md", "EXPERT_PARALLEL.md", "FAMILIES.md", "PERFORMANCE.md")
NAMED = re.compile(r"(benchmarks/(?:results|peers)/)?\b(\w+)\.json\b")
KINDS = "results|generation|forward|cells|formats|means|train|task|measured|models|costs|linears"
BLOCK = re.compile(rf"<!-- (?:{KINDS}) ([\w ]+) -->")


def filled(page: str, folder: Path = RESULTS) -> str:
    """The page with all of its blocks made anew."""
    kinds = (
        report, generation, forwards, layers, training, task, measured, models, costs, linears,
    )  # fmt: skip
    for kind in kinds:
        page = kind.fill(page, folder)
    return page


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def is_of_figures(page: Path) -> bool:
    return page.parent.name == "performance" or page.name in OF_FIGURES


def named(page: str, of_figures: bool) -> Iterator[str]:
    """The names, without .json, of the files of figures that a page names."""
    for names in BLOCK.findall(page):
        yield from names.split()
    for folder, name in NAMED.findall(page):
        if folder or of_figures:
            yield name


def unknown(page: str, of_figures: bool) -> set[str]:
    """What a page names and is not there."""
    there = {file.stem for folder in FOLDERS.values() for file in folder.glob("*.json")}
    return set(named(page, of_figures)) - there


def dated(page: str) -> set[str]:
    """The files of which a page says when they were measured."""
    return {name for names in measured.BLOCK.findall(page) for name in names.split()}
