"""What `bench invariant` measures, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_ops.bench import invariant, timing
from moe_ops.bench.__main__ import parse
from moe_ops.testing import Case

SMALL = Case(name="small", T=1, E=4, K=2, D=64, I=48)


def cost(layer: str, format: str, us: float) -> invariant.Cost:
    backends = ("triton.tiny", "triton.rows")
    return invariant.Cost(
        layer=layer, format=format, tokens=4, us=10.0, invariant_us=us, backends=backends
    )


def test_cells_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(timing.SECONDS, "cpu", 0.001)
    names = ("bfloat16", "int8:1x128", "int8:row+int8:row")
    found = [*invariant.measure([SMALL], names, [1, 3], torch.device("cpu"))]
    assert [(c.format, c.tokens) for c in found] == [
        (name, T) for name in (names[0], names[2]) for T in (1, 3)
    ]
    assert all(c.us > 0 and c.ratio == c.invariant_us / c.us for c in found)
    assert "int8:1x128 of small is not measured: " in capsys.readouterr().out


def test_a_format_has_a_geometric_mean_and_a_largest_ratio() -> None:
    cells = [cost("a", "mxfp4", 10.0), cost("b", "mxfp4", 40.0), cost("a", "int8:row", 5.0)]
    *_, of_mxfp4, of_int8 = invariant.table(cells).splitlines()
    assert of_mxfp4.split() == ["mxfp4", "2", "2.000", "4.00", "b", "4"]
    assert of_int8.split() == ["int8:row", "1", "0.500", "0.50", "a", "4"]


def test_each_run_is_divided_by_its_own_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer calls go fewer rounds in a graph."""

    def timed(run: timing.Run, calls: int, device: torch.device, rest: float) -> timing.Timing:
        us = run() / calls
        return timing.Timing(us=us, low_us=us, high_us=us, replays=1)

    monkeypatch.setattr(invariant, "time_replays", timed)
    runs = [(lambda: 40.0, 4), (lambda: 48.0, 3)]
    assert invariant.in_turns(runs, torch.device("cpu")) == [10.0, 16.0]


def test_options() -> None:
    args = parse(
        ["invariant", "--layer", "olmoe", "--formats", "mxfp4+mxfp8", "--tokens", "1", "2"]
    )
    assert (args.layer, args.formats, args.tokens) == (["olmoe"], ["mxfp4+mxfp8"], [1, 2])


def test_a_run_goes_on_in_the_file_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(timing.SECONDS, "cpu", 0.001)
    monkeypatch.setitem(invariant.LAYERS, "olmoe", SMALL)
    path = tmp_path / "costs.json"
    line = ["invariant", "--layer", "olmoe", "--formats", "bfloat16", "--json", str(path)]
    first = invariant.measure_invariant(parse([*line, "--tokens", "1", "--device", "cpu"]))
    assert json.loads(path.read_text()) == json.loads(json.dumps(first))
    both = invariant.measure_invariant(parse([*line, "--tokens", "1", "2", "--device", "cpu"]))
    assert both["invariant"][0] == first["invariant"][0]
    assert [cell["tokens"] for cell in both["invariant"]] == [1, 2]
    with pytest.raises(ValueError, match="is of cpu, this is another; choose another file"):
        invariant.earlier(path, "another")


def test_what_no_invariant_call_takes_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    name = "float8_e4m3fn:row+float8_e4m3fn:tensor"
    invariant.call_once(SMALL, name, [1], "cpu")  # where kernels are compiled ahead, nothing
    assert not [*invariant.measure([SMALL], [name], [1], torch.device("cpu"))]
    assert f"{name} of small is not measured: no backend" in capsys.readouterr().out
