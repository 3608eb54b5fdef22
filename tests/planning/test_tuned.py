"""Tables of measured times: how they are read, written and turned into ranges of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from moe_ops.ops.experts import ExpertsCall
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.planning import tuned
from moe_ops.planning.cost import device_of
from moe_ops.planning.tuned import Cell, Times, TunedLayer
from moe_ops.testing import LAYERS, Case
from tests.passes.planned import Hook, plans, run_experts
from tests.passes.test_pick_backend import only_choice

HERE = device_of(torch.device("cpu")).name
LAYER = TunedLayer(device=HERE, op="experts", E=8, K=2, D=64, I=32, dtype="float32")


def test_a_write_that_fails_leaves_the_table_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    cell = Cell(tokens=1, routing="zipf", backend="cpu")
    tuned.write(path, {LAYER: {cell: 1.0}})

    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tuned.os, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        tuned.write(path, {LAYER: {cell: 2.0}})
    assert tuned.read(path) == {LAYER: {cell: 1.0}}


def test_a_backend_takes_over_halfway_and_by_a_margin() -> None:
    rows = {1: (1.0, 5.0), 8: (3.0, 2.95), 32: (9.0, 4.0), 64: (9.0, 9.1), 128: (9.0, 20.0)}
    cells = {
        Cell(tokens=t, routing="uniform", backend=b): us
        for t, both in rows.items()
        for b, us in zip(("a", "b"), both, strict=True)
    }
    assert Times.of(cells, {"a": None, "b": None}).ranges() == ((20, "a"), (96, "b"), (None, "a"))
    assert Times.of(cells, {"a": None}).ranges() == ((None, "a"),)
    assert Times.of(cells, {"a": None, "c": None}).ranges() == ()


def test_a_backend_is_chosen_as_far_as_it_can_run() -> None:
    times = {4: {"few": 1.0, "any": 2.0}, 8: {"few": 2.0, "any": 3.0}, 32: {"any": 4.0}}
    cells = {
        Cell(tokens=t, routing="zipf", backend=b): us
        for t, at in times.items()
        for b, us in at.items()
    }
    able = {"few": 8, "any": None}
    assert {t: set(at) for t, at in Times.of(cells, able).by_tokens.items()} == {
        4: {"few", "any"}, 8: {"few", "any"}, 32: {"any"},
    }  # fmt: skip
    assert Times.of(cells, able).ranges() == ((8, "few"), (None, "any"))
    # The last count that was measured is one that it can run.
    few = {cell: us for cell, us in cells.items() if cell.tokens < 32}
    assert Times.of(few, able).ranges() == ((8, "few"), (None, "any"))
    assert Times.of(few, {"few": 8}).ranges() == ()
    # A time is missing of a backend that could run 32.
    assert Times.of(cells, {"few": 32, "any": None}).by_tokens.keys() == {4, 8}


@pytest.mark.parametrize("by_rows", [True, False])
def test_transposed_weights_are_those_that_lie_by_columns(by_rows: bool) -> None:
    """The rest of a transposed layer's key is that of one that is not."""

    def call(w13: Tensor, transposed: bool) -> ExpertsCall:
        x, ids = torch.zeros(4, 64), torch.zeros(4, 2, dtype=torch.int32)
        return ExpertsCall(x, torch.zeros(4, 2), ids, w13, w13, transposed=transposed)

    w13 = torch.zeros(8, 64, 64)
    lying = w13 if not by_rows else w13.transpose(1, 2).contiguous().transpose(1, 2)
    plain = tuned.layer_of_call(HERE, "experts", call(w13, False))
    got = tuned.layer_of_call(HERE, "experts", call(lying, True))
    assert plain == LAYER
    assert got == replace(LAYER, transposed=not by_rows)


def test_a_format_has_one_name_in_tables() -> None:
    x, ids = torch.zeros(4, 64), torch.zeros(4, 2, dtype=torch.int32)
    w13, w2 = torch.zeros(8, 64, 32).byte(), torch.zeros(8, 64, 16).byte()

    def key(w_format: str, x_format: str) -> tuned.TunedLayer | None:
        formats = {"w_format": w_format, "x_format": x_format}
        return tuned.layer_of_call(
            HERE, "experts", ExpertsCall(x, torch.zeros(4, 2), ids, w13, w2, **formats)
        )

    got = key("float4_e2m1:1x32:e8m0", "float8_e4m3fn:1x32:e8m0")
    assert got is not None
    assert (got.w_format, got.x_format) == ("mxfp4", "mxfp8")
    assert got == key("mxfp4", "mxfp8") != key("float4_e2m1:1x32", "mxfp8")


def test_a_table_with_other_names_of_a_format_is_read_as_that_format(tmp_path: Path) -> None:
    path, one = tmp_path / "t.json", Cell(tokens=1, routing="zipf", backend="cpu")
    names = ("float4_e2m1:1x32:e8m0", "mxfp4")
    cells = [replace(one, tokens=n) for n in (1, 2)]
    table = {replace(LAYER, w_format=n): {c: 1.0} for n, c in zip(names, cells, strict=True)}
    tuned.write(path, table)
    assert tuned.read(path) == {replace(LAYER, w_format="mxfp4"): dict.fromkeys(cells, 1.0)}


def test_tables_of_another_version_or_with_unknown_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned.write(path, {LAYER: {Cell(tokens=1, routing="zipf", backend="cpu"): 1.0}})
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"version": 7}))
    with pytest.raises(ValueError, match="has version 7, this is moe_ops with tables of version 1"):
        tuned.read(path)
    values["layers"][0]["colour"] = "red"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"t\.json: a layer has no colour"):
        tuned.read(path)


def test_the_users_table_wins_over_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, users = tmp_path / "tuned", tmp_path / "mine.json"
    shipped.mkdir()
    monkeypatch.setattr(tuned, "SHIPPED", shipped)
    one, two = (Cell(tokens=t, routing="zipf", backend="cpu") for t in (1, 2))
    tuned.write(shipped / "b.json", {LAYER: {one: 1.0, two: 2.0}})
    assert tuned.load(None) == {LAYER: {one: 1.0, two: 2.0}}
    tuned.write(users, {LAYER: {two: 5.0}})
    assert tuned.load(str(users)) == {LAYER: {one: 1.0, two: 5.0}}
    assert tuned.tables(str(users)) == [shipped / "b.json", users]


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
def test_the_shipped_table_serves_the_published_layers(case: Case) -> None:
    sizes = {"E": case.E, "K": case.K, "D": case.D, "I": case.I}
    layer = TunedLayer(device="NVIDIA H200", op="experts", dtype="bfloat16", **sizes)
    cells = tuned.load(None)[layer]
    most = {"triton.tiny": min(16, 64 // case.K), "triton.rows": None, "triton.grouped": None}
    found = Times.of(cells, most).ranges()
    names = [name for _, name in found]
    assert names[0] == "triton.tiny" and names[-1] == "triton.grouped"
    assert names == [name for name in most if name in names]  # none comes back


# In a choice


def tuned_table(path: Path, cells: dict[tuple[int, str, str], float], **changes: Any) -> str:
    key = {
        "device": device_of(torch.device("cpu")).name, "op": "experts",
        "E": 8, "K": 2, "D": 64, "I": 32, "dtype": "float32",
    }  # fmt: skip
    layer = TunedLayer(**{**key, **changes})
    times = {Cell(tokens=t, routing=r, backend=b): us for (t, r, b), us in cells.items()}
    tuned.write(path, {layer: times})
    return str(path)


TIMES = {
    (4, "uniform", "cpu"): 10.0, (4, "uniform", "aten"): 20.0,
    (4, "zipf", "cpu"): 10.0, (4, "zipf", "aten"): 20.0,
    (16, "uniform", "cpu"): 40.0, (16, "uniform", "aten"): 39.5,
    (64, "uniform", "cpu"): 90.0, (64, "uniform", "aten"): 60.0,
    (64, "zipf", "cpu"): 90.0, (64, "zipf", "aten"): 70.0,
}  # fmt: skip


def test_measured_times_decide(tmp_path: Path) -> None:
    hook = Hook(pick_backend, tuned=tuned_table(tmp_path / "t.json", TIMES))
    _, graph = run_experts(hook, dynamic=True)
    assert plans(graph) == ["experts 40:cpu,:aten"], "two per cent at 16 tokens change nothing"
    first, last = only_choice(hook).ranges
    assert (first.source, first.at, first.measured_us) == ("tuned", 16, 40.0)
    assert (last.source, last.at) == ("tuned", 64)
    assert last.measured_us == pytest.approx(4200**0.5)
    assert last.predicted_us is not None


def test_thresholds_win_over_measurements(tmp_path: Path) -> None:
    path = tuned_table(tmp_path / "t.json", TIMES)
    hook = Hook(pick_backend, tuned=path, thresholds=((None, "aten"),))
    run_experts(hook)
    assert only_choice(hook).text == "aten"
    assert only_choice(hook).ranges[0].source == "forced"


@pytest.mark.parametrize(
    "changes",
    [{"device": "another"}, {"E": 9}, {"dtype": "bfloat16"}, {"w_format": "mxfp4"}],
    ids=lambda changes: next(iter(changes)),
)
def test_measurements_of_another_layer_do_not_count(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    hook = Hook(pick_backend, tuned=tuned_table(tmp_path / "t.json", TIMES, **changes))
    run_experts(hook, dynamic=True)
    assert [r.source for r in only_choice(hook).ranges] == ["limit", "limit"]


def test_half_measured_counts_do_not_count(tmp_path: Path) -> None:
    partly = {k: v for k, v in TIMES.items() if k != (64, "zipf", "aten")}
    hook = Hook(pick_backend, tuned=tuned_table(tmp_path / "t.json", partly))
    _, graph = run_experts(hook, dynamic=True)
    assert plans(graph) == ["experts :cpu"]


def test_a_table_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    hook = Hook(pick_backend, tuned=str(tmp_path / "t.json"))
    with pytest.raises(
        BackendCompilerFailed, match=r"there is no tuned table .*t\.json; moe_ops\.tune writes"
    ):
        run_experts(hook)
