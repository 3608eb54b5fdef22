"""Passes know routers that write down their choices, or take given ones, as ops of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moe_ops.passes.lift_router import lift_router
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.passes.rewriting.context import Context
from tests.passes.planned import plans
from tests.passes.post_grad import Compiled, text

ops = torch.ops.moe_ops
T, E, K, D = 5, 6, 2, 4
X, LOGITS = torch.randn(T, D), torch.randn(T, E)
WEIGHTS = torch.randn(E, 2 * D, D), torch.randn(E, D, D)
IDS = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(torch.int16)


def rings() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.full((T, K), -1, dtype=torch.int16)
    return ids, torch.zeros(1, dtype=torch.int64), torch.zeros(T, K)


def recording(logits: Tensor, ids: Tensor, at: Tensor, weights: Tensor) -> Any:
    return ops.route_recording(logits, K, ids, at, ring_weights_SK=weights)


def recording_ids(logits: Tensor, ids: Tensor, at: Tensor, weights: Tensor) -> Any:
    return ops.route_recording(logits, K, ids, at)


def replaying(logits: Tensor, ids: Tensor, at: Tensor, weights: Tensor) -> Any:
    return ops.route_replaying(logits, K, IDS.clone())


class Lift:
    """The passes as a hook that keeps what they said."""

    def __init__(self) -> None:
        self.context, self.count, self.before, self.after = Context(), 0, "", ""

    def __call__(self, graph: fx.Graph) -> None:
        self.before = text(graph)
        self.count = lift_router(graph, self.context)
        self.after = text(graph)
        assert lift_router(graph, Context()) == 0, "the pass is not idempotent"
        pick_backend(graph, self.context)


def layer(router: Callable[..., Any], cast: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, logits: Tensor, ids: Tensor, at: Tensor, weights: Tensor) -> Tensor:
        weights_TK, ids_TK = router(logits, ids, at, weights)
        out: Tensor = ops.experts(x, weights_TK, cast(ids_TK), *WEIGHTS)
        return out

    return forward


EACH = pytest.mark.parametrize("router", [recording, recording_ids, replaying])


@EACH
def test_experts_read_ids_as_the_router_gives_them(router: Callable[..., Any]) -> None:
    hook, function = Lift(), layer(router, Tensor.long)
    given, wanted = rings(), rings()
    compiled = Compiled(function, hook)
    got = compiled(X, LOGITS, *given)
    assert torch.equal(got, function(X, LOGITS, *wanted))
    assert all(map(torch.equal, given, wanted))
    assert hook.count == 1
    assert "convert_element_type" in hook.before
    assert "convert_element_type" not in hook.after
    assert not hook.context.refusals
    name = "route_replaying" if router is replaying else "route_recording"
    assert plans(compiled.graphs[0]) == [f"{name} cpu", "experts cpu"]


@EACH
@pytest.mark.parametrize(
    "cast",
    [lambda ids: ids, lambda ids: ids.long()[:, :1].expand(-1, K), lambda ids: ids.long().flip(0)],
    ids=["as_they_are", "other_columns", "other_rows"],
)
def test_ids_that_are_cast_to_none_or_changed_stay(
    router: Callable[..., Any], cast: Callable[[Tensor], Tensor]
) -> None:
    hook, function = Lift(), layer(router, cast)
    got = Compiled(function, hook)(X, LOGITS, *rings())
    assert torch.equal(got, function(X, LOGITS, *rings()))
    assert hook.count == 0
    assert hook.after == hook.before


def test_ids_that_others_read_as_they_were_are_kept_for_them() -> None:
    def function(x: Tensor, logits: Tensor, ids: Tensor, at: Tensor, weights: Tensor) -> Any:
        weights_TK, ids_TK = recording(logits, ids, at, weights)
        wide = ids_TK.long()
        return ops.experts(x, weights_TK, wide, *WEIGHTS), wide + 1

    hook = Lift()
    got = Compiled(function, hook)(X, LOGITS, *rings())
    assert all(map(torch.equal, got, function(X, LOGITS, *rings())))
    assert hook.count == 1
