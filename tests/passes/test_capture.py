"""CUDA graphs over token buckets; a stand-in for a graph runs the function again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import experts
from moe_ops.arena import Arena
from moe_ops.passes.capture import (
    Captured,
    CaptureError,
    GraphRunner,
    capture,
    capture_call,
)
from moe_ops.passes.planning.plan import Choice, Plan, Range
from moe_ops.testing import Case, make_layer


class Recorder:
    """Captures by keeping the function: a replay runs it and writes into the first output."""

    def __init__(self) -> None:
        self.captures = 0
        self.error: str | None = None

    def __call__(
        self, function: Callable[[], Any], state: Sequence[Tensor] = (), pool: Any = None
    ) -> Captured:
        if self.error is not None:
            raise CaptureError(self.error)
        self.captures += 1
        output = function()
        return Captured(lambda: output.copy_(function()), output, 64)


def runner(
    function: Callable[..., Any], recorder: Recorder, arena: Arena | None = None, **kw: Any
) -> GraphRunner:
    kw = {"buckets": (1, 4, 16), **kw}
    return GraphRunner(function, capture=recorder, arena=arena or Arena(), **kw)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def double(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def test_one_graph_per_bucket_serves_all_its_token_counts() -> None:
    recorder = Recorder()
    run, w = runner(double, recorder), torch.rand(8)
    for T in (1, 3, 4, 2, 9, 16, 1):
        x = torch.rand(T, 8)
        assert torch.equal(run(x, w), x * w)
    assert recorder.captures == 3
    assert {r.tokens: r.hits for r in run.report()} == {1: 2, 4: 3, 16: 2}
    assert all(r.bytes == 64 and r.refusal is None for r in run.report())


def test_padded_ids_are_experts_that_are_not_here() -> None:
    layer = make_layer(Case(name="p", T=3, E=4, K=2, D=16, I=8))
    seen = []

    def function(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        seen.append(ids.clone())
        return experts(x, weights, ids, w13, w2)

    args = (layer.x_TD, layer.weights_TK, layer.experts_TK, layer.w13_EFD, layer.w2_EDI)
    got = runner(function, Recorder(), varying=3)(*args)
    torch.testing.assert_close(got, experts(*args))
    assert (seen[-1][3:] == -1).all() and seen[-1].shape[0] == 4


def test_warmup_captures_the_largest_bucket_first() -> None:
    sizes, recorder = [], Recorder()

    def function(x: Tensor) -> Tensor:
        sizes.append(x.shape[0])
        return x + 1

    run = runner(function, recorder)
    run.warmup(torch.rand(2, 3))
    assert sizes == [16, 4, 1]
    run(torch.rand(5, 3))
    assert recorder.captures == 3


def test_a_moved_weight_is_captured_again_and_one_changed_in_place_is_not() -> None:
    recorder, x, w = Recorder(), torch.rand(2, 8), torch.rand(8)
    run = runner(double, recorder)
    run(x, w)
    w.mul_(3)
    assert torch.equal(run(x, w), x * w)
    assert recorder.captures == 1
    assert torch.equal(run(x, w.clone()), x * w)
    assert recorder.captures == 2


def test_a_retired_buffer_is_captured_again() -> None:
    recorder, arena = Recorder(), Arena()
    small = runner(double, recorder, arena)
    x, w = torch.rand(2, 8), torch.rand(8)
    small(x, w)
    runner(double, Recorder(), arena, buckets=(4096,))(x, w)
    assert torch.equal(small(x, w), x * w)
    assert recorder.captures == 2


def test_the_buckets_used_longest_ago_are_forgotten() -> None:
    recorder = Recorder()
    run = runner(lambda x: x + 1, recorder, most=2)
    for T in (1, 4, 1, 16):
        run(torch.rand(T, 2))
    assert [r.tokens for r in run.report()] == [1, 16]


def test_what_cannot_be_captured_runs_and_the_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder()
    recorder.error = "capture failed: a sync"
    run, x = runner(lambda x: x + 1, recorder), torch.rand(3, 2)
    with caplog.at_level(logging.INFO, "moe_ops"):
        for _ in range(2):
            assert torch.equal(run(x), x + 1)
            assert run(torch.rand(17, 2)).shape == (17, 2)
            assert run(torch.rand(0, 2)).shape == (0, 2)
    assert [r.refusal for r in run.report()] == ["capture failed: a sync"]
    reasons = [r.getMessage().partition(": ")[2] for r in caplog.records]
    assert sorted(reasons) == [
        "17 tokens are more than the largest bucket, 16",
        "capture failed: a sync",
        "there are no tokens",
    ]


def test_gradients_and_autocast_run_the_function_itself() -> None:
    recorder = Recorder()
    linear = nn.Linear(4, 4)
    run = runner(lambda x, w: x @ w, recorder)
    x = torch.rand(2, 4)
    with torch.enable_grad():
        run(x, linear.weight).sum().backward()
    assert linear.weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x, linear.weight).dtype == torch.bfloat16
    assert recorder.captures == 0
    with torch.inference_mode():
        got = run(x, linear.weight)
    torch.testing.assert_close(run(x, linear.weight), got)
    assert recorder.captures == 1


def test_an_error_of_the_function_is_raised_and_the_next_call_works() -> None:
    def function(x: Tensor) -> Tensor:
        if broken:
            raise ValueError("broken")
        return x + 1

    broken, recorder = True, Recorder()
    run, x = runner(function, recorder), torch.rand(2, 2)
    with pytest.raises(ValueError, match="broken"):
        run(x)
    broken = False
    assert torch.equal(run(x), x + 1)


def test_threads_do_not_disturb_each_other() -> None:
    wrong = []

    def use(run: GraphRunner, seed: int) -> None:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(seed)
            for T in (1, 7, 3, 16) * 10:
                x = torch.rand(T, 4, generator=generator)
                if not torch.equal(run(x), x + 1):
                    wrong.append(T)

    # A runner's output holds until its next call, so each thread has its own; they share buffers
    # only if they share a stream, and with it an order, as threads on the CPU do not.
    runners = [runner(lambda x: x + 1, Recorder()) for _ in range(4)]
    threads = [threading.Thread(target=use, args=(r, i)) for i, r in enumerate(runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_a_gpu_a_capture_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CaptureError, match="need a CUDA GPU"):
        capture_call(lambda: None)
    run, x = capture(lambda x: x + 1, buckets=(4,)), torch.rand(3, 2)
    assert torch.equal(run(x), x + 1)
    assert "need a CUDA GPU" in str(run.report()[0].refusal)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"buckets": ()}, "from 1 on"), ({"buckets": (0, 3)}, "from 1 on"), ({"varying": 0}, "count")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner(double, Recorder(), **arguments)


def test_buckets_come_from_the_plan() -> None:
    ranges = tuple(Range(upto=n, backend="b", source="limit") for n in (6, 300, None))
    choice = Choice(
        node="n",
        op="experts",
        layer="",
        rows=(0, None),
        shapes={},
        dtype="bfloat16",
        format="",
        candidates=("b",),
        refusals={},
        ranges=ranges,
    )
    plan = Plan(device="cpu", choices=(choice,))
    assert moe_ops.buckets_of(plan, 40) == (1, 2, 4, 6, 8, 16, 32, 40)
