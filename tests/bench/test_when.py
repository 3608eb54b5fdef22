"""Files of figures say when they were measured, and of which code."""

from __future__ import annotations

import re
import subprocess
from datetime import datetime
from pathlib import Path

from moe_ops.bench.when import when


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("1\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "v1")
    clean = when(tmp_path)
    assert re.fullmatch("[0-9a-f]{7,}", clean["commit"])
    datetime.strptime(clean["date"], "%Y-%m-%d %H:%M")
    (tmp_path / "code.py").write_text("2\n")
    assert when(tmp_path)["commit"] == clean["commit"] + "-dirty"
    # The checkout around an installed package is not the package's.
    (tmp_path / "inside").mkdir()
    assert when(tmp_path / "inside")["commit"] == ""
