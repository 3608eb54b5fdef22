"""FlashInfer's kernels on a GPU, called through our op: numbers, bits, graphs and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import experts, flashinfer_options, using
from moe_ops.backends.flashinfer import arguments, cutlass, package
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import TOL, Case, assert_close
from tests.flashinfer.layers import call_of, stored, weights_of
from tests.gpu.captures import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        package.version() is None, reason=f"{package.DISTRIBUTION} is not installed"
    ),
]
CASE = Case(name="wide", T=1024, E=16, K=4, D=1024, I=512)
TOKENS = (1, 7, 128, 1024)
F8 = torch.float8_e4m3fn
UP_GATE, CHUNKS = "flashinfer.up_gate", "flashinfer.chunks"
Tokens = Callable[..., Tensor]  # of x_TD, weights_TK and ids_TK
WAYS = {
    "bfloat16": ("flashinfer_cutlass", UP_GATE, "bfloat16", torch.bfloat16),
    "float8": ("flashinfer_cutlass", UP_GATE, "float8", F8),
    "blocks": ("flashinfer_cutlass", UP_GATE, "blocks", F8),
    "mxfp4": ("flashinfer_cutlass", UP_GATE, "mxfp4", torch.bfloat16),
    "cute_dsl": ("flashinfer_cute_dsl", CHUNKS, "bfloat16", torch.bfloat16),
}


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, ExpertsCall, ExpertsCall, torch.dtype]:
    """The backend, a call as weights are loaded and as it reads them, and whose tolerance holds."""
    name, layout, formats, dtype = request.param
    loaded = on_gpu(call_of(formats, case=CASE))
    call = stored(loaded, layout)
    skip_where_machines_lack(experts.backends[name].refusal("cuda", CASE.T, call))
    return name, loaded, call, dtype


def skip_where_machines_lack(reason: str | None) -> None:
    """Of a refusal: what the machine lacks is skipped, what the call lacks is a fault."""
    if reason is not None and ("not installed" in reason or "compute capability" in reason):
        pytest.skip(reason)
    assert reason is None


def on_gpu(call: ExpertsCall, device: str = "cuda:0") -> ExpertsCall:
    found = {f.name: getattr(call, f.name) for f in fields(call)}
    return replace(call, **{n: t.to(device) for n, t in found.items() if isinstance(t, Tensor)})


def first(call: ExpertsCall, tokens: int) -> ExpertsCall:
    t = tokens
    return replace(call, x_TD=call.x_TD[:t], weights_TK=call.weights_TK[:t], ids_TK=call.ids_TK[:t])


def run(call: ExpertsCall) -> Tensor:
    out: Tensor = experts(*experts.arguments.flat(call))
    return out


def test_numbers(way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype]) -> None:
    name, loaded, call, dtype = way
    for tokens in TOKENS:
        assert experts.pick(first(call, tokens)).name == name
        want = experts.body(first(loaded, tokens))
        got = run(first(call, tokens))
        assert_close(got, want, TOL["experts", dtype], f"{name}, {tokens} tokens")


def test_measured_tactics_are_right_too(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    name, loaded, call, dtype = way
    want = experts.body(first(loaded, 128))
    with flashinfer_options(autotune=True):
        for _ in range(2):
            got = run(first(call, 128))
            assert_close(got, want, TOL["experts", dtype], f"{name}, tuned")


def test_pairs_that_go_nowhere_and_experts_elsewhere(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    name, loaded, call, dtype = way
    ids = loaded.ids_TK[:128].clone()
    ids[::3, 0] = -1
    loaded, call = (replace(first(c, 128), ids_TK=ids) for c in (loaded, call))
    assert_close(run(call), experts.body(loaded), TOL["experts", dtype], name)


def moved(t: Tensor) -> Tensor:
    """The same values, which begin between two words of memory."""
    return torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape)


def test_tokens_and_ids_that_begin_between_words(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    name, loaded, call, dtype = way
    want = experts.body(first(loaded, 7))
    some = first(call, 7)
    some = replace(some, **{n: moved(getattr(some, n)) for n in ("x_TD", "ids_TK", "weights_TK")})
    for _ in range(3):
        assert_close(run(some), want, TOL["experts", dtype], name)


def test_a_call_on_another_gpu_than_the_current_one(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    name, loaded, call, dtype = way
    want = experts.body(first(loaded, 7))
    some = on_gpu(first(call, 7), "cuda:1")
    for _ in range(4):
        assert_close(run(some).to(want.device), want, TOL["experts", dtype], name)
    assert torch.cuda.current_device() == 0


def half(call: ExpertsCall) -> ExpertsCall:
    """The second half of the experts, of which the rest lies elsewhere."""
    E = CASE.E // 2
    slots = torch.cat((torch.full((E,), -1), torch.arange(E))).int().cuda()
    parts = {n: t[E:].contiguous() for n, t in weights_of(call).items()}
    return replace(call, expert_map=slots, expert_offset=E, **parts)


def biased(call: ExpertsCall) -> ExpertsCall:
    sizes = {"b13_EF": 2 * CASE.I, "b2_ED": CASE.D}
    made = {n: call.x_TD.new_empty(CASE.E, size).normal_() for n, size in sizes.items()}
    return replace(call, **made)


@pytest.mark.parametrize("made", [lambda call: call, biased, half], ids=["plain", "biases", "half"])
def test_calls_like_two_before_go_straight_to_the_function(
    made: Callable[[ExpertsCall], ExpertsCall],
) -> None:
    """With the same bits as by names, also in a graph."""
    loaded = made(on_gpu(call_of("bfloat16", case=CASE)))
    loaded = replace(loaded, weights_TK=loaded.weights_TK.float())
    call = stored(loaded, UP_GATE)
    skip_where_machines_lack(cutlass.supports(call))
    for tokens in TOKENS:
        some = first(call, tokens)
        by_names = cutlass.run(some)
        want = experts.body(first(loaded, tokens))
        assert_close(by_names, want, TOL["experts", torch.bfloat16], f"{tokens} tokens")
        for _ in range(2):
            run(some)
        args = experts.arguments.flat(some)
        alike = experts.memo.find(tuple(map(type, args)))
        found = None if alike is None else alike.find(args)
        assert found is not None and found.direct is not None
        assert torch.equal(run(some), by_names)
        graph, out = captured_warm(lambda some=some: run(some))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, by_names)


def test_a_hundred_calls_give_the_same_bits(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    _, _, call, _ = way
    for tokens in (1, 128):
        some = first(call, tokens)
        want = run(some)
        assert all(torch.equal(run(some), want) for _ in range(100))


def test_a_graph_follows_tokens_and_routing(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    name, loaded, call, dtype = way
    for tokens in (1, 128):
        held = first(call, tokens)
        held = replace(
            held, **{n: getattr(held, n).clone() for n in ("x_TD", "ids_TK", "weights_TK")}
        )
        graph, out = captured_warm(lambda held=held: run(held))
        for shift in (0, 1, 5):
            held.x_TD.copy_(loaded.x_TD.roll(shift, 0)[:tokens])
            held.ids_TK.copy_((loaded.ids_TK.roll(shift, 0)[:tokens] + shift) % CASE.E)
            held.weights_TK.copy_(loaded.weights_TK.roll(shift, 0)[:tokens])
            out.fill_(float("nan"))
            graph.replay()
            want = experts.body(
                replace(loaded, x_TD=held.x_TD, ids_TK=held.ids_TK, weights_TK=held.weights_TK)
            )
            assert_close(out, want, TOL["experts", dtype], f"{name}, {tokens} tokens by {shift}")


def test_few_tokens_run_again_after_many(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    """Some of FlashInfer's workspaces grow with the most rows that any call had."""
    name, loaded, call, dtype = way
    for tokens in (7, 128, 7):
        got, want = run(first(call, tokens)), experts.body(first(loaded, tokens))
        assert_close(got, want, TOL["experts", dtype], f"{name}, {tokens} tokens")


def captured_warm(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a call that ran before, and its result."""
    call()
    torch.cuda.synchronize()
    return captured(call)


def on_one_stream(call: Tokens, args: list[Tensor]) -> Tokens:
    """Warmed up where it is captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*args)
        torch.cuda.synchronize()
        graph, out = captured(lambda: call(*args), stream)

    def replay(*values: Tensor) -> Tensor:
        for held, value in zip(args, values, strict=True):
            held.copy_(value)
        graph.replay()
        return out

    return replay


def by_buckets(call: Tokens, args: list[Tensor]) -> Tokens:
    """Padded to one of several sizes."""
    runner = moe_ops.capture(call, buckets=(8, 128), varying=3)
    runner.warmup(*args)
    assert [bucket.refusal for bucket in runner.report()] == [None, None]
    return runner


def by_trees(call: Tokens, args: list[Tensor]) -> Tokens:
    """By Inductor, whose warm-up must leave nothing in the pool of its graphs."""
    compiled = torch.compile(call, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def step(*values: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out: Tensor = compiled(*values)
        return out

    for _ in range(3):  # compiles, warms up, records
        step(*args)
    return step


@pytest.mark.parametrize("captured_by", [on_one_stream, by_buckets, by_trees])
def test_other_ways_to_capture(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
    captured_by: Callable[[Tokens, list[Tensor]], Tokens],
) -> None:
    name, loaded, call, dtype = way
    rest = experts.arguments.flat(call)[3:]

    def function(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        out: Tensor = experts(x_TD, weights_TK, ids_TK, *rest)
        return out

    for tokens in (128, 7):
        one = first(call, tokens)
        replay = captured_by(function, [t.clone() for t in (one.x_TD, one.weights_TK, one.ids_TK)])
        for shift in (0, 1):
            values = [t.roll(shift, 0) for t in (one.x_TD, one.weights_TK, one.ids_TK)]
            want = experts.body(
                replace(loaded, **dict(zip(("x_TD", "weights_TK", "ids_TK"), values, strict=True)))
            )
            assert_close(replay(*values), want, TOL["experts", dtype], f"{name}, {tokens} tokens")


def test_it_launches_what_flashinfer_itself_launches(overlapping: None) -> None:
    call = stored(on_gpu(call_of("bfloat16", case=CASE)), UP_GATE)
    skip_where_machines_lack(cutlass.supports(call))
    call = replace(first(call, 1), weights_TK=call.weights_TK[:1].float())
    to = arguments.routed(call, equal=True)
    launch = cutlass.launch_of(call, to)
    without = {**launch.given, **cutlass.tensors_of(call, to)}
    given = dict(without)
    given["workspace_buffer"] = cutlass.workspace(launch, call.x_TD.device)
    args = (call.x_TD, call.weights_TK, call.ids_TK, call.w13_EFD, call.w2_EDI)

    def direct() -> Tensor:
        out = torch.empty_like(call.x_TD)
        launch.function(output=out, **given)
        return out

    def allocating() -> Tensor:
        """As calls of FlashInfer are written by default: it allocates a workspace for each."""
        out = torch.empty_like(call.x_TD)
        launch.function(output=out, **without)
        return out

    def ours() -> Tensor:
        out: Tensor = experts(*args, layout=UP_GATE)
        return out

    assert torch.equal(ours(), direct())
    assert torch.equal(ours(), allocating())
    # What that takes on the host is counted in tests/flashinfer/test_contenders.py.
    theirs, launched = (launches(captured_warm(f)[0].replay) for f in (direct, ours))
    assert launched == theirs


def launches(replay: Callable[[], None]) -> list[str]:
    """The kernels of a replay, in order."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        replay()
        torch.cuda.synchronize()
    ran = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    return [event.name for event in sorted(ran, key=lambda event: event.time_range.start)]


def test_a_forced_backend_runs_or_says_why(
    way: tuple[str, ExpertsCall, ExpertsCall, torch.dtype],
) -> None:
    name, loaded, call, _ = way
    with using(name, "experts"):
        run(first(call, 7))
        with pytest.raises(NotImplementedError, match=r"moe_ops\.prepare\(model, 'flashinfer"):
            run(first(loaded, 7))
