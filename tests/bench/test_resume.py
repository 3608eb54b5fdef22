"""A run of `bench layer` goes on in the file of an earlier one, or says why it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ops.bench import cells, grid, report, resume
from moe_ops.bench.inputs import make_routed
from moe_ops.bench.rates import Rates
from moe_ops.bench.results import dump, load, write
from moe_ops.testing import Case
from tests.bench.runs import LAYER, SMALL, TINY, bench, quicken, results

FORMAT = ("--format", "mxfp4")
TWO = ("--layer", "tiny,small", "--tokens", "1,4")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers, few replays, small rates."""
    quicken(monkeypatch)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Layers and tokens for which inputs were made."""
    found: list[tuple[str, int]] = []

    def noted(case: Case, T: int, *rest: object) -> object:
        found.append((case.name, T))
        return make_routed(case, T, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cells, "make_routed", noted)
    return found


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, made: list[tuple[str, int]], tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    file = tmp_path / "results.json"
    fill = cells.fill

    def stop(cell: cells.Cell, *rest: object) -> cells.Cell:
        if (cell.layer, cell.tokens) == ("small", 4):
            raise KeyboardInterrupt
        return fill(cell, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopping.setattr(cells, "fill", stop)
        bench(stopping, *LAYER, *TWO, *FORMAT, "--json", str(file))
    stopped = load(file)
    assert [(c.layer, c.tokens) for c in stopped.cells] == [("tiny", 1), ("tiny", 4), ("small", 1)]
    made.clear()
    capsys.readouterr()
    bench(monkeypatch, *LAYER, *TWO, *FORMAT, "--json", str(file))
    whole = load(file)
    assert set(made) == {("small", 4)}
    assert whole.cells[:3] == stopped.cells
    assert [(c.layer, c.tokens) for c in whole.cells[3:]] == [("small", 4)]
    assert whole.earlier_rates == [stopped.rates] and whole.rates != stopped.rates
    assert len(whole.command.splitlines()) == 1  # the same one
    out = capsys.readouterr().out
    assert out.count("tiny: E=8") == out.count("small: E=16") == 1


def test_nothing_runs_where_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, made: list[tuple[str, int]], tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    bench(monkeypatch, *LAYER, *TWO, "--json", str(file))
    once = load(file)
    made.clear()
    monkeypatch.setattr(grid, "measure_rates", None)
    bench(monkeypatch, *LAYER, "--layer", "tiny", "--tokens", "4", "--json", str(file))
    assert not made
    assert load(file) == once


def test_a_grid_is_put_together_from_several_runs(
    monkeypatch: pytest.MonkeyPatch, made: list[tuple[str, int]], tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    peers = tmp_path / "peers.json"
    peers.write_text(json.dumps({"us": {"tiny": {"1": {"one": 1.0}}}}))
    bench(monkeypatch, *LAYER, "--layer", "small", "--tokens", "4", *FORMAT, "--json", str(file))
    words = ("--layer", "tiny", "--tokens", "4,1", "--against", "reference", "--peers", str(peers))
    bench(monkeypatch, *LAYER, *words, *FORMAT, "--json", str(file))
    bench(monkeypatch, *LAYER, "--layer", "small", "--tokens", "1", *FORMAT, "--json", str(file))
    found = load(file)
    assert list(found.layers) == ["small", "tiny"]
    assert [c.key[:2] for c in found.cells] == [
        ("small", 1), ("small", 4), ("tiny", 1), ("tiny", 1), ("tiny", 4), ("tiny", 4),
    ]  # fmt: skip
    assert [c.contender for c in found.cells[2:4]] == ["moe_ops", "reference"]
    assert found.peers == {"tiny": {1: {"one": 1.0}}}
    assert len(found.command.splitlines()) == 3 == len(found.earlier_rates) + 1
    written = report.section(found)
    assert "bfloat16, weights in mxfp4, torch" in written
    assert written.count("\n    python -m moe_ops.bench layer --ours moe") == 3


def test_cells_that_were_wrong_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    bench(monkeypatch, *LAYER, *TWO, "--json", str(file))
    once = load(file)
    wrong = [replace(c, us=None, wrong="it was") if c.layer == "tiny" else c for c in once.cells]
    write(file, dump(replace(once, cells=wrong)))
    with pytest.raises(SystemExit):  # one of another number of tokens still is
        bench(monkeypatch, *LAYER, "--layer", "tiny", "--tokens", "1", "--json", str(file))
    assert [bool(c.wrong) for c in load(file).cells] == [False, True, False, False]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"device": "Other"}, "of device Made-up Device, this run is of device Other"),
        ({"format": "mxfp4"}, r"of format \(none\), this run is of format mxfp4"),
        ({"dtype": "float16"}, "of dtype bfloat16, this run is of dtype float16"),
        ({"versions": {"torch": "3.0"}}, "of versions torch 2.11.0, this run .* torch 3.0"),
        ({"given": None}, r"of given copy 8 TB/s, .*, this run is of given \(none\)"),
        ({"backend": "aten"}, r"of backend \(none\), this run is of backend aten"),
        ({"seconds": 0.1}, r"of seconds \(none\), this run is of seconds 0.1"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    change: dict[str, object], why: str, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    held = results()
    write(path, dump(held))
    names = ("device", "format", "dtype", "versions", "given", "backend", "seconds")
    same = {name: getattr(held, name) for name in names}
    assert resume.before(path, same, [TINY, SMALL]) == held
    with pytest.raises(ValueError, match=f"results.json holds results {why}; choose another file"):
        resume.before(path, same | change, [TINY])


def test_a_package_of_one_run_alone_is_no_other_version(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(path, dump(results()))
    same = {"versions": {"torch": "2.11.0", "transformers": "5.17.0"}}
    assert resume.before(path, same, []) == results()


def test_other_files_and_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert resume.before(path, {}, []) is None
    path.write_text('{"command": "python -m moe_ops.bench loading"}')
    with pytest.raises(ValueError, match=r"no results to add to: .* choose another file"):
        resume.before(path, {}, [])
    path.write_text('{"schema": 1')
    with pytest.raises(ValueError, match="no results to add to"):
        resume.before(path, {}, [])
    write(path, dump(results()))
    with pytest.raises(ValueError, match=r"E=8.*this run is of .*E=9.*choose another file"):
        resume.before(path, {}, [replace(TINY, E=9)])


def test_another_format_in_the_file_stops_the_run_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, made: list[tuple[str, int]], tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    bench(monkeypatch, *LAYER, "--layer", "tiny", "--tokens", "1", "--json", str(file))
    before = file.read_text()
    made.clear()
    with pytest.raises(ValueError, match="this run is of format mxfp4; choose another file"):
        bench(monkeypatch, *LAYER, *TWO, *FORMAT, "--json", str(file))
    assert not made and file.read_text() == before


def test_files_of_one_run_have_no_earlier_rates() -> None:
    assert results().earlier_rates == []
    twice = resume.joined(results(), replace(results(), cells=[]), frozenset())
    assert twice == results()
    more = frozenset({("tiny", 2, "uniform", "moe_ops")})
    now = replace(results(), command="again", rates=Rates(copy_tbs=4.1, matmul_tflops=790.0))
    found = resume.joined(results(), now, more)
    assert found.command.splitlines() == [results().command, "again"]
    assert found.cells == results().cells
    assert "(before: copy 4 TB/s, matrix product 800 TFLOP/s)" in report.section(found)
