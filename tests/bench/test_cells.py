"""`bench layer --ours moe` and `bench op`, on the CPU: what is wrong is said, and not timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops.bench import cells, contenders, inputs, numerics, rates, stages, tables, timing
from moe_ops.bench.results import load
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.route import RouteCall
from moe_ops.registry.backend import Backend
from moe_ops.registry.spec import Op
from moe_ops.testing import BF16, F32, make_layer
from tests.bench.runs import LAYER, SMALL, TINY, bench, quicken, results

CPU = torch.device("cpu")
RATES = rates.Rates(copy_tbs=0.03, matmul_tflops=0.1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Register a backend of an op for one test."""

    def add(op: Op, name: str, run: Callable[..., object]) -> None:
        new = Backend(name=name, run=run, priority=100)
        monkeypatch.setattr(op, "_backends", {**op.backends, name: new})
        monkeypatch.setattr(op, "_order", {})

    return add


STAGES = ("op", "--device", "cpu", "--layer", "tiny")


@pytest.mark.slow
def test_layers_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    grid = ("--layer", "tiny,small", "--tokens", "1,20", "--routing", "uniform,zipf")
    bench(monkeypatch, *LAYER, *grid, "--against", "aten", "--rates", "1,2", "--json", str(file))
    found = load(file)
    wanted = [
        (layer, tokens, routing, name)
        for layer in ("tiny", "small")
        for tokens in (1, 20)
        for routing in ("uniform", "zipf")
        for name in ("moe_ops", "aten")
    ]
    assert [(c.layer, c.tokens, c.routing, c.contender) for c in found.cells] == wanted
    for c in found.cells:
        assert c.us and c.low_us and c.high_us and c.low_us <= c.us <= c.high_us
        assert c.error is not None and 0 < c.error < 0.01
        assert c.given_floor_us == pytest.approx(rates.Rates.parse("1,2").floor_us(
            rates.Work(bytes=c.bytes, flops=c.flops)))  # fmt: skip
        forced = c.contender == "aten"
        assert c.ran["route"] == ("reference" if forced else "cpu")
        assert c.ran["experts"] == "aten" or not forced
    out = capsys.readouterr().out
    assert "x vs aten" in out and "% of given" in out
    assert "floor / time, geometric mean of 2 cells, zipf, 1 to 4 tokens" in out
    assert json.loads(file.read_text())["bands"]


def test_a_wrong_backend_is_not_timed_and_fails_the_run(
    register: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    def broken(call: ExpertsCall) -> torch.Tensor:
        return moe_ops.experts.body(replace(call, weights_TK=call.weights_TK * 1.05))

    register(moe_ops.experts, "broken", broken)
    file = tmp_path / "results.json"
    words = ("--layer", "tiny", "--tokens", "4", "--against", "aten", "--json", str(file))
    with pytest.raises(SystemExit) as stopped:
        bench(monkeypatch, *LAYER, *words)
    assert stopped.value.code == 1
    mine, aten = load(file).cells
    assert mine.us is None and "relative error 0.0" in mine.wrong
    assert mine.ran["experts"] == "broken"
    assert aten.us is not None and not aten.wrong
    out = capsys.readouterr().out
    assert "WRONG, not timed: moe_ops on tiny, 4 tokens uniform: AssertionError: set 0" in out


def test_a_result_that_nobody_wrote_is_wrong(register: Callable[..., None]) -> None:
    def lazy(call: ExpertsCall) -> torch.Tensor:
        return torch.empty_like(call.x_TD)

    register(moe_ops.experts, "lazy", lazy)
    (cell,) = cells.measure(grid_of(contenders.ours(TINY, "cpu")), RATES)
    assert "128 of 128 are NaN" in cell.wrong
    assert cell.us is None


def grid_of(*of: contenders.Contender) -> cells.Grid:
    return cells.Grid(
        layers=[TINY],
        tokens=[2],
        routings=["uniform"],
        contenders=lambda case: of,
        dtype=BF16,
        device=CPU,
    )


def test_what_raises_is_wrong_and_the_others_are_measured() -> None:
    def fail(weights: inputs.Weights, routed: inputs.Routed) -> torch.Tensor:
        raise KeyError("no tile for this size")

    failing = contenders.Contender(name="failing", call=fail)
    ours, other = cells.measure(grid_of(failing, contenders.ours(TINY, "cpu")), RATES)
    assert ours.wrong == "KeyError: 'no tile for this size'"
    assert other.us is not None


def test_who_does_not_take_a_layer_fails_no_run() -> None:
    def refuse(weights: inputs.Weights, routed: inputs.Routed) -> torch.Tensor:
        raise contenders.Refused("widths must be multiples of 128")

    refusing = contenders.Contender(name="refusing", call=refuse)
    ours, other = cells.measure(grid_of(contenders.ours(TINY, "cpu"), refusing), RATES)
    assert ours.us and not other.us and not other.wrong
    assert other.refused == "widths must be multiples of 128"
    with pytest.raises(ValueError, match="refusing was not timed at 2 tokens: widths must be"):
        _ = other.timed_us
    found = replace(results(), cells=[ours, other], layers={"tiny": TINY}, given=None, peers={})
    said = "refusing does not take tiny: widths must be multiples of 128"
    assert tables.summary(found).endswith(said)
    head, row = tables.layer_table(found, "tiny").splitlines()[1:3]
    assert "x vs refusing" in head and row.split()[-1] == "-"


def test_the_check_tells_right_from_wrong() -> None:
    want = torch.randn(4, 8)
    assert numerics.check(want.bfloat16(), want, BF16, "it") < 0.005
    for wrong, why in (
        (want.bfloat16() * 1.25, r"relative error 0\.2"),
        (torch.full((4, 8), torch.nan, dtype=BF16), "32 of 32 are NaN"),
        (want[:2].bfloat16(), r"\(2, 8\), wanted torch.bfloat16 \(4, 8\)"),
        (want, "torch.float32"),
    ):
        with pytest.raises(AssertionError, match=why):
            numerics.check(wrong, want, BF16, "it")


def test_one_token_of_many_is_wrong() -> None:
    """Which is 1 % of the whole for 10000 tokens."""
    want = torch.randn(16384, 8)
    wrong = want.bfloat16()
    wrong[700] = 0
    assert numerics.relative_error(wrong, want) < numerics.LIMITS[BF16]
    with pytest.raises(AssertionError, match=r"of row 700, at most 0\.05"):
        numerics.check(wrong, want, BF16, "it")


def test_a_small_row_is_not_held_to_its_own_size() -> None:
    want = torch.randn(64, 8)
    want[3] *= 1e-3
    got = want.bfloat16()
    got[3] += 1e-3
    numerics.check(got, want, BF16, "it")


def test_the_float32_layer_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = inputs.make_weights(SMALL, F32, generator)
    routed = inputs.make_routed(SMALL, 30, "zipf", F32, generator)
    x, logits = routed.x_TD, routed.logits_TE
    with moe_ops.using("reference"):
        want = moe_ops.moe(x, logits, weights.w13_EFD, weights.w2_EDI, SMALL.K, renormalize=True)
    assert numerics.relative_error(numerics.want(weights, routed), want) < 1e-6
    x_RD, _, ends_E = moe_ops.dispatch(x, routed.ids_TK, SMALL.E)
    want = moe_ops.expert_gemm.reference(x_RD, weights.w13_EFD, ends_E)
    got = numerics.want_products(x_RD, weights.w13_EFD, ends_E)
    assert numerics.relative_error(got, want) < 1e-6


def test_the_backends_that_ran_are_those_that_the_ops_picked() -> None:
    layer = make_layer(TINY, BF16)
    args = (layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI, 2)
    picked = contenders.backends_of(lambda: moe_ops.moe(*args))
    assert picked == {"moe": "reference", "route": "cpu", "experts": "cpu"}
    assert contenders.label(picked) == "route:cpu experts:cpu"
    with moe_ops.using("reference"):
        stages = contenders.backends_of(lambda: moe_ops.moe(*args))
    elsewhere = {"quantize", "expert_loads", "route_recording", "route_replaying"}
    elsewhere |= {"expert_wgrad", "expert_wgrad_onto", "activate_backward"}
    elsewhere |= {"experts_saving", "experts_backward", "experts_accumulating"}
    elsewhere |= {
        "experts_batched",
        "dispatch_tokens",
        "combine_tokens",
        "experts_over_ranks",
        "sum_ranks",
    }
    elsewhere |= {name for name in moe_ops.OPS if name.startswith("experts_adapted")}
    assert set(stages) == set(moe_ops.OPS) - elsewhere
    assert contenders.label(stages) == "reference"
    assert contenders.label({"moe": "triton", "route": "cpu"}) == "triton"
    assert contenders.label({}) == ""


def test_a_forced_backend_leaves_nothing_to_others() -> None:
    ours = contenders.ours(TINY, "cpu", backend="aten")
    generator = torch.Generator().manual_seed(0)
    weights = inputs.make_weights(TINY, BF16, generator)
    routed = inputs.make_routed(TINY, 2, "uniform", BF16, generator)
    with ours.around():
        ran = contenders.backends_of(lambda: ours.call(weights, routed))
    assert ran == {"moe": "reference", "route": "reference", "experts": "aten"}
    with pytest.raises(ValueError, match=r"no op has a backend 'none' on cpu; there are aten, cpu"):
        contenders.ours(TINY, "cpu", backend="none")


@pytest.mark.slow
def test_transformers_experts_are_compiled_once_for_all_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    grid = grid_of(contenders.stock(TINY, "grouped_mm"))
    (cell,) = cells.measure(grid, RATES)
    assert cell.copies == inputs.MOST_COPIES
    assert cell.us is not None and cell.ran == {}
    assert cell.first_s is not None and cell.first_s > cell.us * 1e-6  # compiling takes longer
    assert counters["stats"]["unique_graphs"] == 1


def test_stages_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "op.json"
    bench(monkeypatch, *STAGES, "--tokens", "1,9", "--json", str(file))
    found = json.loads(file.read_text())["cells"]
    assert all(c["us"] > 0 and c["floor_us"] > 0 for c in found)
    ran = {(c["stage"], c["backend"]) for c in found}
    assert {("expert_gemm 13", "cpu"), ("expert_gemm 2", "aten"), ("route", "cpu")} <= ran
    assert {stage for stage, _ in ran} == {
        "route", "dispatch", "expert_gemm 13", "activate", "expert_gemm 2", "combine",
        *(f"quantize {format}" for format in stages.INPUTS),
    }  # fmt: skip
    bytes_of = {c["stage"]: c["bytes"] for c in found if c["tokens"] == 9}
    assert bytes_of["quantize int8:row"] == 9 * TINY.D * 3  # two bytes in, one out
    assert ("expert_gemm 2", "reference") not in ran  # it gathers a weight for every row
    bench(monkeypatch, *STAGES, "--tokens", "1", "--backend", "reference")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["expert_gemm", "2", "reference"] for line in lines)


def test_a_stage_that_is_wrong_is_not_timed(
    register: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(call: RouteCall) -> object:
        weights_TK, ids_TK = moe_ops.route.body(call)
        return weights_TK, ids_TK + 1

    register(moe_ops.route, "broken", broken)
    with pytest.raises(SystemExit):
        bench(monkeypatch, *STAGES, "--tokens", "4")
    out = capsys.readouterr().out
    assert "WRONG, not timed: route on broken, tiny, 4 tokens: AssertionError: result 1" in out


def test_equal_logits_may_change_places() -> None:
    weights = torch.tensor([[0.6, 0.2, 0.2]])
    one = stages.results_of(moe_ops.route, (weights, torch.tensor([[3, 1, 2]])))
    other = stages.results_of(moe_ops.route, (weights, torch.tensor([[3, 2, 1]])))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_graphs_go_round_until_they_are_long_enough() -> None:
    assert timing.rounds_for(8, 25.0) == 10
    assert timing.rounds_for(8, 0.5) == 16
    assert timing.rounds_for(2, 17000.0) == 1
