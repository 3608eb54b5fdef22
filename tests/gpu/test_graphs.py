"""CUDA graphs of our ops: by our runner and by Inductor; errors, streams, memory, moved weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import moe_ops
from moe_ops import arena, moe
from moe_ops.decode_ops.linears import linears
from moe_ops.decode_ops.one_query import one_query
from moe_ops.graphs.capture import GraphRunner
from moe_ops.graphs.cuda_graph import CaptureError, capture_call
from moe_ops.testing import BF16, Case, Layer, make_layer

pytestmark = pytest.mark.gpu
CASE = Case(name="graph", T=64, E=32, K=4, D=512, I=256)
SIZES = (1, 3, 8, 33, 64)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
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


def each_in_a_thread(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """What the function returns for each, called at the same time; raises what it raises."""
    items = list(items)
    start = threading.Barrier(len(items))

    def call(item: Any) -> Any:
        start.wait()
        with torch.no_grad():
            return function(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(call, items))


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


def test_layers_that_take_turns_keep_their_graphs(layer: Layer) -> None:
    run, (x, logits, w13, w2) = runner(), inputs(layer, 8)
    layers = [(w13, w2), (w13 * 0.5, w2 * -1), (w13.clone(), w2 * 2)]
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn_like(x)
        for weights in layers:
            close(run(x, logits, *weights), block(x, logits, *weights))
    assert [r.hits for r in run.report()] == [4, 4, 4]


def test_weights_of_a_module_that_move() -> None:
    module = nn.Linear(64, 64, device="cuda")
    run, x = GraphRunner(module, buckets=(8,)), torch.rand(5, 64, device="cuda")
    for _ in range(3):
        for _ in range(2):
            close(run(x), module(x))
        module.weight.data = module.weight.data * -2
        torch.full_like(module.weight, float("nan"))  # takes the memory of the old one
    assert [r.hits for r in run.report()] in ([2, 2, 2], [2, 4])  # an address may come again
    with torch.enable_grad():
        run(x).sum().backward()
    assert module.weight.grad is not None


def test_a_cache_of_inference_mode_is_written() -> None:
    def function(x: Tensor, cache: Tensor) -> Tensor:
        cache[: x.shape[0]].copy_(x)
        return cache[: x.shape[0]] * 2

    run, x = GraphRunner(function, buckets=(8,)), torch.rand(8, 4, device="cuda")
    with torch.inference_mode():
        cache = torch.zeros(16, 4, device="cuda")
        close(run(x, cache), x * 2)
    x += 1
    close(run(x, cache), x * 2)
    close(cache[:8], x)
    assert [r.hits for r in run.report()] == [2]


def test_a_runner_inside_another_captures_nothing(layer: Layer) -> None:
    inner = runner()
    outer = GraphRunner(lambda *args: inner(*args) * 2, buckets=(8,), varying=2)
    close(outer(*inputs(layer, 8)), block(*inputs(layer, 8)) * 2)
    assert [r.hits for r in outer.report()] == [1]
    assert inner.report() == []


def test_tensors_on_the_cpu_are_not_captured() -> None:
    run = GraphRunner(lambda x: x + 1, buckets=(4,))
    for x in torch.rand(2, 3, 4):
        assert torch.equal(run(x), x + 1)
    assert "got cpu" in str(run.report()[0].refusal)


def test_streams_and_threads_have_graphs_of_their_own(layer: Layer) -> None:
    run = runner(buckets=(64,))
    want = {T: block(*inputs(layer, T)) for T in (16, 64)}
    run(*inputs(layer, 64))
    torch.cuda.synchronize()

    def use(T: int) -> list[bool]:
        # The first calls capture, one after the other; the other thread may replay meanwhile.
        with torch.cuda.stream(torch.cuda.Stream()):
            gots = (run(*inputs(layer, T)) for _ in range(50))
            return [torch.allclose(got, want[T], rtol=2e-2, atol=2e-2) for got in gots]

    assert each_in_a_thread(use, want) == [[True] * 50] * 2
    assert len({use.stream for use in arena.report()}) >= 2


def test_threads_on_one_stream_do_not_disturb_each_other(layer: Layer) -> None:
    want = {T: block(*inputs(layer, T)) for T in (16, 40, 64)}
    torch.cuda.synchronize()

    def use(T: int) -> list[bool]:
        # A runner's output holds until its next call, so each thread has its own runner.
        run = runner(buckets=(64,))
        gots = (run(*inputs(layer, T)) for _ in range(50))
        return [torch.allclose(got, want[T], rtol=2e-2, atol=2e-2) for got in gots]

    assert each_in_a_thread(use, want) == [[True] * 50] * 3


def test_threads_that_capture_wait_for_each_other() -> None:
    def function(x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            time.sleep(0.05)  # for the other thread to get there, if it could
        else:
            torch.cuda.synchronize()  # as what times kernels does, which breaks any capture
        return x * 2

    def use(value: int) -> list[float]:
        gots = []
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.zeros(8, device="cuda")
            for i in range(4):
                captured = capture_call(lambda: function(x))
                x.fill_(value + i)
                captured.replay()
                gots.append(captured.output[0].item())
        return gots

    assert each_in_a_thread(use, (10, 20)) == [[20, 22, 24, 26], [40, 42, 44, 46]]


def test_buckets_share_memory() -> None:
    """Each needs hundreds of MB for itself; both need hardly more than the larger."""
    MB = 1 << 20

    def function(x: Tensor) -> Tensor:  # [T, 64]
        return (x.repeat(1, 256) * 2).sum(-1)

    run, x = GraphRunner(function, buckets=(2048, 4096)), torch.rand(9, 64, device="cuda")
    function(torch.rand(4096, 64, device="cuda"))  # what a warm-up leaves is not subtracted
    run.warmup(x)
    close(run(x), function(x))
    larger, smaller = sorted(run.report(), key=lambda r: -r.tokens)
    assert 256 * MB <= larger.bytes <= 1024 * MB
    assert 0 <= smaller.bytes <= 32 * MB


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
        for seed in range(5):
            other = make_layer(Case(name="t", T=T, E=32, K=4, D=512, I=256), BF16, "cuda", seed)
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(other.x_TD, other.logits_TE).clone()
            torch.testing.assert_close(
                got, model(other.x_TD, other.logits_TE), rtol=5e-2, atol=5e-2
            )
    check_only_graphs()


def check_only_graphs() -> None:
    """Inductor recorded what it ran, and skipped nothing."""
    assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] > 0
    assert counters["inductor"]["cudagraph_skips"] == 0


def quantized(device: str) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        q, scale = moe_ops.quantize(x * 2, "float8_e4m3fn:row")
        return q.float() * scale

    return function


def projected(device: str) -> Callable[[Tensor], Tensor]:
    weights = [torch.randn(n, 512, device=device).to(BF16) / 16 for n in (256, 128)]

    def function(x: Tensor) -> Tensor:
        wide, narrow = linears(x * 2, weights, [None, None])
        return wide[:, :128] * narrow

    return function


def attended(device: str) -> Callable[[Tensor], Tensor]:
    keys, values = torch.randn(2, 8, 2, 256, 64, device=device).to(BF16)
    mask = torch.arange(256, device=device).expand(8, -1) < 100
    return lambda x: one_query((x * 2).view(8, 8, 64), keys, values, mask, 0.125) * 2


@pytest.mark.parametrize("op", [quantized, projected, attended])
def test_inductors_own_graphs_of_one_op(op: Callable[[str], Callable[[Tensor], Tensor]]) -> None:
    function = op("cuda")
    options = moe_ops.inductor_options(extra={"triton.cudagraphs": True})
    compiled = torch.compile(function, options=options)
    for seed in range(5):
        torch.manual_seed(seed)
        x = torch.randn(8, 512, device="cuda").to(BF16)
        torch.compiler.cudagraph_mark_step_begin()
        # A value between two of float8 may be rounded to either.
        torch.testing.assert_close(compiled(x).clone(), function(x), rtol=0.13, atol=2e-2)
    check_only_graphs()


def test_reduce_overhead_with_stages_one_by_one(layer: Layer) -> None:
    def stages(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = moe_ops.route(logits, CASE.K)
        rows, order, ends = moe_ops.dispatch(x, ids, CASE.E)[:3]
        h = moe_ops.activate(moe_ops.expert_gemm(rows, layer.w13_EFD, ends))
        return moe_ops.combine(moe_ops.expert_gemm(h, layer.w2_EDI, ends), weights, order)

    compiled = torch.compile(stages, mode="reduce-overhead")
    for seed in range(5):
        x, logits = inputs(make_layer(CASE, BF16, "cuda", seed), 33)[:2]
        torch.compiler.cudagraph_mark_step_begin()
        close(compiled(x, logits), stages(x, logits))
    check_only_graphs()


def test_a_captured_layer_counts_the_tokens_of_its_calls() -> None:
    sizes = {"num_experts": 6, "top_k": 2, "hidden_size": 64, "intermediate_size": 32}
    layer = moe_ops.MoELayer(
        **sizes, balanced=True, internal_gate=True, dtype=BF16, device="cuda"
    )  # fmt: skip
    run, pairs = moe_ops.capture(layer, buckets=(4, 16)), 0
    run.warmup(torch.randn(2, 64, dtype=BF16, device="cuda"))
    assert not layer.loads.any()
    for T in (3, 4, 1, 9, 17, 3):  # 17 tokens run without a graph
        x = torch.randn(T, 64, dtype=BF16, device="cuda")
        run(x)
        pairs += 2 * T
        assert int(layer.loads.sum()) == pairs
    assert [report.refusal for report in run.report()] == [None, None]
