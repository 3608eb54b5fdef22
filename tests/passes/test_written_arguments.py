"""Passes give backends to ops that write to an argument, in graphs as functional calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_ops.ops import expert_wgrad, expert_wgrad_onto
from moe_ops.passes.lower import lower
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.testing import F32, TOL, assert_close
from tests.passes.planned import Hook, plans
from tests.passes.post_grad import Compiled


def onto(a: Tensor, b: Tensor, ends: Tensor, sums: Tensor) -> Tensor:
    torch.ops.moe_ops.expert_wgrad_onto(a, b, ends, sums)
    return a + 1


WGRAD = (torch.randn(5, 3), torch.randn(5, 4), torch.tensor([2, 2, 5], dtype=torch.int32))


def test_an_op_that_writes_to_an_argument_gets_a_backend() -> None:
    """Its functional call, of which Inductor makes the op again."""
    hook, sums = Hook(pick_backend), torch.randn(3, 3, 4)
    want = sums + expert_wgrad(*WGRAD)
    compiled = Compiled(onto, hook)
    assert_close(compiled(*WGRAD, sums), WGRAD[0] + 1, TOL["expert_wgrad", F32])
    assert plans(compiled.graphs[0]) == ["expert_wgrad_onto aten"]
    assert torch.equal(sums, want)
    (choice,) = hook.context.choices
    assert choice.backends == ("aten",)


def test_one_that_writes_to_a_view_picks_its_backend_when_it_runs() -> None:
    sums = torch.randn(2, 3, 3, 4)
    want = sums[1] + expert_wgrad(*WGRAD)
    compiled = Compiled(lambda *args: onto(*args[:3], args[3][1]), hook := Hook(pick_backend))
    compiled(*WGRAD, sums)
    assert plans(compiled.graphs[0]) == ["expert_wgrad_onto -"]
    assert torch.equal(sums[1], want) and not hook.context.choices


def test_a_definition_that_writes_to_an_argument_is_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook, sums = Hook(pick_backend, lower), torch.zeros(3, 3, 4)
    monkeypatch.setattr(
        expert_wgrad_onto, "_backends", {"reference": expert_wgrad_onto.backends["reference"]}
    )
    monkeypatch.setattr(expert_wgrad_onto, "_order", {})
    compiled = Compiled(onto, hook)
    compiled(*WGRAD, sums)
    assert plans(compiled.graphs[0]) == ["expert_wgrad_onto reference"]
    assert_close(sums, expert_wgrad(*WGRAD), TOL["expert_wgrad", F32])
    (refusal,) = hook.context.refusals
    assert refusal.text.endswith("runs on its reference: it writes to an argument")
