"""Calls of an op go around torch's dispatcher if, and only if, nobody watches them."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from tests.watching import Watching, counted


class Subclass(torch.Tensor):
    """A tensor that has a say in what happens to it."""


def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one for each call of `activate` that goes through the dispatcher."""
    calls, counting = counted(moe_ops.activate.overload)
    monkeypatch.setattr(moe_ops.activate, "overload", counting)
    return calls


def test_a_plain_eager_call_goes_around_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    through = dispatched(monkeypatch)
    y = torch.randn(3, 8)
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            assert torch.equal(moe_ops.activate(y), torch.ops.moe_ops.activate(y))
            moe_ops.activate(y, kind="gelu")
            moe_ops.activate(torch.nn.Parameter(y, requires_grad=False))
    assert through == []


def test_a_watched_call_goes_through_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    through = dispatched(monkeypatch)
    y = torch.randn(3, 8)
    with Watching() as mode:
        moe_ops.activate(y)
    assert mode.seen[0] == "moe_ops.activate.default"
    with torch.profiler.profile() as profile:
        moe_ops.activate(y)
    assert "moe_ops::activate" in {event.key for event in profile.key_averages()}
    with FakeTensorMode() as fake_mode:
        assert moe_ops.activate(fake_mode.from_tensor(y)).shape == (3, 4)
    assert moe_ops.activate(y.to("meta")).is_meta
    moe_ops.activate(y.as_subclass(Subclass))
    moe_ops.activate(y_RF=y)
    graph = make_fx(lambda t: moe_ops.activate(t))(y).graph
    assert [str(n.target) for n in graph.nodes if n.op == "call_function"] == [
        "moe_ops.activate.default"
    ]
    assert len(through) == 7


def test_transforms_and_traces_see_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    through = dispatched(monkeypatch)
    y = torch.randn(3, 8)
    assert torch.equal(torch.func.functionalize(moe_ops.activate)(y), moe_ops.activate(y))
    assert len(through) == 1
    graph = torch.jit.trace(lambda t: moe_ops.activate(t), y, check_trace=False).graph
    assert "moe_ops::activate" in str(graph)
    assert len(through) == 2


def test_a_custom_operator_records_nothing() -> None:
    """It runs below autograd, where torch's own operators record nothing either, though what the
    operator holds requires grad. Calls like it that are not in there are recorded."""
    x, w = torch.randn(4, 8), torch.randn(2, 6, 8, requires_grad=True)
    ends = torch.tensor([3, 4], dtype=torch.int32)

    def product(x: torch.Tensor) -> torch.Tensor:
        return moe_ops.expert_gemm(x, w, ends)

    held = torch.library.custom_op("moe_ops_test::product", product, mutates_args=())
    for _ in range(3):
        assert not held(x).requires_grad
        assert product(x).requires_grad
    torch.testing.assert_close(held(x), product(x).detach())
