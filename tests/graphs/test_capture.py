"""CUDA graphs over token buckets; a stand-in for a graph runs the function again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import experts
from moe_ops.arena import Arena
from moe_ops.graphs.capture import capture
from moe_ops.graphs.cuda_graph import CaptureError
from moe_ops.planning.plan import Choice, Plan, Range
from moe_ops.testing import Case, make_layer
from tests.graphs.recorder import Recorder, runner


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_captured_function_records_no_gradients(mode: Callable[[], Any]) -> None:
    seen = []

    def function(x: Tensor, w: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x * w

    with mode():
        got = runner(function, Recorder())(torch.rand(3, 8), torch.rand(8, requires_grad=True))
    assert not any(seen) and not got.requires_grad


def test_padded_ids_are_experts_that_are_not_here() -> None:
    layer = make_layer(Case(name="p", T=3, E=4, K=2, D=16, I=8))
    seen = []

    def function(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        seen.append(ids.clone())
        return experts(x, weights, ids, w13, w2)

    args = (layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)
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
    moved = w.clone()
    assert torch.equal(run(x, moved), x * moved)
    assert recorder.captures == 2


def test_layers_that_take_turns_keep_their_graphs() -> None:
    recorder, arena = Recorder(), Arena()
    run, layers = runner(double, recorder, arena, most=3), torch.rand(3, 8)
    for w in (*layers, *layers, *layers):
        x = torch.rand(3, 8)
        assert torch.equal(run(x, w), x * w)
    assert recorder.captures == 3
    assert [r.hits for r in run.report()] == [3, 3, 3]
    assert [use.bytes for use in arena.report()] == [512]  # the inputs, once
    run(x, torch.rand(8))
    run(x, layers[1])
    assert recorder.captures == 4
    run(x, layers[0])  # was used longest ago
    assert recorder.captures == 5


def test_arguments_of_other_names_have_their_own_graph() -> None:
    recorder, x, w = Recorder(), torch.rand(4, 4), torch.rand(4)
    run = runner(lambda x, named: x * named.get("scale", 1), recorder)
    for named in ({"scale": w}, {"other": w}) * 2:
        assert torch.equal(run(x, named), x * named.get("scale", 1))
    assert recorder.captures == 2


@pytest.mark.parametrize(
    "way",
    [
        lambda module: module,
        lambda module: module.forward,
        lambda module: torch.compile(module, backend="eager"),
    ],
    ids=["module", "method", "compiled"],
)
def test_weights_of_a_module_are_seen(way: Callable[[nn.Module], Callable[..., Tensor]]) -> None:
    recorder, x = Recorder(), torch.rand(2, 4)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    run = runner(way(module), recorder)
    with torch.enable_grad():
        run(x).sum().backward()
    assert module[0].weight.grad is not None
    assert recorder.captures == 0
    for tensor in (module[0].weight, module[1].running_mean):
        before = recorder.captures
        torch.testing.assert_close(run(x), module(x))
        tensor.data = tensor.data + 1
        for _ in range(2):
            torch.testing.assert_close(run(x), module(x))
        assert recorder.captures == before + 1 + (before == 0)


def test_weights_of_a_module_that_is_an_argument_are_seen() -> None:
    recorder, x, layers = Recorder(), torch.rand(2, 4).round(), [nn.Linear(4, 4) for _ in range(2)]
    for layer in layers:  # whole numbers have one sum, however many rows a product has
        layer.requires_grad_(False).apply(lambda m: (m.weight.mul_(8).round_(), m.bias.zero_()))
    run = runner(lambda x, layer: layer(x), recorder)
    for layer in (*layers, *layers):
        assert torch.equal(run(x, layer), layer(x))
    assert recorder.captures == 2
    layers[0].weight.data = layers[0].weight.data.clone()
    run(x, layers[0])
    assert recorder.captures == 3


def test_a_retired_buffer_is_captured_again() -> None:
    recorder, arena = Recorder(), Arena()
    small = runner(double, recorder, arena)
    x, w = torch.rand(2, 8), torch.rand(8)
    small(x, w)
    small(torch.rand(1, 8), w)
    runner(double, Recorder(), arena, buckets=(4096,))(x, w)
    assert torch.equal(small(x, w), x * w)
    assert recorder.captures == 3
    assert [r.tokens for r in small.report()] == [4]  # none keeps the old buffer


def test_graphs_of_a_stream_share_a_pool_until_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are captured on one stream, without which they share no memory."""
    monkeypatch.setattr(
        "moe_ops.graphs.cuda_graph._new_memory", lambda device: (object(), object())
    )
    recorder, x = Recorder(), torch.rand(3, 8)
    run = runner(double, recorder)
    run.warmup(x, torch.rand(8))
    run.warmup(x, torch.rand(8))
    assert recorder.captures == 6
    first = recorder.memory[0]
    assert None not in first
    assert all(memory == first for memory in recorder.memory)
    run.reset()
    run(x, torch.rand(8))
    pool, stream = recorder.memory[-1]
    assert pool is not first[0] and stream is not first[1]


def test_the_buckets_used_longest_ago_are_forgotten() -> None:
    recorder = Recorder()
    run = runner(lambda x: x + 1, recorder, most=2)
    for T in (1, 4, 1, 16):
        run(torch.rand(T, 2))
    assert [r.tokens for r in run.report()] == [1, 16]


def test_what_cannot_be_captured_runs_and_the_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = CaptureError("capture failed: a sync"), AssertionError("tried again")
    recorder = Recorder(*errors)
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


def test_threads_on_one_stream_do_not_disturb_each_other() -> None:
    def slow(x: Tensor) -> Tensor:
        time.sleep(1e-3)  # for other threads to copy their inputs meanwhile, if they could
        return x + 1

    def use(seed: int) -> list[int]:
        # A runner's output holds until its next call, so each thread has its own runner.
        run = runner(slow, Recorder(), arena)
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        with torch.no_grad():
            xs = [torch.rand(T, 4, generator=generator) for T in (1, 7, 3, 16) * 5]
            return [x.shape[0] for x in xs if not torch.equal(run(x), x + 1)]

    arena, start = Arena(), threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [[], [], [], []]
    assert [use.purpose for use in arena.report()] == ["input 0 of a graph"]


def test_a_report_can_be_made_while_another_thread_calls() -> None:
    def use() -> None:
        with torch.no_grad():
            for i in range(500):
                run(x, i)

    run, x = runner(lambda x, i: x + i, Recorder(), most=500), torch.rand(3, 4)
    with ThreadPoolExecutor(1) as pool:
        used = pool.submit(use)
        while not used.done():
            assert len(run.report()) <= 500
        used.result()
    run.reset()
    assert run.report() == []


def test_state_of_inference_mode_can_be_written() -> None:
    def function(x: Tensor, cache: Tensor) -> Tensor:
        cache[:1].copy_(x[:1])
        return cache[:1] + 0 * x

    recorder, x = Recorder(), torch.rand(3, 4)
    run = runner(function, recorder)
    with torch.inference_mode():
        cache = torch.zeros(2, 4)
        assert torch.equal(run(x, cache), x[:1].expand(3, 4))
    x += 1
    assert torch.equal(run(x, cache), x[:1].expand(3, 4))
    assert torch.equal(cache[0], x[0])
    assert recorder.captures == 1


@pytest.mark.parametrize("warmup", [False, True])
def test_varying_arguments_of_unlike_lengths_are_refused(warmup: bool) -> None:
    arena = Arena()
    run = runner(lambda x, y: x + y, Recorder(), arena, varying=2)
    message = r"first 2 arguments have to count the same tokens, got \[3, 1\] rows; give"
    with pytest.raises(ValueError, match=message):
        (run.warmup if warmup else run)(torch.rand(3, 4), torch.rand(1, 4))
    assert run.report() == [] and arena.report() == []


def test_a_constant_that_may_change_unseen_runs_the_function_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder, sizes = Recorder(), {3}
    run = runner(lambda x, sizes: x + len(sizes), recorder)
    x = torch.rand(2, 2)
    with caplog.at_level(logging.INFO, "moe_ops"):
        assert torch.equal(run(x, sizes), x + 1)
        sizes.add(4)
        assert torch.equal(run(x, sizes), x + 2)
    assert recorder.captures == 0
    assert "unhashable type: 'set'" in caplog.text


def test_a_call_on_another_device_runs_uncaptured() -> None:
    run, x = capture(lambda x: x + 1, buckets=(4,)), torch.rand(3, 2)
    for _ in range(2):
        x += 1
        assert torch.equal(run(x), x + 1)
    assert "got cpu" in str(run.report()[0].refusal)


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
