"""The examples of whole models run as a user runs them, small, and print what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.every
@pytest.mark.slow
def test_stock_against_ours(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    # So far apart that no busy machine makes the few tokens take as long as the many.
    sizes = ("--model", "tiny", "--batch", "1", "2", "--prompt", "4", "--tokens", "4", "100")
    done = run("examples/generate.py", *sizes, "--json", str(figures))
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows[-4:]] == [
        ["moe_ops", "1"],
        ["moe_ops", "2"],
        ["default", "1"],
        ["default", "2"],
    ]
    speeds = json.loads(figures.read_text())["speeds"]
    assert all(s["tokens_per_s"] > 0 and s["prompt_ms"] > 0 for s in speeds)


@pytest.mark.every
@pytest.mark.slow
def test_adapters_beside_none(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--model", "tiny", "--batch", "2", "--prompt", "4", "--tokens", "4", "60")
    options = ("--stock", "none", "--adapter", "4", "--json", str(figures))
    run("examples/generate.py", *sizes, *options)
    ways = [speed["way"] for speed in json.loads(figures.read_text())["speeds"]]
    assert ways == ["moe_ops", "moe_ops r4"]


@pytest.mark.every
@pytest.mark.slow
def test_candidates(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--model", "tiny", "--prompt", "9", "--tokens", "6", "100")
    done = run("examples/candidates.py", *sizes, "--json", str(figures))
    rows = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert rows[-3:] == ["plain", "none accepted", "all accepted"]
    plain, none, every = json.loads(figures.read_text())["ways"]
    assert all(way["tokens_per_s"] > 0 for way in (plain, none, every))
    assert none["accepted"] < 0.2 < 0.8 < every["accepted"] and plain["steps"] == 99
    assert every["steps"] < 30


@pytest.mark.every
@pytest.mark.slow
def test_forwards(tmp_path: Path) -> None:
    figures, ways = tmp_path / "figures.json", ("eager", "moe_ops")
    sizes = ("--model", "tiny", "--sizes", "1x16", "2x24", "--ways", *ways)
    done = run("examples/forward.py", *sizes, "--json", str(figures))
    rows = [line.split()[:2] for line in done.stdout.splitlines()[1:]]
    assert rows == [[way, size] for way in ways for size in ("1x16", "2x24")]
    forwards = json.loads(figures.read_text())["forwards"]
    assert all(f["ms"] > 0 and f["away"] < 0.05 for f in forwards)


@pytest.mark.every
@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    sizes = ("--calls", "50", "--warm-up", "36", "--batches", "1", "2", "--prompt", "30")
    how = ("--kinds", "windows", "--compare", "10", "--json", str(figures))
    done = run("examples/soak.py", *sizes, *how)
    assert "50 calls, 5 compared; 0 graphs compiled since the warm-up" in done.stdout
    report = json.loads(figures.read_text())
    assert not report["fallbacks"] and [h["calls"] for h in report["held"]] == [36, 50]
    assert all(h["tensors"] > 0 for h in report["held"])
