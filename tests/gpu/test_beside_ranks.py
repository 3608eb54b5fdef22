"""Two GPUs of one host: what runs beside the exchange, and what watches it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from moe_ops import sum_ranks
from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.ranks.watch import Watch
from tests.distributed.on_gpus import NEEDS_TWO, RANKS, on_gpus
from tests.distributed.ranks import meet
from tests.gpu.captures import captured

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16


def watched(rank: int, group: str) -> None:
    """Rank 1 replays twice and rank 0 three times: rank 0 is told so, and goes on without it."""
    x = torch.ones(2, 4, device="cuda")
    sum_ranks(x, group)
    graph, out = captured(lambda: sum_ranks(x, group))
    meet("captured", rank, range(RANKS))  # or one of them is late
    with Watch(group, seconds=5) as watch:
        for _ in range(2):
            graph.replay()
            watch.launched()
        for _ in range(20):  # other captures go on while a thread looks after the replays
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                time.sleep(0.02)
                x + 1
        torch.cuda.synchronize()
        watch.check()
        assert out.eq(RANKS).all()
        if rank == 0:
            graph.replay()
            watch.launched()
            torch.cuda.synchronize()
            with pytest.raises(RuntimeError, match=r"replay 3 .* rank 1 did not launch it"):
                watch.check()
        meet("named", rank, range(RANKS))
    os._exit(0)  # what was aborted cannot be destroyed


def test_a_rank_that_does_not_replay_is_named(tmp_path: Path) -> None:
    on_gpus(tmp_path, watched)


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
    graph, replayed = captured(lambda: layer(x, logits))
    for step in range(200):
        x.normal_()
        want = shared(x)
        eager = layer(x, logits)
        assert torch.equal(eager[0], want), f"eager call {step}"
        graph.replay()
        assert torch.equal(replayed[0], want), f"replay {step}"
        assert torch.equal(replayed[1], eager[1]), f"replay {step}, routed"
    del graph


def test_shared_experts_run_beside_the_exchange(tmp_path: Path) -> None:
    on_gpus(tmp_path, beside_the_exchange)
