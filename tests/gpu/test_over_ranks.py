"""Two GPUs of one host: experts over ranks by NCCL give what one GPU gives, eager and captured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from moe_ops import capture, experts_over_ranks, share_experts, sum_ranks
from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.ranks.watch import Watch
from moe_ops.testing import TOL, assert_close
from tests.distributed.shares import SPREADS, Spread, Whole, run_share
from tests.distributed.test_transformers import generated, make
from tests.layer.shards import randomize, take_share

RANKS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS,
        reason=f"needs {RANKS} GPUs, there are {torch.cuda.device_count()}",
    ),
]

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


def main(rank: int, folder: Path, body: Callable[..., None], args: Any) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), RANKS)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, device_id=device)
    with torch.no_grad():
        body(rank, dist.group.WORLD.group_name, *args)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def two_gpus(folder: Path, body: Callable[..., None], *args: Any) -> None:
    mp.spawn(main, (folder, body, args), nprocs=RANKS)


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
    two_gpus(tmp_path, every_spread, w_format, x_format)


def replayed(rank: int, group: str, rows: int, replays: int) -> None:
    """A captured call, replayed with other tokens, experts and numbers of tokens each time."""
    whole = on_gpu(Whole.of(Spread(name="full", tokens=(rows, rows)), BF16))
    tables = tuple(t.cuda() for t in whole.tables())
    held = whole.held(rank, tables)
    x, weights, ids = (t.clone() for t in whole.own(rank))
    E = whole.weights["w13_EFD"].shape[0]

    def call() -> Tensor:
        return experts_over_ranks(x, weights, ids, *held.values(), *tables, rows, group, "gather")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
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
    two_gpus(tmp_path, replayed, rows, 1000)


def watched(rank: int, group: str) -> None:
    """Rank 1 replays twice and rank 0 three times: rank 0 is told so, and goes on without it."""
    x = torch.ones(4, device="cuda")
    sum_ranks(x, group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sum_ranks(x, group)
    with Watch(group, seconds=2) as watch:
        for _ in range(2):
            graph.replay()
            watch.launched()
        torch.cuda.synchronize()
        watch.check()
        assert out.tolist() == [RANKS] * 4
        if rank == 0:
            graph.replay()
            watch.launched()
            start = time.monotonic()
            torch.cuda.synchronize()
            assert time.monotonic() - start < 10
            with pytest.raises(RuntimeError, match=r"replay 3 .* rank 1 did not launch it"):
                watch.check()
        else:
            time.sleep(8)
    os._exit(0)  # what was aborted cannot be destroyed


def test_a_rank_that_does_not_replay_is_named(tmp_path: Path) -> None:
    two_gpus(tmp_path, watched)


def beside_the_exchange(rank: int, group: str) -> None:
    """A layer with shared experts, which run on a stream of their own, in order of another one."""
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 64}
    shared = torch.nn.Sequential(*(torch.nn.Linear(256, 256, dtype=BF16) for _ in range(24)))
    config = ParallelConfig.of(dp=RANKS, dp_rank=rank, expert_parallel=True)
    layer = MoELayer(
        **sizes, dtype=BF16, parallel=config, tokens="own", group=group, max_num_tokens=64,
        shared_experts=shared, shared_reduction="replicated", separate=True,
    ).cuda()  # fmt: skip
    logits = torch.randn(64, 8).cuda()
    x = torch.randn(64, 256).to("cuda", BF16)
    for _ in range(3):
        layer(x, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x, logits)
    for step in range(200):
        x.normal_()
        want = shared(x)
        eager = layer(x, logits)
        assert torch.equal(eager[0], want), f"eager call {step}"
        graph.replay()
        assert torch.equal(captured[0], want), f"replay {step}"
        assert torch.equal(captured[1], eager[1]), f"replay {step}, routed"
    del graph


def test_shared_experts_run_beside_the_exchange(tmp_path: Path) -> None:
    two_gpus(tmp_path, beside_the_exchange)


def captured_layer(rank: int, group: str) -> None:
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 64}
    whole = randomize(MoELayer(**sizes, dtype=BF16)).cuda()
    config = ParallelConfig.of(dp=RANKS, dp_rank=rank, expert_parallel=True)
    layer = MoELayer(
        **sizes, dtype=BF16, parallel=config, tokens="own", group=group, max_num_tokens=64,
        device="cuda",
    )  # fmt: skip
    take_share(whole, layer)
    run = capture(lambda x, logits: layer(x, logits, rows=x.shape[0]), buckets=(8, 64), varying=2)
    generator = torch.Generator().manual_seed(rank)
    for T in (3, 8, 40, 5, 64):
        x = torch.randn(T, 128, generator=generator).to("cuda", BF16)
        logits = torch.randn(T, 8, generator=generator).cuda()
        got = run(x, logits)
        assert_close(got, whole(x, logits), TOL["experts_over_ranks", BF16], f"{T} tokens")
    assert all(bucket.refusal is None for bucket in run.report())
    run.reset()


def test_a_layer_is_captured_by_buckets(tmp_path: Path) -> None:
    two_gpus(tmp_path, captured_layer)


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
    two_gpus(tmp_path, sums)


def steps(rank: int, group: str) -> None:
    """`generate` by captured steps, of one batch and of a batch for each rank."""
    import copy

    import moe_ops

    whole = make("qwen3_moe").cuda()
    ids = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(0)).cuda()
    tokens = generated(whole, ids)
    for how, mine in (({}, slice(None)), ({"tokens": "own"}, slice(2 * rank, 2 * rank + 2))):
        model = share_experts(copy.deepcopy(whole), group, **how)
        assert torch.equal(generated(model, ids[mine]), tokens[mine]), "eager"
        fast = moe_ops.compile(model)
        for _ in range(4):  # the third prompt of a size is captured
            assert torch.equal(generated(fast, ids[mine]), tokens[mine])
        assert moe_ops.generation_report(fast), "it fell back to transformers' own"


def test_generate_by_captured_steps(tmp_path: Path) -> None:
    two_gpus(tmp_path, steps)
