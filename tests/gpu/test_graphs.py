"""CUDA graphs of our ops: by our runner and by Inductor; errors, streams, memory, moved weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

import moe_ops
from moe_ops import arena, moe
from moe_ops.passes.capture import CaptureError, GraphRunner, capture_call
from moe_ops.testing import BF16, Case, Layer, make_layer

pytestmark = pytest.mark.gpu
CASE = Case(name="graph", T=64, E=32, K=4, D=512, I=256)
SIZES = (1, 3, 8, 33, 64)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def layer() -> Layer:
    return make_layer(CASE, BF16, "cuda")


def block(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    return moe(x, logits, w13, w2, CASE.K, renormalize=True)


def inputs(layer: Layer, T: int) -> tuple[Tensor, ...]:
    return (layer.x_TD[:T], layer.logits_TE[:T], layer.w13_EFD, layer.w2_EDI)


def runner(**kwargs: Any) -> GraphRunner:
    return GraphRunner(block, **{"buckets": (1, 8, 64), "varying": 2, **kwargs})


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("eager", [True, False], ids=["warmed", "lazy"])
def test_buckets_give_what_the_op_gives(layer: Layer, eager: bool) -> None:
    run = runner()
    if eager:
        run.warmup(*inputs(layer, 5))
    for T in (*SIZES, *SIZES):
        close(run(*inputs(layer, T)), block(*inputs(layer, T)))
    reports = {r.tokens: r for r in run.report()}
    assert {n: r.hits for n, r in reports.items()} == {1: 2, 8: 4, 64: 4}
    assert all(r.refusal is None for r in reports.values())


def test_weights_changed_in_place_and_moved(layer: Layer) -> None:
    run = runner()
    x, logits, w13, w2 = inputs(layer, 8)
    run(x, logits, w13, w2)
    w2.mul_(-1)
    close(run(x, logits, w13, w2), block(x, logits, w13, w2))
    moved = w2.clone().mul_(2)
    close(run(x, logits, w13, moved), block(x, logits, w13, moved))


def test_an_error_inside_a_capture_leaves_the_process_usable(layer: Layer) -> None:
    broken = True

    def function(x: Tensor) -> Tensor:
        y = x * 2
        if broken and torch.cuda.is_current_stream_capturing():
            float(y.sum())  # a host sync, forbidden here
        return y

    before = torch.cuda.current_stream()
    x = torch.rand(8, device="cuda")
    with pytest.raises(CaptureError, match="capture failed"):
        capture_call(lambda: function(x))
    assert torch.cuda.current_stream() == before
    torch.rand(8, device="cuda") @ torch.rand(8, device="cuda")  # random numbers and memory work
    close(runner()(*inputs(layer, 8)), block(*inputs(layer, 8)))
    broken = False
    captured = capture_call(lambda: function(x))
    x.fill_(3)
    captured.replay()
    assert (captured.output == 6).all()


def test_state_is_as_before_after_a_capture() -> None:
    count = torch.zeros((), device="cuda", dtype=torch.int64)
    captured = capture_call(lambda: count.add_(1), (count,))
    assert count.item() == 0
    for _ in range(3):
        captured.replay()
    assert count.item() == 3


def test_inference_mode_and_back(layer: Layer) -> None:
    run = runner()
    with torch.inference_mode():
        first = run(*inputs(layer, 8)).clone()
    close(run(*inputs(layer, 8)), first)
    with torch.autocast("cuda", torch.bfloat16):
        run(*inputs(layer, 8))
    assert [r.hits for r in run.report()] == [2]


def test_streams_and_threads_have_graphs_of_their_own(layer: Layer) -> None:
    run, errors = runner(buckets=(64,)), []
    want = {T: block(*inputs(layer, T)) for T in (16, 64)}
    run(*inputs(layer, 64))
    torch.cuda.synchronize()

    def use(T: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = run(*inputs(layer, T))
                if not torch.allclose(got, want[T], rtol=2e-2, atol=2e-2):
                    errors.append(T)

    # One after the other for the captures, then together.
    threads = [threading.Thread(target=use, args=(T,)) for T in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({use.stream for use in arena.report()}) >= 2


def test_replays_allocate_nothing(layer: Layer) -> None:
    run = runner()
    run.warmup(*inputs(layer, 1))
    run(*inputs(layer, 33))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for T in SIZES:
        run(*inputs(layer, T))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("partition", [True, False], ids=["partitioned", "whole"])
@pytest.mark.parametrize("T", [1, 64, 300])
def test_inductors_own_graphs(partition: bool, T: int) -> None:
    """Every op under cudagraph trees, twice in a row, with other values each time."""
    layer = make_layer(Case(name="trees", T=T, E=32, K=4, D=512, I=256), BF16, "cuda")
    options = moe_ops.inductor_options(extra={"triton.cudagraphs": True})

    def model(x: Tensor, logits: Tensor) -> Tensor:
        y = moe(x, logits, layer.w13_EFD, layer.w2_EDI, 4) + x
        weights, ids = moe_ops.route(logits, 4)
        return moe_ops.experts(y, weights, ids, layer.w13_EFD, layer.w2_EDI) * 2

    with inductor_config.patch(graph_partition=partition):
        compiled = torch.compile(model, options=options)
        torch._dynamo.utils.counters.clear()
        for seed in range(5):
            other = make_layer(Case(name="t", T=T, E=32, K=4, D=512, I=256), BF16, "cuda", seed)
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(other.x_TD, other.logits_TE).clone()
            torch.testing.assert_close(
                got, model(other.x_TD, other.logits_TE), rtol=5e-2, atol=5e-2
            )
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_reduce_overhead_with_stages_one_by_one(layer: Layer) -> None:
    def stages(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = moe_ops.route(logits, CASE.K)
        rows, order, ends = moe_ops.dispatch(x, ids, CASE.E)[:3]
        h = moe_ops.activate(moe_ops.expert_gemm(rows, layer.w13_EFD, ends))
        return moe_ops.combine(moe_ops.expert_gemm(h, layer.w2_EDI, ends), weights, order)

    compiled = torch.compile(stages, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(*inputs(layer, 33)[:2]), stages(*inputs(layer, 33)[:2]))
