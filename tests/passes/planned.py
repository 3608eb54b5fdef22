"""Graphs of one call of an op, through `pick_backend` and `lower`, for tests of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from moe_ops.ops import experts
from moe_ops.passes import Pass
from moe_ops.passes.pick_backend import FUNCTIONAL
from moe_ops.passes.rewriting.context import Context, Options
from moe_ops.registry.spec import Op
from moe_ops.testing import CASES, Case, make_layer
from tests.passes.post_grad import Compiled

PLAIN = CASES[0]


class Hook:
    """Runs passes on a graph, twice: the second time they must find nothing."""

    def __init__(self, *passes: Pass, **options: Any) -> None:
        self.passes, self.context = passes, Context(options=Options(**options))
        self.counts: list[int] = []
        self.guards = 0

    def __call__(self, graph: fx.Graph) -> None:
        vals = [n.meta.get("val") for n in graph.nodes]
        env = next(v for v in vals if isinstance(v, FakeTensor)).fake_mode.shape_env
        before = 0 if env is None else len(env.guards)
        self.counts = [run(graph, self.context) for run in self.passes]
        choices = len(self.context.choices)
        assert [run(graph, self.context) for run in self.passes] == [0] * len(self.passes)
        assert len(self.context.choices) == choices
        self.guards += 0 if env is None else len(env.guards) - before


def call_of(op: Op, args: Sequence[Any], hook: Hook) -> tuple[Compiled, list[Tensor]]:
    """A call as a function of its tensors alone, and these."""
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]

    def function(*tensors: Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        return op(*(given.get(i, a) for i, a in enumerate(args)))

    # Marks of sizes stay on a tensor: not on that of the caller.
    return Compiled(function, hook), [args[i].detach() for i in places]


def any_rows(tensors: Sequence[Tensor]) -> None:
    """Let the number of rows vary: the first axis of all matrices that have the first one's."""
    for t in tensors:
        if t.dim() <= 2 and t.shape[0] == tensors[0].shape[0]:
            torch._dynamo.maybe_mark_dynamic(t, 0)


def experts_call(case: Case = PLAIN, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    layer = make_layer(case, dtype)
    return layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI


def run_experts(
    hook: Hook, *, dynamic: bool = False, dtype: torch.dtype = torch.float32, case: Case = PLAIN
) -> tuple[Any, fx.Graph]:
    """The result of `experts` in a rewritten graph, and the graph."""
    args = experts_call(case, dtype)
    compiled, tensors = call_of(experts, args, hook)
    if dynamic:
        any_rows(tensors[:3])
    result = compiled(*tensors)
    (graph,) = compiled.graphs
    return result, graph


def plans(graph: fx.Graph) -> list[str]:
    """The ops of ours in a graph, with their plans."""
    found = []
    for node in graph.nodes:
        target: Any = node.args[0] if node.target is FUNCTIONAL else node.target
        if getattr(target, "namespace", "") == "moe_ops":
            name = target._schema.name.partition("::")[2]
            found.append(f"{name} {node.kwargs.get('plan', '-')}")
    return found
