"""Four and eight GPUs of one host: what holds of two holds of more, to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_ops import sum_ranks
from moe_ops.graphs.cuda_graph import capture_call
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group, all_gather
from moe_ops.registry.using import using
from moe_ops.testing import TOL, assert_close
from tests.distributed.on_gpus import needs, on_gpus, replays_agree
from tests.distributed.shares import Spread, Whole, run_share
from tests.gpu.test_over_ranks import FORMATS, on_gpu, pushed_replays

BF16 = torch.bfloat16
each_number = pytest.mark.parametrize(
    "ranks", [pytest.param(R, marks=needs(R), id=f"{R} ranks") for R in (4, 8)]
)


def spreads(ranks: int) -> tuple[Spread, ...]:
    return (
        Spread(name="even", tokens=(4,) * ranks),
        Spread(name="uneven", tokens=tuple(3 * r % 8 for r in range(ranks))),
        Spread(name="one_sided", tokens=(0,) * (ranks - 1) + (9,)),
        Spread(name="hot", tokens=(3,) * ranks, choose="first"),
        Spread(name="together", tokens=(5,) * ranks, choose="together"),
        Spread(name="nowhere", tokens=(2,) * ranks, choose="none"),
        Spread(name="many", tokens=tuple(300 - r for r in range(ranks))),
    )


def every_spread(rank: int, group: str, ranks: int) -> None:
    """All transports give what one GPU gives, and push the bits of gather, again and again."""
    for spread, (w_format, x_format) in itertools.product(spreads(ranks), FORMATS):
        whole = on_gpu(Whole.of(spread, BF16, w_format, x_format))
        want = whole.want().split(list(spread.tokens))[rank]
        got = {c: run_share(rank, group, whole, c) for c in ("gather", "exchange", "push", "auto")}
        for collective, own in got.items():
            where = f"{spread.name} by {collective} of {w_format or 'bfloat16'}"
            assert_close(own, want, TOL["experts_over_ranks", BF16], where)
        for call in range(3):
            again = run_share(rank, group, whole, "push")
            assert torch.equal(again, got["gather"]), f"{spread.name} of {w_format}, call {call}"


@each_number
def test_ranks_give_what_one_gpu_gives(ranks: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, every_spread, ranks, ranks=ranks)


def pushed(rank: int, group: str, ranks: int) -> None:
    """Graphs by gather and by push, whose replays have other tokens, experts and numbers of
    tokens, and ranks that are late."""
    for rows, replays in ((1, 1000), (8, 10_000), (512, 300)):
        whole = on_gpu(Whole.of(Spread(name="full", tokens=(rows,) * ranks), BF16))
        pushed_replays(rank, group, whole, replays)


@each_number
def test_replays_have_the_bits_of_gather(ranks: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, pushed, ranks, ranks=ranks)


def summed(rank: int, group: str) -> None:
    """Graphs of sums by stores, and of gathered parts that are added in the order of ranks."""
    device = torch.device("cuda", rank)
    assert peers.connect(group, device).reason is None
    every = Group.of(group)
    for T, D, replays in ((1, 2048, 2000), (64, 2048, 2000), (2048, 2048, 300)):
        x_TD = torch.zeros(T, D, device=device, dtype=BF16)

        def by_push(x_TD: Tensor = x_TD) -> Tensor:
            with using("push", sum_ranks):
                return sum_ranks(x_TD, group)

        def in_order(x_TD: Tensor = x_TD) -> Tensor:
            total_TD = torch.zeros(x_TD.shape, device=device)
            for part_TD in all_gather(x_TD, every).split(x_TD.shape[0]):
                total_TD = total_TD + part_TD
            return total_TD.to(BF16)

        graphs = {"push": capture_call(by_push, device=device),
                  "in order": capture_call(in_order, device=device)}  # fmt: skip
        replays_agree(graphs, rank, replays, lambda g, _, x_TD=x_TD: x_TD.normal_(generator=g))
        said = [torch.empty_like(graphs["push"].output) for _ in range(every.size)]
        graphs["push"].replay()
        dist.all_gather(said, graphs["push"].output)
        assert all(torch.equal(other, said[0]) for other in said), "ranks differ"
        del graphs  # before the group goes


@each_number
def test_sums_are_those_in_the_order_of_ranks(ranks: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, summed, ranks=ranks)
