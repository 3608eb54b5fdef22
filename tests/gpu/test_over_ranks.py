"""Two GPUs of one host: experts over ranks by NCCL, and by stores to each other, give what one GPU
gives, eager and captured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import (
    capture,
    combine_tokens,
    dispatch_tokens,
    experts_over_ranks,
    share_experts,
    sum_ranks,
)
from moe_ops.graphs.cuda_graph import capture_call
from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ALLGATHER, AUTO, LOW_LATENCY, ParallelConfig
from moe_ops.testing import TOL, assert_close
from tests.distributed.on_gpus import (
    NEEDS_TWO,
    RANKS,
    generates_by_steps,
    on_gpus,
    replays_agree,
)
from tests.distributed.ranks import meet
from tests.distributed.shares import SPREADS, Spread, Whole, run_share
from tests.distributed.test_transformers import generated, make
from tests.gpu.captures import captured, warmed_up
from tests.layer.shards import randomize, take_share

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16
TWO = (
    *(s for s in SPREADS if s.ranks == RANKS),
    Spread(name="uneven", tokens=(7, 2)),
    Spread(name="one_sided", tokens=(0, 9)),
    Spread(name="hot", tokens=(3, 5), choose="first"),
    Spread(name="many", tokens=(300, 257)),
)
FORMATS = (
    ("", ""), ("int4:1x32", ""), ("mxfp4", ""), ("float8_e4m3fn:32x32", "float8_e4m3fn:1x32"),
)  # fmt: skip


def on_gpu(whole: Whole) -> Whole:
    for t in ("x_TD", "weights_TK", "ids_TK"):
        object.__setattr__(whole, t, getattr(whole, t).cuda())
    whole.weights.update({name: t.cuda() for name, t in whole.weights.items()})
    return whole


def every_spread(rank: int, group: str, w_format: str, x_format: str) -> None:
    for spread in TWO:
        whole = on_gpu(Whole.of(spread, BF16, w_format, x_format))
        want = whole.want().split(list(spread.tokens))[rank]
        for collective in ("gather", "exchange", "auto"):
            got = run_share(rank, group, whole, collective)
            where = f"{spread.name} by {collective} of {w_format or 'bfloat16'}"
            assert_close(got, want, TOL["experts_over_ranks", BF16], where)


@pytest.mark.parametrize(("w_format", "x_format"), FORMATS, ids=[w or "bf16" for w, _ in FORMATS])
def test_two_gpus_give_what_one_gives(w_format: str, x_format: str, tmp_path: Path) -> None:
    on_gpus(tmp_path, every_spread, w_format, x_format)


def replayed(rank: int, group: str, rows: int, replays: int) -> None:
    """A captured call, replayed with other tokens, experts and numbers of tokens each time."""
    whole = on_gpu(Whole.of(Spread(name="full", tokens=(rows, rows)), BF16))
    tables = tuple(t.cuda() for t in whole.tables())
    held = whole.held(rank, tables)
    x, weights, ids = (t.clone() for t in whole.own(rank))
    E = whole.weights["w13_EFD"].shape[0]

    def call() -> Tensor:
        return experts_over_ranks(x, weights, ids, *held.values(), *tables, rows, group, "gather")

    warmed_up(call, 3)
    graph, out = captured(call)
    generator = torch.Generator(device="cuda").manual_seed(rank)
    counts = torch.Generator().manual_seed(rank)
    for step in range(replays):
        x.normal_(generator=generator)
        ids.random_(E, generator=generator)
        used = int(torch.randint(rows + 1, (), generator=counts))
        ids[used:] = -1
        graph.replay()
        if step % 50 and step >= 20:
            continue
        got, want = out.clone(), call()
        assert torch.equal(got, want), f"replay {step} differs from an eager call"
        graph.replay()
        assert torch.equal(out, got), f"replay {step} differs from itself"
        assert not bool(got[used:].any()), f"replay {step} gave padding a result"
    del graph  # before the group goes


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_a_captured_gather_is_replayed_with_other_routing(rows: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, replayed, rows, 1000)


def own_tokens(rank: int, group: str, collective: str) -> tuple[MoELayer, MoELayer]:
    """A layer, and a rank's share of it for tokens of its own."""
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 64}
    whole = randomize(MoELayer(**sizes, dtype=BF16)).cuda()
    config = ParallelConfig.of(dp=RANKS, dp_rank=rank, expert_parallel=True, collective=collective)
    layer = MoELayer(
        **sizes, dtype=BF16, parallel=config, tokens="own", group=group, max_num_tokens=64,
        device="cuda",
    )  # fmt: skip
    take_share(whole, layer)
    return whole, layer


def captured_layer(rank: int, group: str, collective: str) -> None:
    whole, layer = own_tokens(rank, group, collective)
    run = capture(lambda x, logits: layer(x, logits, rows=x.shape[0]), buckets=(8, 64), varying=2)
    generator = torch.Generator().manual_seed(rank)
    for T in (3, 8, 40, 5, 64):
        x = torch.randn(T, 128, generator=generator).to("cuda", BF16)
        logits = torch.randn(T, 8, generator=generator).cuda()
        got = run(x, logits)
        assert_close(got, whole(x, logits), TOL["experts_over_ranks", BF16], f"{T} tokens")
    assert all(bucket.refusal is None for bucket in run.report())
    run.reset()


@pytest.mark.parametrize(
    "collective", [ALLGATHER, LOW_LATENCY, AUTO], ids=["gather", "push", "auto"]
)
def test_a_layer_is_captured_by_buckets(collective: str, tmp_path: Path) -> None:
    on_gpus(tmp_path, captured_layer, collective)


def sums(rank: int, group: str) -> None:
    for dtype in (BF16, torch.float32):
        for T in (0, 1, 7, 512):
            parts = [
                torch.randn(T, 64, generator=torch.Generator().manual_seed(r)).to("cuda", dtype)
                for r in range(RANKS)
            ]
            got = sum_ranks(parts[rank], group)
            want = (parts[0].float() + parts[1].float()).to(dtype)
            assert torch.equal(got, want), f"{T} rows of {dtype}"


def test_sums_are_rounded_once(tmp_path: Path) -> None:
    on_gpus(tmp_path, sums)


def steps(rank: int, group: str) -> None:
    """`generate` by captured steps, of one batch and of a batch for each rank."""
    import copy

    whole = make("qwen3_moe").cuda()
    ids = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(0)).cuda()
    tokens = generated(whole, ids)
    for how, mine in (({}, slice(None)), ({"tokens": "own"}, slice(2 * rank, 2 * rank + 2))):
        model = share_experts(copy.deepcopy(whole), group, **how)
        assert torch.equal(generated(model, ids[mine]), tokens[mine]), "eager"
        generates_by_steps(model, ids[mine], tokens[mine])


def test_generate_by_captured_steps(tmp_path: Path) -> None:
    on_gpus(tmp_path, steps)


def pushed_spreads(rank: int, group: str, w_format: str, x_format: str) -> None:
    for spread in TWO:
        whole = on_gpu(Whole.of(spread, BF16, w_format, x_format))
        want = run_share(rank, group, whole, "gather")
        for call in range(3):
            got = run_share(rank, group, whole, "push")
            assert torch.equal(got, want), f"{spread.name}, call {call}"


@pytest.mark.parametrize(("w_format", "x_format"), FORMATS, ids=[w or "bf16" for w, _ in FORMATS])
def test_push_gives_the_bits_of_gather(w_format: str, x_format: str, tmp_path: Path) -> None:
    on_gpus(tmp_path, pushed_spreads, w_format, x_format)


def pushed_two(rank: int, group: str, rows: int, replays: int) -> None:
    whole = on_gpu(Whole.of(Spread(name="full", tokens=(rows, rows)), BF16))
    pushed_replays(rank, group, whole, replays)


def pushed_replays(rank: int, group: str, whole: Whole, replays: int) -> None:
    """One graph by each transport, replayed side by side: each replay has other tokens, experts and
    numbers of tokens, and ranks that are late by up to a millisecond."""
    rows, tables = whole.spread.rows, tuple(t.cuda() for t in whole.tables())
    held = whole.held(rank, tables)
    x, weights, ids = (t.clone() for t in whole.own(rank))

    def call(collective: str) -> Tensor:
        return experts_over_ranks(x, weights, ids, *held.values(), *tables, rows, group, collective)

    graphs = {c: capture_call(lambda c=c: call(c), device=x.device) for c in ("gather", "push")}

    def change(device: torch.Generator, host: torch.Generator) -> None:
        x.normal_(generator=device)
        weights.uniform_(generator=device)
        ids.random_(whole.weights["w13_EFD"].shape[0], generator=device)
        ids[int(torch.randint(rows + 1, (), generator=host)) :] = -1

    replays_agree(graphs, rank, replays, change)
    del graphs  # before the group goes


@pytest.mark.parametrize(
    ("rows", "replays"), [(1, 1000), (8, 10_000), (64, 1000), (512, 300)], ids=lambda n: str(n)
)
def test_a_captured_push_gives_the_bits_of_gather(rows: int, replays: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, pushed_two, rows, replays)


def prepared_call(group: str, rows: int, D: int = 256) -> Callable[[], Tensor]:
    """There and back by push: each rank has one expert, and each token wants both."""
    tables = tuple(torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([0, 1], [0, 0]))
    ids = torch.tensor([[0, 1]], device="cuda").expand(rows, 2)
    x = torch.ones(rows, D, dtype=BF16, device="cuda")
    ids, weights = ids.contiguous(), torch.ones(rows, 2, device="cuda")

    def call() -> Tensor:
        x_GD, *_, served, splits = dispatch_tokens(
            x, weights, ids, *tables, rows, group, collective="push"
        )
        return combine_tokens(x_GD, ids, *tables, served, splits, rows, group, "push")

    return call


def captured_unprepared(rank: int, group: str) -> None:
    def replayed(rows: int) -> Tensor:
        graph, out = captured(calls[rows])
        graph.replay()
        return out.clone()

    calls = {rows: prepared_call(group, rows) for rows in (4, 2048)}
    with pytest.raises(RuntimeError, match="run the call once on every rank before the capture"):
        replayed(4)
    calls[4]()
    assert bool((replayed(4) == 2).all())
    with pytest.raises(RuntimeError, match="and cannot make it while a CUDA graph is captured"):
        replayed(2048)
    calls[2048]()
    assert bool((replayed(2048) == 2).all())
    assert bool((replayed(4) == 2).all())


def test_a_push_that_nothing_prepared_is_not_captured(tmp_path: Path) -> None:
    on_gpus(tmp_path, captured_unprepared)


LIMIT = 10  # seconds


def stuck(rank: int, group: str, replays: bool) -> None:
    """A rank that does not come: the other goes on after the limit of the group, and says so."""
    call = prepared_call(group, 8)
    call()
    captured = capture_call(call, device=torch.device("cuda", rank))
    captured.replay()
    torch.cuda.synchronize()
    if rank == 1:
        meet("named", rank, range(RANKS))
        os._exit(0)
    begin = time.monotonic()
    if replays:
        captured.replay()
    else:
        call()
    torch.cuda.synchronize()
    assert time.monotonic() - begin > LIMIT - 1
    for again in (call, captured.replay):
        with pytest.raises(RuntimeError, match=r"rank 1 of the group .* does not answer rank 0"):
            again()
    torch.ones(1, device="cuda").sum().item()  # the context lives
    meet("named", rank, range(RANKS))
    os._exit(0)  # the group cannot be taken down in order


@pytest.mark.parametrize("replays", [False, True], ids=["eager", "replayed"])
def test_a_rank_that_is_stuck_in_push_is_named(replays: bool, tmp_path: Path) -> None:
    on_gpus(tmp_path, stuck, replays, seconds=LIMIT)


def picked(rank: int, group: str) -> None:
    """`auto` takes push once the ranks know that they reach each other's memory."""
    whole, layer = own_tokens(rank, group, AUTO)
    x = torch.randn(8, 128, device="cuda").to(BF16)
    logits = torch.randn(8, 8, device="cuda")

    def transports(rows: int) -> list[str]:
        plan = moe_ops.explain(lambda x, logits: layer(x, logits, rows=rows), (x, logits)).plan
        (choice,) = (c for c in plan.choices if c.op == "experts_over_ranks")
        return [r.backend for r in choice.ranges]

    assert transports(8) == ["gather"]
    want = whole(x, logits)
    for _ in range(2):
        got = layer(x, logits, rows=8)
        assert_close(got, want, TOL["experts_over_ranks", BF16])
    assert transports(8) == ["push"]


def test_auto_takes_push(tmp_path: Path) -> None:
    on_gpus(tmp_path, picked)


CODES = (
    ("float8_e4m3fn:row", "float8_e4m3fn:row"), ("int8:row", "int8:row"),
    ("float8_e4m3fn:128x128", "float8_e4m3fn:1x128"), ("mxfp4", "mxfp8"),
)  # fmt: skip
each_code = pytest.mark.parametrize(("w_format", "x_format"), CODES, ids=[x for _, x in CODES])


def of_floats() -> Any:
    """Inside, tokens travel as floats."""
    module = import_module("moe_ops.ops.experts_over_ranks")
    return patch.object(module, "why_floats", lambda layer: "asked for")


def codes_sent(rank: int, group: str, w_format: str, x_format: str) -> None:
    """By every transport the bits of floats, and of one GPU where one rank serves a token."""
    together = Spread(name="together", tokens=(9, 4), choose="together")
    # Kernels of other numbers of rows round h elsewhere, so that codes differ.
    tol = TOL["experts", torch.int8 if x_format == "int8:row" else torch.float8_e4m3fn]
    for spread in (*TWO, together):
        whole = on_gpu(Whole.of(spread, BF16, w_format, x_format, 512))
        assert whole.sends_codes()
        one = whole.want().split(list(spread.tokens))[rank]
        for collective in ("gather", "exchange", "push", "auto"):
            where = f"{spread.name} by {collective}"
            got = run_share(rank, group, whole, collective)
            with of_floats():
                want = run_share(rank, group, whole, collective)
            assert torch.equal(got, want), where
            assert_close(got, one, tol, where)


@each_code
def test_codes_give_the_bits_of_floats(w_format: str, x_format: str, tmp_path: Path) -> None:
    on_gpus(tmp_path, codes_sent, w_format, x_format)


def codes_replayed(rank: int, group: str, collective: str, rows: int, replays: int) -> None:
    """A graph that sends codes, and one that sends floats, replayed side by side."""
    spread = Spread(name="full", tokens=(rows, rows))
    whole = on_gpu(Whole.of(spread, BF16, *CODES[2], 512))
    assert whole.sends_codes()
    tables = tuple(t.cuda() for t in whole.tables())
    held = whole.held(rank, tables)
    x, weights, ids = (t.clone() for t in whole.own(rank))
    w13, w2 = held.pop("w13_EFD"), held.pop("w2_EDI")

    def call() -> Tensor:
        return experts_over_ranks(
            x, weights, ids, w13, w2, *tables, rows, group, collective, **held, **whole.options
        )

    with of_floats():
        graphs = {"floats": capture_call(call, device=x.device)}
    graphs["codes"] = capture_call(call, device=x.device)

    def change(device: torch.Generator, host: torch.Generator) -> None:
        x.normal_(generator=device)
        weights.uniform_(generator=device)
        ids.random_(8, generator=device)
        ids[int(torch.randint(rows + 1, (), generator=host)) :] = -1

    replays_agree(graphs, rank, replays, change)
    del graphs  # before the group goes


@pytest.mark.parametrize("collective", ["gather", "push"])
@pytest.mark.parametrize(("rows", "replays"), [(1, 500), (8, 1000), (256, 200)], ids=str)
def test_captured_codes(collective: str, rows: int, replays: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, codes_replayed, collective, rows, replays)
