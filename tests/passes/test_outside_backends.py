"""Backends that others registered are chosen in graphs and by thresholds, and measured, as ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_ops import expert_gemm, experts
from moe_ops.bench.stages import Place, Stage, usable
from moe_ops.conformance.kit import BY_NAME
from moe_ops.conformance.samples import samples
from moe_ops.ops.expert_gemm import ExpertGemmCall
from moe_ops.ops.experts import ExpertsCall
from moe_ops.passes.lower import lower
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.planning.tune import usable_backends
from moe_ops.registry.backend import Rows
from moe_ops.testing import F16, TOL, assert_close
from tests.passes.planned import Hook, any_rows, call_of, experts_call

ran: list[str] = []


@pytest.fixture(autouse=True)
def theirs() -> Iterator[None]:
    """A backend of a layer that takes up to 9 tokens, and one of a stage for any number of rows."""
    ran.clear()

    @experts.backend("theirs", priority=9, rows=Rows(preferred=lambda call: 9))
    def layer(call: ExpertsCall) -> Tensor:
        ran.append("layer")
        return experts.body(call)

    @expert_gemm.backend("theirs_too", priority=9)
    def product(call: ExpertGemmCall) -> Tensor:
        ran.append("product")
        return expert_gemm.body(call)

    yield
    experts.remove_backend("theirs")
    expert_gemm.remove_backend("theirs_too")


@pytest.mark.parametrize(
    ("thresholds", "plan"),
    [
        (None, "9:theirs,128:cpu,:aten"),
        (((4, "cpu"), (None, "theirs")), "4:cpu,:theirs"),
        (((64, "theirs"), (None, "aten")), "64:theirs,:aten"),
    ],
)
def test_a_layer_in_a_graph(thresholds: tuple[tuple[int | None, str], ...], plan: str) -> None:
    hook = Hook(pick_backend, thresholds=thresholds)
    compiled, tensors = call_of(experts, experts_call(), hook)
    any_rows(tensors[:3])
    few = [t[:6] if i < 3 else t for i, t in enumerate(tensors)]
    want = experts.reference(*few)
    compiled(*tensors)
    assert [c.plan for c in hook.context.choices] == [plan]
    ran.clear()
    assert_close(compiled(*few), want, TOL["experts", torch.float32])
    assert ran[:1] == ["layer"]


def test_a_stage_in_a_graph_and_behind_a_layer_that_is_lowered() -> None:
    args = dict(samples("expert_gemm", BY_NAME["plain"], torch.float32))["plain"]
    hook = Hook(pick_backend)
    compiled, tensors = call_of(expert_gemm, args, hook)
    compiled(*tensors)
    assert [c.plan for c in hook.context.choices] == ["theirs_too"]
    experts.remove_backend("theirs")
    experts.backend("theirs", supports=lambda call: "has no kernel for it")(experts.body)
    hook = Hook(pick_backend, lower, pick_backend)
    compiled, tensors = call_of(experts, experts_call(dtype=F16), hook)
    ran.clear()
    compiled(*tensors)
    chosen = [(c.op, c.plan) for c in hook.context.choices]
    assert chosen[0] == ("experts", "reference"), "of its own there is one that composes stages"
    assert [plan for op, plan in chosen if op == "expert_gemm"] == ["theirs_too"] * 2
    assert ran == ["product"] * 2


def test_measurements_take_them() -> None:
    call = experts.call(*experts_call())
    assert usable_backends(call)["theirs"] is None
    args = dict(samples("expert_gemm", BY_NAME["plain"], torch.float32))["plain"]
    stage = Stage(
        place=Place(layer="plain", tokens=16),
        name="expert_gemm",
        op=expert_gemm,
        args=args,
        want=(),
    )
    assert usable(stage, "cpu", ()) == ["theirs_too", "cpu", "aten"]
    assert usable(stage, "cpu", ("theirs_too",)) == ["theirs_too"]
