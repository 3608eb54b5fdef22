"""The overload of an op that runs a plan: which backend, from which text, at what cost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ops import OPS, Op, experts, using
from moe_ops.registry.ranges import parse_plan
from tests.calls import CALLS
from tests.registry.test_spec import DOUBLE, PLUS_TWO, X, each_op, made, other
from tests.work import Calls

__all__ = ["made"]  # the fixture


def test_a_plan_in_writing_names_backends_by_their_most_rows() -> None:
    assert parse_plan("cpu") == ((None, "cpu"),)
    assert parse_plan("8:a,64:b.c,:reference") == ((8, "a"), (64, "b.c"), (None, "reference"))
    for text in ("8:cpu", "cpu,:aten", "x:cpu,:aten", ":cpu,8:aten", "8:cpu,16:aten"):
        with pytest.raises(ValueError, match="is neither a backend nor ranges such as"):
            parse_plan(text)


def test_planned_runs_the_backend_of_its_range_and_asks_nothing(made: Op) -> None:
    made.backend("fast", supports=lambda *args: pytest.fail("asked"))(other)
    for plan, want in (
        ("fast", PLUS_TWO),
        ("reference", DOUBLE),
        ("1:reference,:fast", PLUS_TWO),
        ("1:fast,2:reference,:fast", DOUBLE),
    ):
        with using("reference"):
            assert made.planned(X, plan=plan).tolist() == want
    assert made.planned(X, 3.0, plan="reference").tolist() == [3.0, 9.0]
    assert made.planned(x=X, times=3.0, plan="reference").tolist() == [3.0, 9.0]
    with pytest.raises(
        ValueError, match=r"plan 'slow' names slow, but the backends of moe_ops\.scratch are ref"
    ):
        made.planned(X, plan="slow")


def test_a_backend_may_run_calls_of_a_plan_in_another_way(made: Op) -> None:
    made.backend("fast")(other)
    made.path("fast", "fast/one", other, refusal=lambda call: None, most=lambda call: None)
    plans: list[str] = []

    def in_plan(plan: str) -> Callable[[Any], Any]:
        plans.append(plan)
        return made.body

    made.in_plan("fast", in_plan)
    for plan, want in (("fast", DOUBLE), ("1:fast,:reference", DOUBLE), ("fast/one", PLUS_TWO)):
        for _ in range(2):
            assert made.planned(X, plan=plan).tolist() == want
    with using("fast"):
        assert made(X).tolist() == PLUS_TWO
    assert plans == ["fast", "1:fast,:reference"]
    made.in_plan("fast/one", in_plan)
    assert made.planned(X, plan="1:reference,:fast/one").tolist() == DOUBLE


def test_ops_in_whose_backends_the_host_waits_have_an_overload_for_no_cuda_graph() -> None:
    found = {name: op.waiting for name, op in OPS.items() if op.waiting is not None}
    assert {*found} == {"dispatch_tokens", "combine_tokens", "experts_over_ranks"}
    for name, waiting in found.items():
        planned = OPS[name].planned
        assert {*waiting.tags} == {*planned.tags, torch.Tag.cudagraph_unsafe}
        assert str(waiting._schema) == str(planned._schema).replace("planned", "planned_waiting")
        OPS[name].waits("exchange", OPS[name].backends["exchange"].waits)  # once more
        assert OPS[name].waiting is waiting


def test_the_schema_of_planned_is_that_of_the_op_and_a_plan() -> None:
    for op in OPS.values():
        head, _, tail = op.schema.partition(") -> ")
        want = f"moe_ops::{op.name}.planned{head}, *, str plan) -> {tail}"
        assert op.planned._schema == torch._C.parse_schema(want)


@each_op
def test_planned_has_the_results_the_fake_and_the_tags_of_its_op(name: str) -> None:
    op, args = OPS[name], CALLS[name]
    want = op(*args)
    backend = op.pick(op.call(*args)).name
    torch.testing.assert_close(op.planned(*args, plan=backend), want, rtol=0, atol=0)
    assert op.planned.tags == op.overload.tags
    report = torch.library.opcheck(
        op.planned, args, {"plan": backend}, test_utils=("test_schema", "test_faketensor")
    )
    assert set(report.values()) == {"SUCCESS"}


def calls_of(call: Callable[[], Any]) -> int:
    for _ in range(3):  # what is decided once is decided
        call()
    with Calls() as calls:
        call()
    return calls.count


def test_planned_does_less_than_the_checked_op() -> None:
    args = CALLS["experts"]
    with torch.inference_mode():
        planned = calls_of(lambda: experts.planned(*args, plan="16:cpu,:reference"))
        checked = calls_of(lambda: experts.overload(*args))
    assert 1.3 * planned < checked
