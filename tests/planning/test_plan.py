"""The plan as text and JSON, and the cost model behind its predictions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from moe_ops.conformance.memory import tensors
from moe_ops.conformance.samples import mutated
from moe_ops.planning import cost
from moe_ops.planning.cost import Device, device_of, distinct
from moe_ops.planning.layers import Shape, fake_arguments_of
from moe_ops.planning.plan import Choice, Plan, Range, written
from moe_ops.registry.ranges import parse_plan
from moe_ops.registry.spec import OPS
from tests.calls import CALLS

CHOICE = Choice(
    node="experts",
    op="experts",
    layer="model.layers.0.mlp.experts",
    rows=(2, None),
    shapes={"D": 64, "K": 2, "E": 8},
    dtype="bfloat16",
    format="mxfp4",
    candidates=("cpu", "aten", "reference"),
    refusals={"triton": "needs a tensor on cuda, got cpu"},
    ranges=(
        Range(upto=40, backend="cpu", source="tuned", at=32, predicted_us=10.5, measured_us=20.0),
        Range(upto=None, backend="aten", source="tuned"),
    ),
)
PLAN = Plan(
    device="a CPU, 2 threads",
    choices=(
        CHOICE,
        replace(CHOICE, node="experts_1", layer="model.layers.1.mlp.experts", emulated=("aten",)),
        replace(
            CHOICE,
            node="combine",
            op="combine",
            rows=(16, 16),
            format="",
            ranges=(Range(upto=None, backend="reference", source="only candidate"),),
        ),
    ),
)


def test_a_plan_goes_through_json() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


def test_the_text_of_a_plan_is_a_short_table() -> None:
    assert_expected_inline(
        str(PLAN),
        """\
a CPU, 2 threads
op       rows  sizes                        plan          why             nodes
experts  2-    D=64 K=2 E=8 bfloat16 mxfp4  40:cpu,:aten  tuned           2
combine  16    D=64 K=2 E=8 bfloat16        reference     only candidate  1""",
    )


def test_json_of_another_version_is_refused() -> None:
    values = json.loads(PLAN.to_json()) | {"version": 0}
    with pytest.raises(ValueError, match=r"version 0, this is moe_ops with plans of version 1; ma"):
        Plan.from_json(json.dumps(values))


@pytest.mark.parametrize("where", ["Plan", "Choice", "Range"])
def test_unknown_keys_are_refused(where: str) -> None:
    values = json.loads(PLAN.to_json())
    choice = values["choices"][0]
    {"Plan": values, "Choice": choice, "Range": choice["ranges"][0]}[where]["colour"] = "red"
    with pytest.raises(ValueError, match=f"a plan's {where} has no colour"):
        Plan.from_json(json.dumps(values))


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match=r"source 'guess' is unknown; choose one of forced, tuned"):
        Range(upto=None, backend="cpu", source="guess")  # type: ignore[arg-type]


def test_what_is_written_can_be_read() -> None:
    for ranges in (((None, "cpu"),), ((8, "a"), (64, "b"), (None, "c"))):
        assert parse_plan(written(ranges)) == ranges


def test_expected_number_of_distinct_experts() -> None:
    assert distinct(8, 2, 0) == 0
    assert distinct(8, 2, 1) == pytest.approx(2)
    assert distinct(8, 8, 1) == distinct(8, 9, 3) == 8
    draws = torch.rand(4000, 5, 16).topk(3).indices.flatten(1)  # 5 tokens with 3 of 16
    seen = sum(len(set(row)) for row in draws.tolist()) / len(draws)
    assert distinct(16, 3, 5) == pytest.approx(seen, rel=0.02)


H200 = cost.DEVICES["NVIDIA H200"]
# From the table of measured floors, in µs: mixtral-8x7b, qwen3-30b and qwen3-next in bfloat16.
FLOORS = [
    (Shape(E=8, K=2, D=4096, I=14336), 1, 165.5),
    (Shape(E=8, K=2, D=4096, I=14336), 4, 424.2),
    (Shape(E=8, K=2, D=4096, I=14336), 4096, 3706.6),
    (Shape(E=128, K=8, D=2048, I=768), 64, 280.9),
    (Shape(E=512, K=10, D=2048, I=512), 16, 201.8),
]


@pytest.mark.parametrize(("shape", "tokens", "want"), FLOORS)
def test_the_prediction_for_experts_is_the_floor(shape: Shape, tokens: int, want: float) -> None:
    found = cost.cost("experts", fake_arguments_of(shape), tokens)
    assert found is not None
    # Their routing was drawn once; ours is what is expected.
    assert H200.microseconds(found) - H200.launch_us == pytest.approx(want, rel=0.15)


def test_formats_shrink_what_is_read_and_choose_the_rate() -> None:
    def of(**formats: str) -> cost.Cost:
        shape = Shape(E=4, K=2, D=256, I=128, **formats)
        found = cost.cost("experts", fake_arguments_of(shape), 10_000)
        assert found is not None
        return found

    plain = of()
    fp8 = of(w_format="float8_e4m3fn:128x128", x_format="float8_e4m3fn:1x128")
    fp4 = of(w_format="mxfp4")
    assert plain.flops == fp8.flops == fp4.flops == 2 * 10_000 * 2 * 256 * 3 * 128
    assert [c.dtype for c in (plain, fp8, fp4)] == ["bfloat16", "float8_e4m3fn", "bfloat16"]
    weights = 4 * 3 * 256 * 128
    assert plain.bytes - fp4.bytes == pytest.approx(weights * (2 - 0.5 - 1 / 32))
    assert H200.microseconds(fp8) < H200.microseconds(plain)


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_a_cost(name: str) -> None:
    op, args = OPS[name], CALLS[name]
    a = op.call(*args)
    one, two = (cost.cost(name, a, rows) for rows in (1000, 2000))
    assert one is not None
    assert two is not None
    assert one.bytes < two.bytes <= 2 * one.bytes
    assert two.flops == 2 * one.flops
    outputs = sum(t.nbytes for t in [*tensors(op(*args)), *mutated(op, args)])
    exact = cost.cost(name, a, args[0].shape[0])
    assert exact is not None
    assert exact.bytes >= 0.9 * outputs


def test_devices_may_be_described_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    guess = device_of(torch.device("cpu"))
    assert f"{torch.get_num_threads()} threads" in guess.name
    assert guess.bytes_per_second == cost.CPU_BYTES * torch.get_num_threads()
    mine = Device(
        name=guess.name, bytes_per_second=1e9, flops_per_second={"float32": 1e9}, launch_us=7
    )
    monkeypatch.setitem(cost.DEVICES, guess.name, mine)
    assert device_of(torch.device("cpu")) is mine
    assert mine.microseconds(cost.Cost(bytes=1e6)) == pytest.approx(1007)
    assert mine.microseconds(cost.Cost(bytes=0, flops=2e6, dtype="bfloat16")) == pytest.approx(2007)
