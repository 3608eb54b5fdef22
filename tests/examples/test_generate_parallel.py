"""The example of a model over ranks gives the tokens of one process, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.every
@pytest.mark.slow
def test_kernels_are_shown_of_gpus_alone() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = (sys.executable, "examples/generate_parallel.py", "--profile")
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 2
    assert "--profile shows kernels of a GPU, and torch finds none" in done.stderr


@pytest.mark.every
@pytest.mark.slow
def test_halves_are_of_own_tokens_and_uncompiled() -> None:
    for words in ("", "--tokens own --compiled"):
        command = [sys.executable, "examples/generate_parallel.py", "--halves", "always"]
        done = subprocess.run(
            [*command, *words.split()], capture_output=True, text=True, cwd=ROOT, timeout=300
        )
        assert done.returncode == 2
        assert "--halves goes with --tokens own, without --compiled" in done.stderr


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize(
    "way", ["--tokens replicated", "--tokens own", "--tokens own --layers 2 --halves always"]
)
def test_two_processes_say_that_tokens_are_those_of_one(way: str, tmp_path: Path) -> None:
    file = str(tmp_path / "speeds.json")
    words = ("examples/generate_parallel.py", "--check", "--layers", "1", *way.split(" "))
    words += ("--batch", "4", "2", "--json", file)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*TORCHRUN, *words], capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert len(lines) == 4 and all(line.endswith("as one process: True") for line in lines)
    plans = [line.strip() for line in done.stdout.splitlines() if "prompts run as" in line]
    halves, whole = "two halves of up to 8 and 8 tokens a rank by gather", "one batch of up to 8"
    wanted = [f"prompts run as {plan}" for plan in (halves, halves, whole, whole)]
    if "halves" not in way:
        assert not plans
    else:
        assert all(plan.startswith(want) for plan, want in zip(plans, wanted, strict=True))
    found = json.loads(Path(file).read_text())
    assert found["command"].startswith("torchrun --nproc-per-node 2 examples/generate_parallel.py")
    assert found["date"]
    assert [speed["batch"] for speed in found["speeds"]] == [4, 2]
    assert all(speed["tokens_per_s"] > 0 for speed in found["speeds"])
