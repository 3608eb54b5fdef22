"""The times of quantisation are those of every format, on as much as was asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from moe_ops.bench import __main__ as cli
from moe_ops.bench import packing
from moe_ops.bench.packing import Packing
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import LAYERS, Case

TINY = Case(name="tiny", T=1, E=8, K=2, D=256, I=128)
WIDE = Case(name="wide", T=1, E=8, K=2, D=256, I=256)  # which every format fills


def test_every_weight_format_is_timed_on_what_was_asked_for() -> None:
    values = 3 * 256 * 256
    found = packing.measure(WIDE, 2.2 * 2 * values / 1e9, 1)  # two experts
    formats = {w for info in SCHEMES.values() for w in info.weight_formats} - {""}
    assert {p.weight_format for p in found} == formats
    assert len(found) == len(formats)
    assert all(p.seconds > 0 and p.gigabytes == 2 * 2 * values / 1e9 for p in found)


def test_the_fastest_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([3.0, 1.0, 2.0, 5.0])

    def pretend(case: Case, E: int, weight_format: str) -> Packing:
        return Packing(weight_format=weight_format, gigabytes=1.0, seconds=next(seconds))

    monkeypatch.setattr(packing, "quantize", pretend)
    found = packing.measure(TINY, 1, 2, ["mxfp4", "mxfp8"])
    assert [(p.weight_format, p.seconds) for p in found] == [("mxfp4", 2.0), ("mxfp8", 1.0)]


def test_the_experts_are_bfloat16_and_the_rest_takes_no_memory() -> None:
    model = packing.make_model(TINY, 3)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (3, 256, 256)
    assert experts.down_proj.shape == (3, 256, 128)
    on_cpu = {name for name, p in model.named_parameters() if not p.is_meta}
    assert on_cpu == {f"model.layers.0.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")}
    for p in (experts.gate_up_proj, experts.down_proj):
        assert p.dtype == torch.bfloat16
        assert p.is_contiguous()
        assert torch.equal(p[0], p[2])
        assert float(p.float().std()) == pytest.approx(p.shape[-1] ** -0.5, rel=0.01)


def test_formats_that_do_not_fit_are_not_timed() -> None:
    small = Case(name="small", T=1, E=1, K=1, D=64, I=64)
    with pytest.raises(ValueError, match="int8:1x128 does not fit small: model"):
        packing.measure(small, 0, 1, ["int8:1x128"])


def test_table_text() -> None:
    found = [
        Packing(weight_format="float8_e4m3fn:128x128", gigabytes=2.0, seconds=3.5),
        Packing(weight_format="mxfp4", gigabytes=2.0, seconds=12.25),
    ]
    assert_expected_inline(
        packing.table(found),
        """\
weights                    GB  seconds  seconds per GB
float8_e4m3fn:128x128    2.00     3.50            1.75
mxfp4                    2.00    12.25            6.12""",
    )


def test_the_command_prints_the_table_and_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(LAYERS, "olmoe", WIDE)
    figures = tmp_path / "figures.json"
    options = [
        "--gigabytes",
        "0.0004",
        "--layer",
        "olmoe",
        "--repeats",
        "1",
        "--json",
        str(figures),
    ]
    monkeypatch.setattr(sys, "argv", ["bench", "packing", *options])
    cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == packing.weight_formats()
    written = json.loads(figures.read_text())
    assert written["case"] == {"name": "wide", "T": 1, "E": 1, "K": 2, "D": 256, "I": 256}
    assert all(row["seconds_per_gb"] > row["seconds"] > 0 for row in written["packing"])
