"""Two GPUs of one host: sums of parts that ranks store to each other are the definition's."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import share_experts, sum_ranks
from moe_ops.graphs.cuda_graph import capture_call
from moe_ops.ranks import peers
from moe_ops.ranks.links import most_parts
from moe_ops.registry.using import using
from tests.distributed.on_gpus import (
    NEEDS_TWO,
    RANKS,
    generates_by_steps,
    on_gpus,
    replays_agree,
)
from tests.distributed.ranks import meet
from tests.distributed.test_transformers import generated, make
from tests.gpu.captures import captured
from tests.gpu.test_over_ranks import prepared_call

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16
SIZES = ((0, 64), (1, 64), (7, 33), (1, 2048), (64, 2048), (300, 1000), (4000, 2048))


def connected(rank: int, group: str) -> None:
    assert peers.connect(group, torch.device("cuda", rank)).reason is None


def equal(rank: int, group: str, dtype: torch.dtype) -> None:
    connected(rank, group)
    for T, D in SIZES:
        for seed in range(5):
            every = [torch.Generator().manual_seed(seed * RANKS + r) for r in range(RANKS)]
            parts = [torch.randn(T, D, generator=g).to("cuda", dtype) for g in every]
            mine = parts[rank] if seed else parts[rank].T.contiguous().T  # strided at first
            with using("push", sum_ranks):
                got = sum_ranks(mine, group)
            want = (parts[0].float() + parts[1].float()).to(dtype)
            assert torch.equal(got, want), f"{T} x {D}, seed {seed}"
    with using("push", sum_ranks):
        whole = torch.arange(65, device="cuda").to(dtype)
        got = sum_ranks(whole[1:].view(1, 64), group)  # at no multiple of 16 bytes
        assert torch.equal(got, 2 * whole[1:].view(1, 64))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_parts_are_summed_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    on_gpus(tmp_path, equal, dtype)


def replayed(rank: int, group: str, T: int, D: int, replays: int) -> None:
    """Graphs of two sums, with tokens there and back between them, and of all-reduces; other values
    in each replay, and ranks that are late by up to a millisecond."""
    connected(rank, group)
    x = torch.zeros(T, D, device="cuda", dtype=BF16)
    exchange = prepared_call(group, 8)

    def call(how: str) -> Tensor:
        with using(how, sum_ranks):
            first = sum_ranks(x, group)
            if how == "push":
                first = first + (exchange().sum() - 8 * 256 * 2)
            return sum_ranks(first * 0.5 + rank, group)

    graphs = {
        how: capture_call(lambda how=how: call(how), device=x.device)
        for how in ("push", "all_reduce")
    }
    replays_agree(graphs, rank, replays, lambda device, _: x.normal_(generator=device))
    del graphs  # before the group goes


@pytest.mark.parametrize(
    ("T", "D", "replays"), [(1, 2048, 2000), (64, 2048, 2000), (2048, 2048, 300)], ids=str
)
def test_replays_have_the_bits_of_an_all_reduce(
    T: int, D: int, replays: int, tmp_path: Path
) -> None:
    on_gpus(tmp_path, replayed, T, D, replays)


def picked(rank: int, group: str) -> None:
    x = torch.ones(8, 256, device="cuda", dtype=BF16)
    larger = torch.ones(4096, 256, device="cuda", dtype=BF16)

    def backend() -> str:
        plan = moe_ops.explain(lambda x: sum_ranks(x * 2, group), (x,)).plan
        (choice,) = (c for c in plan.choices if c.op == "sum_ranks")
        return choice.ranges[0].backend

    assert backend() == "all_reduce"
    assert sum_ranks.refusals(x, group)["push"] == peers.UNKNOWN
    connected(rank, group)
    assert backend() == "push"
    assert sum_ranks.pick(sum_ranks.call(x, group)).name == "push"
    most = most_parts(RANKS, 2 * 256)
    wide = torch.empty(most + 1, 256, device="cuda", dtype=BF16)
    reason = str(sum_ranks.refusals(wide, group)["push"])
    assert f"takes at most {most} rows, got {most + 1}" in reason
    grad = torch.ones(8, 256, device="cuda", requires_grad=True)
    with torch.enable_grad():
        assert "has no gradients" in str(sum_ranks.refusals(grad, group)["push"])
    sum_ranks(x, group)
    for t, known in ((x, True), (larger, False)):

        def call(t: Tensor = t, known: bool = known) -> Tensor:
            assert (sum_ranks.pick(sum_ranks.call(t, group)).name == "push") == known
            return sum_ranks(t, group)

        graph, out = captured(call)
        graph.replay()
        assert bool((out == 2).all())
        del graph


def test_push_is_picked_once_ranks_are_connected(tmp_path: Path) -> None:
    on_gpus(tmp_path, picked)


def steps(rank: int, group: str) -> None:
    """`generate` of one batch, eagerly and by captured steps."""
    whole = make("qwen3_moe").cuda()
    ids = torch.randint(64, (4, 5), generator=torch.Generator().manual_seed(0)).cuda()
    tokens = generated(whole, ids)
    model = share_experts(copy.deepcopy(whole), group, collective="push")
    assert torch.equal(generated(model, ids), tokens)
    assert peers.memory(group, 1, peers.SUMS) is not None, "nothing was stored"
    generates_by_steps(model, ids, tokens)


def test_generate_sums_by_push(tmp_path: Path) -> None:
    on_gpus(tmp_path, steps)


LIMIT = 10  # seconds


def stuck(rank: int, group: str) -> None:
    connected(rank, group)
    x = torch.ones(4, 64, device="cuda")
    sum_ranks(x, group)
    captured = capture_call(lambda: sum_ranks(x, group), device=x.device)
    captured.replay()
    torch.cuda.synchronize()
    if rank == 1:
        meet("named", rank, range(RANKS))
        os._exit(0)
    begin = time.monotonic()
    captured.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - begin > LIMIT - 1
    with pytest.raises(RuntimeError, match=r"sum_ranks: rank 1 of the group .* does not answer"):
        sum_ranks(x, group)
    meet("named", rank, range(RANKS))
    os._exit(0)  # the group cannot be taken down in order


def test_a_rank_without_its_part_is_named(tmp_path: Path) -> None:
    on_gpus(tmp_path, stuck, seconds=LIMIT)
