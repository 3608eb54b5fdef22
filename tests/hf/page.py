"""The table of docs/FAMILIES.md: a row for each family, a column for each place where it ran."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

import torch
import transformers

PAGE = Path(__file__).parents[2] / "docs" / "FAMILIES.md"
START, END = "<!-- families -->\n", "<!-- end -->"


def versions() -> str:
    """The torch and the transformers at hand, as the page names them."""
    torch_version = re.match(r"\d+\.\d+", torch.__version__)
    assert torch_version is not None
    return f"torch {torch_version[0]}, transformers {transformers.__version__}"


def put(cells: dict[str, str], column: str) -> None:
    """Write cells, by family, into a column of the page."""
    with PAGE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests may run side by side
        page = file.read()
        known = read(page)
        for family, cell in cells.items():
            known.setdefault(family, {})[column] = cell
        file.seek(0)
        file.truncate()
        file.write(write(page, known))


def hold(cells: dict[str, str], column: str) -> None:
    """Require cells of the page, if it has the column; with EXPECTTEST_ACCEPT=1 write them."""
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        put(cells, column)
        return
    known = read(PAGE.read_text())
    if any(column in row for row in known.values()):
        found = {family: known.get(family, {}).get(column) for family in cells}
        assert found == cells, "run `make families`"


def read(page: str) -> dict[str, dict[str, str]]:
    """The cells of the page's table, by family and column."""
    table = page.partition(START)[2].partition(END)[0].strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    if not rows:
        return {}
    head, _, *body = rows
    return {
        row[0]: {name: cell for name, cell in zip(head[1:], row[1:], strict=True) if cell}
        for row in body
    }


def write(page: str, cells: dict[str, dict[str, str]]) -> str:
    """The page with these cells in its table."""
    columns = sorted({name for row in cells.values() for name in row})
    lines = ["| " + " | ".join(["family", *columns]) + " |", "| --- " * (len(columns) + 1) + "|"]
    for family in sorted(cells):
        row = [cells[family].get(name, "") for name in columns]
        lines.append("| " + " | ".join([family, *row]) + " |")
    before, _, rest = page.partition(START)
    return before + START + "\n".join(["", *lines, "", ""]) + END + rest.partition(END)[2]
