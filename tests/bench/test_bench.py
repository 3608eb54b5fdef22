"""The benchmarks measure what they say, and refuse to time what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops.bench import __main__ as cli
from moe_ops.bench import layer, overhead
from moe_ops.registry.spec import DECODE_OPS
from moe_ops.testing import BF16, LAYERS, Case

TINY = Case(name="tiny", T=1, E=8, K=2, D=64, I=32)


def test_overhead_covers_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    monkeypatch.setattr(overhead, "CALLS", 3)
    found = overhead.measure()
    names = [*moe_ops.OPS, *DECODE_OPS]
    assert sorted(o.op for o in found) == sorted(names)
    assert all(o.body_us > 0 and o.call_us > 0 for o in found)
    lines = overhead.table(found).splitlines()
    assert [line.split()[0] for line in lines] == ["op", *(o.op for o in found)]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "tokens", "against", "stance"),
    [
        ("experts", "1,5", ["grouped_mm", "batched_mm"], "force_eager"),
        ("block", "5", ["grouped_mm"], "force_eager"),
        *(
            pytest.param(
                part, "1,5", ["grouped_mm", "batched_mm"], "default", marks=pytest.mark.every
            )
            for part in ("experts", "block")
        ),
    ],
)
def test_layer_times_every_implementation(
    part: str, tokens: str, against: list[str], stance: Any, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setitem(LAYERS, "qwen3_30b", TINY)
    figures = tmp_path / "figures.json"
    options = ["layer", "--tokens", tokens, "--repeats", "1", "--part", part]
    options += ["--against", ",".join(against)]
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--json", str(figures)])
    with torch.compiler.set_stance(stance):
        cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{part}: tiny: E=8 K=2 D=64 I=32, torch.bfloat16")
    assert [line.split()[0] for line in lines[2:]] == tokens.split(",")
    written = json.loads(figures.read_text())
    names = {*against, "moe_ops"}
    assert all(set(t["milliseconds"]) == names for t in written["timings"])
    assert all(m > 0 for t in written["timings"] for m in t["milliseconds"].values())


def test_a_wrong_implementation_is_not_timed() -> None:
    def right(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x * weights.sum(-1, keepdim=True)

    def wrong(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return right(x, ids, weights) * 1.1

    compiled = {
        "other": layer.Compiled(experts=wrong, block=lambda x: x),
        "moe_ops": layer.Compiled(experts=right, block=lambda x: x),
    }
    with pytest.raises(AssertionError, match="other, 4 tokens: not timing what is wrong"):
        layer.check(TINY, BF16, compiled, 4)


@pytest.mark.every
@pytest.mark.slow
def test_compile_time_is_that_of_a_lifted_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    options = ["compile", "--layers", "1,2", "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    cli.main()
    one, two = json.loads(figures.read_text())["compile"]
    assert two["nodes"] > one["nodes"]
    assert 0 < one["total_s"] < one["compile_s"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layers", "1", "2"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.slow
def test_adapters_are_timed_beside_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setitem(LAYERS, "qwen3_30b", TINY)
    figures = tmp_path / "figures.json"
    options = ["adapters", "--rank", "4", "--tokens", "1,5", "--trained", "16", "--json"]
    options += [str(figures), "--formats", "floats,int4:1x32", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["bench", *options])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny: E=8 K=2 D=64 I=32, rank 4"
    found = json.loads(figures.read_text())["adapters"]
    assert [(f["format"], f["tokens"], f["trains"]) for f in found] == [
        (name, *one)
        for name in ("floats", "int4:1x32")
        for one in ((1, False), (5, False), (16, True))
    ]
    assert all(f["adapted_us"] > 0 and f["plain_us"] > 0 for f in found)
