"""`bench beside`: the layers that it compares, and what it writes; times are those of a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_ops.bench import beside
from tests.bench.runs import TINY, bench, quicken


def test_the_ways_compute_the_same_on_the_same_weights() -> None:
    layers = beside.Layers(TINY, 2 * TINY.I, torch.device("cpu"))
    x = torch.randn(5, TINY.D).bfloat16()
    assert len(layers.layers) == beside.LAYER_COUNT
    with torch.inference_mode():
        want = layers(x)
        for asked in (True, False):
            got = layers.asked(asked)(x)
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert all(layer.beside is None for layer in layers.layers)


def test_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quicken(monkeypatch)
    file = tmp_path / "beside.json"
    sizes = ("--layer", "tiny", "--shared", "1,3", "--tokens", "1,4", "--ways", "eager")
    bench(monkeypatch, "beside", *sizes, "--json", str(file))
    found = json.loads(file.read_text())["beside"]
    assert [(s["shared"], s["tokens"], s["way"]) for s in found] == [
        (32, 1, "eager"), (32, 4, "eager"), (96, 1, "eager"), (96, 4, "eager"),
    ]  # fmt: skip
    for s in found:
        assert s["ratio"] == pytest.approx(s["in_order_us"] / s["beside_us"])
        assert s["mib"] == 3 * 64 * s["shared"] * 2 / 2**20
    assert "in order" in capsys.readouterr().out


@pytest.mark.slow
def test_compiled_layers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    (spent,) = beside.measure(["tiny"], [1], [4], [beside.COMPILED], torch.device("cpu"))
    assert spent.way == "compiled" and spent.in_order_us > 0 and spent.beside_us > 0
