"""Who watches a call sees it, also if one like it ran before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from moe_ops import Op
from tests.registry.memo.throwaway import Asked, tensors, twice
from tests.watching import Watching, counted

X, W = tensors()


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def watched_by_dispatch(made: Op) -> None:
    with Watching() as mode:
        made(X, W)
    assert "moe_ops.remembered.default" in mode.seen


def watched_by_functions(made: Op) -> None:
    with Functions() as mode:
        made(X, W)
    assert "moe_ops.remembered.default" in mode.seen


def watched_by_a_profiler(made: Op) -> None:
    with torch.profiler.profile() as profile:
        made(X, W)
    assert "moe_ops::remembered" in {event.key for event in profile.key_averages()}


def watched_by_a_trace(made: Op) -> None:
    graph = torch.jit.trace(lambda t: made(t, W), X, check_trace=False).graph
    assert "moe_ops::remembered" in str(graph)


def watched_by_make_fx(made: Op) -> None:
    graph = make_fx(lambda t: made(t, W))(X).graph
    assert "moe_ops.remembered.default" in [str(n.target) for n in graph.nodes]


def watched_by_a_transform(made: Op) -> None:
    through, made.overload = counted(made.overload)
    assert torch.equal(torch.func.functionalize(made)(X, W), X * 2)
    assert through == [1]


def watched_for_tangents(made: Op) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            made(dual, W)


def watched_by_fake_tensors(made: Op) -> None:
    """A mode of torch itself, which guards do not see."""
    through, made.overload = counted(made.overload)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(made(X, W), FakeTensor)
    assert through == [1]


WATCHERS = {
    "fake": watched_by_fake_tensors,
    "dispatch_mode": watched_by_dispatch, "function_mode": watched_by_functions,
    "profiler": watched_by_a_profiler, "jit": watched_by_a_trace, "make_fx": watched_by_make_fx,
    "functionalize": watched_by_a_transform, "forward_mode": watched_for_tangents,
}  # fmt: skip


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_who_watches_sees_a_call_like_one_before(
    made: Op, asked: Asked, watch: Callable[[Op], None]
) -> None:
    twice(lambda: made(X, W))
    watch(made)
    assert asked.of(lambda: made(X, W)) == []
