"""Every file of figures is named by a page, with its date, and pages name only files that exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.docs import figures, measured
from tests.docs.figures import FOLDERS, PAGES, RESULTS
from tests.sources import ROOT

# Its families were run on different days, and its page shows no times.
UNDATED = {"families_gpu"}


def named() -> set[str]:
    return {
        name
        for page in PAGES
        for name in figures.named(page.read_text(), figures.is_of_figures(page))
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_is_named(folder: str) -> None:
    files = {file.stem for file in FOLDERS[folder].iterdir()}
    assert len(files) > 5
    nameless = sorted(files - named())
    assert not nameless, f"no page names these of benchmarks/{folder}; name them or remove them"


@pytest.mark.parametrize("page", PAGES, ids=figures.label)
def test_pages_name_files_that_exist(page: Path) -> None:
    assert not figures.unknown(page.read_text(), figures.is_of_figures(page))


def test_a_file_that_is_not_there_is_found() -> None:
    page = "`no_such.json` <!-- measured nor_this -->\n<!-- end --> benchmarks/peers/h200_bf16.json"
    assert figures.unknown(page, of_figures=True) == {"no_such", "nor_this"}
    assert figures.unknown("`table.json` benchmarks/results/no.json", of_figures=False) == {"no"}


def test_pages_say_when_every_file_was_measured() -> None:
    files = {file.stem for file in RESULTS.glob("*.json")} - UNDATED
    dated = {name for page in PAGES for name in figures.dated(page.read_text())}
    missing = sorted(files - dated)
    assert not missing, f"put <!-- measured {' '.join(missing)} --> and <!-- end --> where they are"


def test_every_change_is_of_some_file() -> None:
    for change in measured.CHANGES:
        measured.day(change.date)
        for pattern in change.files:
            assert list(RESULTS.glob(f"{pattern}.json")), pattern


def write(folder: Path, name: str, date: str, commit: str = "abc1234") -> None:
    (folder / f"{name}.json").write_text(json.dumps({"date": date, "commit": commit}))


def test_a_file_older_than_its_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("loading_epyc",)
    change = measured.Change("`moe_ops/weights/`", "2026-11-26 20:49", "4dd8bf3", files)
    monkeypatch.setattr(measured, "CHANGES", (change,))
    write(tmp_path, "loading_epyc", "2026-11-22 02:48")
    write(tmp_path, "loading_later", "2026-12-01 10:00", commit="")
    older = (
        "Older than the last change of `moe_ops/weights/` (26 November 2026, 4dd8bf3). Measured by "
        "22 November 2026 (abc1234):\n`loading_epyc.json`."
    )
    assert measured.text(["loading_epyc"], tmp_path) == older
    names = ["loading_epyc", "loading_later"]
    lines = measured.text(names, tmp_path).splitlines()
    assert lines[0].startswith("- Older than the last change of")
    assert lines[-1] == "- Measured by 1 December 2026: `loading_later.json`."
    page = "a\n<!-- measured loading_later -->\nold\n<!-- end -->\nb\n"
    filled = measured.fill(page, tmp_path)
    assert "old" not in filled
    assert measured.fill(filled, tmp_path) == filled


def test_the_last_change_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = (measured.Change("one", f"2026-01-0{day} 00:00", "a", ("x_*",)) for day in (1, 2))
    monkeypatch.setattr(measured, "CHANGES", (last, first))
    assert measured.older_than("x_cpu", "2025-12-31 00:00") is last
    assert measured.older_than("x_cpu", "2026-01-03 00:00") is None
    assert measured.older_than("y_cpu", "2025-12-31 00:00") is None


def test_pages_of_figures_can_be_read() -> None:
    pages = [ROOT / "docs" / "PERFORMANCE.md", *(ROOT / "docs" / "performance").glob("*.md")]
    assert len(pages) > 5
    long = {page.name: n for page in pages if (n := len(page.read_text().splitlines())) > 300}
    assert not long, "at most 300 lines; put a part on a page of its own"
