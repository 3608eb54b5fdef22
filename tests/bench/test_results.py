"""What the pages of figures say is what benchmarks/results/ holds, and their commands exist."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ops.bench import __main__ as cli
from moe_ops.quant.schemes import SCHEMES

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs" / "performance").glob("*.md")), ROOT / "docs" / "DIARY.md"]
DOCUMENT = "".join(page.read_text() for page in PAGES)
MODULE = "python -m moe_ops.bench"
COMMANDS = re.findall(rf"^ +(?:\w+=\w+ )?{MODULE} *(.*?) *(?:#.*)?$", DOCUMENT, re.MULTILINE)


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def table_under(heading: str) -> list[list[str]]:
    """The cells of the rows of the first table under a heading."""
    section = DOCUMENT.split(f"# {heading}\n")[1].split("\n## ")[0]
    below = itertools.dropwhile(lambda line: not line.startswith("|"), section.splitlines())
    lines = list(itertools.takewhile(lambda line: line.startswith("|"), below))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def recorded() -> list[str]:
    """The benchmark commands that made the recorded figures; some files are of several, a line
    each.
    """
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    texts = [json.loads(file.read_text()).get("command", "") for file in files]
    found = [line for text in texts for line in text.splitlines()]
    return [c.removeprefix(MODULE).strip() for c in found if c.startswith(MODULE)]


def test_commands_are_found() -> None:
    assert {c.split()[0] for c in COMMANDS} >= {"layer", "overhead", "accuracy", "packing"}
    assert len(recorded()) > 5


@pytest.mark.parametrize("command", [*COMMANDS, *recorded()])
def test_commands_of_documents_and_results_still_exist(command: str) -> None:
    words = shlex.split(command)
    assert cli.parse(words).command == words[0]


@pytest.mark.parametrize("words", [[], ["--tokens", "1,5"], ["--json", "x.json", "--threads", "2"]])
def test_without_a_command_overhead_and_layer_are_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = cli.parse(words)
    assert args.command == "both"
    assert cli.COMMANDS[args.command][0] is cli.measure_both
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tokens = [1, 5] if "--tokens" in words else [1, 4, 16, 64, 128, 512]
    assert cli.parse(words).tokens == tokens


def test_the_accuracy_table_is_what_was_measured() -> None:
    measured = {
        (a["scheme"], a["weight_format"], a["input_format"]): [
            f"{a['bits_per_weight']:.2f}", f"{a['layer_error']:.4f}", f"{a['kl_nats']:.4f}",
            *("" if (value := a[figure]) is None else f"{value:.4f}"
              for figure in ("kernel_layer_error", "kernel_kl_nats")),
        ]
        for a in results("accuracy_cpu.json")["accuracy"]
    }  # fmt: skip
    assert {scheme for scheme, _, _ in measured} == set(SCHEMES)
    rows = table_under("A layer and a model with generated weights")
    assert {row[0] for row in rows} == set(SCHEMES)
    for scheme, weights, inputs, *figures in rows:
        w, x = ("" if f == "16-bit" else f for f in (weights, inputs))
        assert figures == measured[scheme, w, x], (scheme, w, x)


def test_the_accuracy_of_gpu_kernels_is_what_was_measured() -> None:
    names = ("layer_error", "kl_nats", "kernel_layer_error", "kernel_kl_nats")
    measured = {
        (a["scheme"], a["weight_format"], a["input_format"]): [
            f"{a[figure]:.4f}" for figure in names
        ]
        for name in ("accuracy_h100.json", "accuracy_h200.json")
        for a in results(name)["accuracy"]
        if a["wrong"] == ""
    }
    assert len(measured) == 74
    rows = table_under("By kernels of a GPU")
    assert {row[0] for row in rows} == set(SCHEMES)
    for scheme, weights, inputs, *figures in rows:
        w, x = ("" if f == "16-bit" else f for f in (weights, inputs))
        assert figures == measured[scheme, w, x], (scheme, w, x)


def test_the_packing_table_is_what_was_measured() -> None:
    written = results("packing_cpu.json")["packing"]
    measured = {p["weight_format"]: f"{p['seconds_per_gb']:.1f}" for p in written}
    rows = table_under("Speed of quantisation")
    assert {row[0]: row[1] for row in rows} == measured
    assert all(p["seconds_per_gb"] < 60 for p in written)
