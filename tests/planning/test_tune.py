"""`tune` and its tables: what is measured, what is kept, and when it refuses."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.ops import experts
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.planning import tune as tuning
from moe_ops.planning import tuned
from moe_ops.planning.cost import device_of
from moe_ops.planning.layers import ROUTINGS, Shape, arguments_of, calls_of, routed
from moe_ops.planning.tune import tune
from moe_ops.planning.tuned import Cell, TunedLayer
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import BF16, CASES, make_layer
from tests.passes.planned import Hook, run_experts
from tests.terminals import Terminal

SHAPE = Shape(E=8, K=2, D=64, I=32)
HERE = device_of(torch.device("cpu")).name
LAYER = TunedLayer(device=HERE, op="experts", E=8, K=2, D=64, I=32, dtype="bfloat16")


class Model(nn.Module):
    """Three layers, two of them alike."""

    def __init__(self) -> None:
        super().__init__()
        cases = (CASES[0], CASES[0], CASES[2])
        self.layers = [make_layer(case, BF16, seed=i) for i, case in enumerate(cases)]

    def forward(self, scale: float) -> list[Tensor]:
        return [
            experts(x.x_TD * scale, x.weights_TK, x.ids_TK, x.w13_EFD, x.w2_EDI)
            for x in self.layers
        ]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """What is measured; the times are made up, `aten` faster from 16 tokens on."""
    cells: list[Cell] = []

    def measure(calls: Any, cell: Cell) -> float:
        cells.append(cell)
        return {"cpu": 10.0 * cell.tokens, "aten": 120.0 + cell.tokens}[cell.backend]

    monkeypatch.setattr(tuning, "measure", measure)
    return cells


def test_every_backend_is_measured_for_every_count_and_routing(
    counted: list[Cell], tmp_path: Path
) -> None:
    path = tune(SHAPE, tmp_path / "t.json", tokens=(4, 1, 4), progress=None)
    assert [(c.tokens, c.routing, c.backend) for c in counted] == [
        (t, r, b) for t in (1, 4) for r in ("uniform", "zipf") for b in ("cpu", "aten")
    ]
    assert tuned.read(path) == {
        LAYER: {c: 10.0 * c.tokens if c.backend == "cpu" else 120.0 + c.tokens for c in counted}
    }


def test_a_run_goes_on_where_it_was_interrupted(
    counted: list[Cell], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measure = tmp_path / "t.json", tuning.measure

    def interrupted(calls: Any, cell: Cell) -> float:
        if len(counted) == 5:
            raise KeyboardInterrupt
        return measure(calls, cell)

    with monkeypatch.context() as patch:
        patch.setattr(tuning, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tune(SHAPE, path, tokens=(1, 4), progress=None)
    assert len(tuned.read(path)[LAYER]) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
    tune(SHAPE, path, tokens=(1, 4), progress=None)
    assert len(counted) == len(set(counted)) == 8
    tune(SHAPE, path, tokens=(1, 4), progress=None)
    assert len(counted) == 8
    other = Shape(E=4, K=2, D=64, I=32)
    tune([SHAPE, other], path, tokens=(1,), progress=None)
    assert len(counted) == 12
    assert len(tuned.read(path)) == 2


def test_the_layers_of_a_model_are_found_by_running_it(counted: list[Cell], tmp_path: Path) -> None:
    path = tune(Model(), tmp_path / "t.json", inputs=(2.0,), tokens=(1,), progress=None)
    layers = {(x.E, x.K, x.D, x.I) for x in tuned.read(path)}
    assert layers == {(8, 2, 64, 32), (5, 3, 72, 40)}
    assert len(counted) == 8, "layers that are alike are measured once"
    assert len(calls_of(Model(), {"scale": 1.0})) == 3


def test_a_model_without_experts_or_inputs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Linear does not call moe_ops\.experts: give a model th"):
        tune(nn.Linear(2, 2), tmp_path / "t.json", inputs=(torch.ones(1, 2),), progress=None)
    with pytest.raises(ValueError, match=r"Model has no dummy_inputs; give inputs=\(\.\.\.\)"):
        tune(Model(), tmp_path / "t.json", progress=None)


def test_unknown_routings_and_formats_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="routing='even' is unknown; choose one of uniform, zipf"):
        tune(SHAPE, tmp_path / "t.json", routings=("even",))
    with pytest.raises(ValueError, match="format 'fp5' is not"):
        Shape(E=8, K=2, D=64, I=32, w_format="fp5")


def test_a_shape_is_quantized_as_a_layer_is() -> None:
    sizes = {"E": 8, "K": 2, "D": 64, "I": 32}
    want = Shape(**sizes, w_format="mxfp8", x_format="mxfp8")
    for quant in ("mxfp8", QuantConfig(weights="mxfp8", inputs="mxfp8")):
        assert Shape(**sizes, quant=quant) == want
    assert Shape(**sizes, quant="int4:1x16").w_format == "int4:1x16"
    with pytest.raises(ValueError, match=r"quant=mxfp8 .* differs from w_format='mxfp4' and x_"):
        Shape(**sizes, quant="mxfp8", w_format="mxfp4")


@pytest.mark.parametrize(
    ("layers", "options", "error", "message"),
    [
        (SHAPE, {"tokens": (0,)}, ValueError, "tokens must be numbers from 1 on, got 0"),
        (SHAPE, {"tokens": ()}, ValueError, "tokens is empty"),
        (SHAPE, {"tokens": 64}, TypeError, "tokens must be several ints, such as"),
        (SHAPE, {"tokens": (1.5,)}, TypeError, "each of tokens must be an int, got a float: 1.5"),
        (SHAPE, {"routings": "zipf"}, TypeError, "routings must be several of .*, got a str: 'zi"),
        (SHAPE, {"routings": ()}, ValueError, "routings is empty"),
        (None, {}, TypeError, r"layers must be a model, a Shape .* Shape\(E=8, .*, got None"),
        ([], {}, TypeError, "layers must be a model"),
        ([SHAPE, 3], {}, TypeError, "layers must be a model"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    layers: Any, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        tune(layers, tmp_path / "t.json", **options)
    assert not list(tmp_path.iterdir())


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(
    counted: list[Cell], tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match=r"table=.*t\.json': there is no folder .*none'"):
        tune(SHAPE, tmp_path / "none" / "t.json")
    with pytest.raises(IsADirectoryError, match="is a folder; give a file in it"):
        tune(SHAPE, tmp_path)
    with pytest.raises(TypeError, match="table must be a path, got an int: 3"):
        tune(SHAPE, 3)  # type: ignore[arg-type]
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ValueError, match=r"t\.json is not JSON"):
        tune(SHAPE, tmp_path / "t.json")
    assert counted == []


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"E": 0}, ValueError, "E=0 must be at least 1"),
        ({"K": 9}, ValueError, "K=9 must be from 1 to E=8"),
        ({"D": 64.0}, TypeError, "D must be an int, got a float: 64.0"),
        ({"device": None}, TypeError, "device must be a str, got None"),
    ],
)
def test_shapes_that_no_layer_has_are_refused(
    sizes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Shape(**{"E": 8, "K": 2, "D": 64, "I": 32, **sizes})


def test_progress_is_one_line_rewritten(counted: list[Cell], tmp_path: Path) -> None:
    out = Terminal()
    path = tune(SHAPE, tmp_path / "t.json", tokens=(1,), routings=("zipf",), progress=out)
    first, second, last = (line.rstrip() for line in out.getvalue().split("\r")[1::2])
    assert first == "tune E=8 K=2 D=64 I=32 bfloat16: 1 of 2, 1 tokens zipf on cpu: 0.010 ms"
    assert second.endswith("2 of 2, 1 tokens zipf on aten: 0.121 ms")
    assert not last
    end = f"{path}: 2 times of 1 layer\n"
    assert out.getvalue().endswith("\r" + end)
    log = io.StringIO()
    tune(SHAPE, tmp_path / "t.json", tokens=(1,), routings=("zipf",), progress=log)
    assert log.getvalue() == end


def test_tune_refuses_inside_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="which a CUDA graph cannot hold; call it before captur"):
        tune(SHAPE, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_was_tuned_decides(counted: list[Cell], tmp_path: Path) -> None:
    shape = Shape(E=8, K=2, D=64, I=32, dtype="float32")
    path = tune(shape, tmp_path / "t.json", tokens=(4, 8, 16, 32), progress=None)
    hook = Hook(pick_backend, tuned=str(path))
    run_experts(hook, dynamic=True)
    (choice,) = hook.context.choices
    assert choice.text == "12:cpu,:aten"
    assert {r.source for r in choice.ranges} == {"tuned"}
    assert [r.measured_us for r in choice.ranges] == [pytest.approx(80), pytest.approx(152)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("w_format", "usable"),
    [("", {"cpu": None, "aten": None}), ("mxfp4", {"cpu": None}), ("mxfp6_e3m2", {})],
)
def test_times_are_measured(w_format: str, usable: dict[str, None]) -> None:
    calls = [arguments_of(Shape(E=8, K=2, D=64, I=32, w_format=w_format))]
    backends = tuning.usable_backends(calls[0])
    assert backends == usable
    for backend in backends or ("reference",):
        for routing in ROUTINGS:
            us = tuning.measure(calls, Cell(tokens=3, routing=routing, backend=backend))
            assert 1 < us < 1e6


def test_the_facade_has_tune() -> None:
    assert moe_ops.tune is tune


# Routing


def popularity(routing: str) -> Tensor:
    call = arguments_of(Shape(E=16, K=2, D=4, I=4))
    x_TD, weights_TK, ids_TK = routed(call, 4000, routing, seed=1)
    assert x_TD.shape == (4000, 4)
    assert weights_TK.dtype == torch.float32
    assert ids_TK.dtype == torch.int32
    assert bool((ids_TK[:, 0] != ids_TK[:, 1]).all())
    return ids_TK.flatten().long().bincount(minlength=16).sort(descending=True).values


def test_uniform_routing_is_even() -> None:
    counts = popularity("uniform")
    assert counts.max() < 1.25 * counts.min()


def test_zipf_routing_follows_a_power_law() -> None:
    counts = popularity("zipf")
    assert counts[0] / counts[15] == pytest.approx(16, rel=0.5)  # a token's choices are different
    assert counts[4] / counts[9] == pytest.approx(2, rel=0.3)


def test_routing_covers_the_global_experts_of_a_map() -> None:
    call = replace(arguments_of(Shape(E=4, K=2, D=4, I=4)), expert_map=torch.full((32,), -1))
    assert int(routed(call, 200, "uniform", seed=0)[2].max()) > 20


@pytest.mark.gpu
def test_times_on_a_gpu_are_of_graph_replays() -> None:
    calls = [arguments_of(Shape(E=8, K=2, D=256, I=128, device="cuda")) for _ in range(2)]
    us = tuning.measure(calls, Cell(tokens=4, routing="zipf", backend="reference"))
    assert 1 < us < 1e5
