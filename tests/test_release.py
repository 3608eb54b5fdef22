"""What a release needs before it is built, and what CHANGELOG.md looks like."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import moe_ops
from tests.release import Tried, exported, table, unready, wanted
from tests.sources import LINKED, ROOT

CHANGES = (ROOT / "CHANGELOG.md").read_text()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
HEADINGS = re.findall(r"^## (.*)$", CHANGES, re.M)


def test_the_changelog_begins_with_what_is_unreleased_and_ends_with_the_first_version() -> None:
    first, *versions = HEADINGS
    assert first == "[Unreleased]" and versions
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", v) for v in versions]
    assert all(found), versions
    numbers = [tuple(map(int, match.groups())) for match in found if match]
    assert numbers == sorted(set(numbers), reverse=True)
    assert numbers[-1] == (0, 1, 0)


def test_sections_after_the_first_version_have_the_usual_kinds() -> None:
    later = CHANGES.partition("## [0.1.0]")[0]
    kinds = re.findall(r"^### (.*)$", later, re.M)
    assert kinds and set(kinds) <= KINDS


def test_this_version_can_be_released_once_all_is_committed() -> None:
    assert unready(moe_ops.__version__, CHANGES, "") is None


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ("## [1.2.3] - 2026-01-02\n", " M README.md\n", "commit or remove them:\n M README.md"),
        ("## [Unreleased]\n", "", r"has no section `## \[1\.2\.3\] - YYYY-MM-DD`; write it"),
        ("## [1.2.3]\n", "", "has no section"),
        ("## [1.2.33] - 2026-01-02\n", "", "has no section"),
    ],
    ids=["not committed", "unreleased", "no date", "another version"],
)
def test_why_a_version_cannot_be_released(changes: str, status: str, said: str) -> None:
    assert re.search(said, unready("1.2.3", changes, status) or "")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist is no checkout")
def test_what_is_built_is_the_commit(tmp_path: Path) -> None:
    listing = ["git", "ls-tree", "-r", "-z", "--name-only", "HEAD"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    source = exported(tmp_path / "source")
    files = {str(p.relative_to(source)) for p in source.rglob("*") if not p.is_dir()}
    links = {f"moe_ops/{name}" for name in LINKED}
    assert all((source / link).is_symlink() for link in links)
    assert files | links == {name for name in found.stdout.split("\0") if name}


def test_names_and_the_table(tmp_path: Path) -> None:
    wheel, sdist = (tmp_path / name for name in wanted("1.2.3"))
    assert (wheel.name, sdist.name) == (
        "torch_moe_ops-1.2.3-py3-none-any.whl", "torch_moe_ops-1.2.3.tar.gz",
    )  # fmt: skip
    wheel.write_bytes(b"x" * 2048)
    sdist.write_bytes(b"")
    head, first, second = table([Tried(wheel, 61.2, 9.6), Tried(sdist, 70.0, 8.0)]).splitlines()
    assert head.split() == ["file", "KiB", "installed", "in", "example", "in", "sha256"]
    assert first.split()[:6] == [wheel.name, "2", "61", "s", "10", "s"]
    assert second.split()[-1].startswith("e3b0c442"), "the hash of no bytes"
    assert len({line.index(word) for line, word in ((head, "sha256"), (second, "e3b0"))}) == 1
