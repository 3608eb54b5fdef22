"""The quickstart runs as a user runs it, and prints what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_quickstart_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--layers", "2", "--batch", "1", "--prompt", "4", "--tokens", "6")
    command = [sys.executable, "examples/quickstart.py", *sizes]
    done = subprocess.run(
        [*command, "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "float32 parity: same greedy tokens" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line]
    assert [r[0] for r in rows[1:]] == ["experts", "grouped_mm", "batched_mm", "moe_ops", "ours"]
    assert rows[-1][-1].endswith("x")
    speeds = json.loads(figures.read_text())["speeds"]
    assert [s["implementation"] for s in speeds] == ["grouped_mm", "batched_mm", "moe_ops"]
    assert all(s["decode_tokens_per_s"] > 0 for s in speeds)
