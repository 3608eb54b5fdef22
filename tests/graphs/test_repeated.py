"""Compiled code of any module whose calls are captured; a stand-in for a graph runs it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import compiler
from moe_ops.graphs.cuda_graph import CaptureError
from moe_ops.graphs.repeated import Repeated
from moe_ops.graphs.runner import MOST_SIZES, TIMES
from moe_ops.testing import TOL, assert_close
from tests.graphs.recorder import Recorder


@pytest.fixture
def tape() -> Recorder:
    return Recorder()


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def scaled(tape: Recorder) -> tuple[Repeated, nn.Parameter]:
    weight = nn.Parameter(torch.rand(8))
    return Repeated(lambda w, x: [x * w], frozenset({0}), capture=tape), weight


def test_a_size_is_captured_when_it_comes_the_third_time(tape: Recorder) -> None:
    run, weight = scaled(tape)
    for n in range(1, 7):
        for rows in (2, 5):
            x = torch.rand(rows, 8)
            assert torch.equal(run(weight, x)[0], x * weight)
        assert tape.captures == (2 if n >= TIMES else 0)
    two, five = run.report()
    assert (two.shapes, two.calls, two.replays, two.bytes) == (((2, 8),), 6, 3, 64)
    assert five.shapes == ((5, 8),) and five.refusal is None


def test_results_are_the_callers(tape: Recorder) -> None:
    run, weight = scaled(tape)
    inputs = [torch.rand(3, 8) for _ in range(6)]
    results = [run(weight, x)[0] for x in inputs]
    inputs[-1].zero_()
    for x, got in zip(inputs[:-1], results, strict=False):
        assert torch.equal(got, x * weight)


def test_a_weight_that_lies_elsewhere_is_seen(tape: Recorder) -> None:
    run, weight = scaled(tape)
    x = torch.rand(3, 8)
    for _ in range(4):
        run(weight, x)
    weight.mul_(2)  # in place
    assert torch.equal(run(weight, x)[0], x * weight) and tape.captures == 1
    weight.data = torch.rand(8)
    assert torch.equal(run(weight, x)[0], x * weight)
    assert [size.replays for size in run.report()] == [0]


def test_sizes_that_came_long_ago_are_forgotten(tape: Recorder) -> None:
    run, weight = scaled(tape)
    for rows in range(1, MOST_SIZES + 3):
        run(weight, torch.rand(rows, 8))
    assert [size.shapes[0][0] for size in run.report()] == list(range(3, MOST_SIZES + 3))


CHANGED = "it changes its argument 1"
REFUSED = {
    "an_input_is_changed": (lambda w, x: [x.mul_(w)], CHANGED),
    "a_part_of_an_input": (lambda w, x: [x[:1]], "it gives a part of an argument"),
    "no_list": (lambda w, x: x * w, "it gives a Tensor"),
}


@pytest.mark.parametrize(("function", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_no_graph_can_repeat_runs_uncaptured(
    tape: Recorder, function: Callable[..., Any], reason: str
) -> None:
    run = Repeated(function, frozenset({0}), capture=tape)
    weight = torch.rand(8)
    for _ in range(5):
        x = torch.rand(3, 8)
        want = function(weight, x.clone())
        torch.testing.assert_close(run(weight, x), want, rtol=0, atol=0)
    assert [size.refusal for size in run.report()] == [reason] and tape.captures == 0


def test_a_refused_capture_is_reported_and_not_tried_again(tape: Recorder) -> None:
    run, weight = scaled(tape)
    tape.errors = [CaptureError("capture failed: a sync"), AssertionError("tried again")]
    for _ in range(5):
        x = torch.rand(3, 8)
        assert torch.equal(run(weight, x)[0], x * weight)
    assert [size.refusal for size in run.report()] == ["capture failed: a sync"]


def test_without_memory_graphs_are_dropped_and_the_call_runs(tape: Recorder) -> None:
    failing = [False]

    def function(w: Tensor, x: Tensor) -> list[Tensor]:
        if failing[0]:
            failing[0] = False
            raise torch.OutOfMemoryError("none left")
        return [x * w]

    run, weight = Repeated(function, frozenset({0}), capture=tape), torch.rand(8)
    with pytest.raises(torch.OutOfMemoryError):
        failing[0] = True
        run(weight, torch.rand(2, 8))
    for _ in range(4):
        run(weight, torch.rand(2, 8))
    failing[0] = True
    x = torch.rand(2, 8)
    assert torch.equal(run(weight, x)[0], x * weight)
    assert run.report() == []


def test_gradients_are_not_captured(tape: Recorder) -> None:
    run, weight = scaled(tape)
    with torch.enable_grad():
        for _ in range(5):
            x = torch.rand(3, 8)
            run(weight, x)[0].sum().backward()
            assert weight.grad is not None and torch.equal(weight.grad, x.sum(0))
            weight.grad = None
    assert run.report() == []


class Stack(nn.Module):
    """MoE layers of one's own, with a router each, that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 16}
        self.layers = nn.ModuleList(moe_ops.MoELayer(**sizes) for _ in range(2))
        self.routers = nn.ModuleList(nn.Linear(32, 4) for _ in range(2))
        self.register_buffer("calls", torch.zeros(()))
        for p in self.parameters():
            p.normal_(0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer, router in zip(self.layers, self.routers, strict=True):
            x = x + layer(x, router(x))
        return x


@pytest.mark.slow
def test_a_stack_of_layers_is_compiled_and_captured(
    tape: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "Repeated", lambda *a: Repeated(*a, capture=tape))
    stack = Stack().eval()
    backend = moe_ops.backend(capture=True, strict=True)
    fast = torch.compile(stack, backend=backend)
    done = [(x, fast(x)) for x in (torch.randn(5, 32) for _ in range(6))]
    assert stack.calls == 6 and tape.captures == 1
    for x, got in done:
        assert_close(got, stack(x), TOL["moe", torch.float32])
    (report,) = backend.report()
    assert (report.shapes, report.calls, report.replays) == (((5, 32),), 6, 3)
    stack.routers[0].weight.data = torch.randn(4, 32)
    x = torch.randn(5, 32)
    assert_close(fast(x), stack(x), TOL["moe", torch.float32])


def test_a_backend_takes_the_options_of_inductor_options() -> None:
    with pytest.raises(TypeError, match="unknown options: fast"):
        moe_ops.backend(fast=True)
    with pytest.raises(TypeError, match="capture must be True or False"):
        moe_ops.backend(capture=1)
    plain = moe_ops.backend(stop_after="pick_backend")
    assert not hasattr(plain, "report")
    assert plain.config == moe_ops.inductor_options(stop_after="pick_backend")


def test_a_backend_that_captures_shares_its_graphs_with_no_other() -> None:
    first, second, plain = (moe_ops.backend(capture=c) for c in (True, True, False))
    assert first == first and plain == moe_ops.backend()
    assert first != second and first != plain and plain != first
