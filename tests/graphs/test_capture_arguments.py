"""What `capture` and `buckets_of` take, and what they refuse before anything is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn

import moe_ops
from moe_ops import capture
from moe_ops.planning.plan import Choice, Plan, Range


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_an_explanation_is_as_good_as_its_plan() -> None:
    ranges = tuple(Range(upto=n, backend="b", source="limit") for n in (6, None))
    choice = Choice(
        node="n", op="experts", layer="", rows=(0, None), shapes={}, dtype="bfloat16", format="",
        candidates=("b",), refusals={}, ranges=ranges,
    )  # fmt: skip
    plan = Plan(device="cpu", choices=(choice,))
    assert moe_ops.buckets_of(SimpleNamespace(plan=plan), 10) == (1, 2, 4, 6, 8, 10)
    assert moe_ops.buckets_of(plan, 10) == (1, 2, 4, 6, 8, 10)


def test_buckets_of_anything_else_are_refused() -> None:
    plan = Plan(device="cpu", choices=())
    for found in (None, "plan", nn.Linear(1, 1), SimpleNamespace(plan="plan")):
        with pytest.raises(TypeError, match=r"plan must be a plan or what moe_ops\.explain"):
            moe_ops.buckets_of(found, 64)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="most must be an int, got a str: '64'"):
        moe_ops.buckets_of(plan, "64")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="most=0 must be at least 1"):
        moe_ops.buckets_of(plan, 0)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (None, {"buckets": (1,)}, "function must be one of tokens, got None"),
        (
            double,
            {"buckets": 64},
            "buckets must be several ints, such as .*, got an int: 64",
        ),
        (double, {"buckets": "64"}, "buckets must be several ints"),
        (double, {"buckets": (1, 2.5)}, "each of buckets must be an int, got a float: 2.5"),
        (double, {"buckets": (1,), "varying": "x"}, "varying must be an int, got a str: 'x'"),
        (double, {"buckets": (1,), "most": None}, "most must be an int, got None"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(
    function: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        capture(function, **options)


def test_no_graph_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="most=0 must be at least 1"):
        capture(double, buckets=(1,), most=0)
