"""Two GPUs of one host in batch invariant calls: the bits that one GPU gives, by every transport,
eager and captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts, experts_over_ranks
from moe_ops.graphs.cuda_graph import capture_call
from moe_ops.layer import MoELayer
from moe_ops.parallel.config import AUTO, ParallelConfig
from moe_ops.registry.invariance import invariant
from tests.distributed.on_gpus import NEEDS_TWO, on_gpus
from tests.distributed.shares import Spread, Whole, run_share
from tests.gpu.test_over_ranks import TWO, on_gpu
from tests.layer.shards import randomize, take_share

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16
FORMATS = (
    ("", ""), ("int4:1x32", ""), ("mxfp4", ""), ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    ("int8:row", "int8:row"),
)  # fmt: skip
TRANSPORTS = ("gather", "exchange", "push")


def every_spread(rank: int, group: str, w_format: str, x_format: str) -> None:
    differs = False
    for spread in TWO:
        whole = on_gpu(Whole.of(spread, BF16, w_format, x_format))
        with invariant():
            want = whole.want().split(list(spread.tokens))[rank]
        for collective in TRANSPORTS:
            with invariant():
                got = run_share(rank, group, whole, collective)
            assert torch.equal(got, want), f"{spread.name} by {collective}"
            differs |= not torch.equal(run_share(rank, group, whole, collective), want)
    assert differs, "the mode changes nothing"


@pytest.mark.parametrize(("w_format", "x_format"), FORMATS, ids=[w or "bf16" for w, _ in FORMATS])
def test_two_gpus_give_the_bits_of_one(w_format: str, x_format: str, tmp_path: Path) -> None:
    on_gpus(tmp_path, every_spread, w_format, x_format)


def alone(rank: int, group: str, collective: str) -> None:
    """A token of this rank by itself, among copies, beside NaN and huge values of both ranks."""
    for rows in (1, 7, 64, 300):
        whole = on_gpu(Whole.of(Spread(name="full", tokens=(rows, rows)), BF16))
        first = 0 if rank == 0 else rows
        one = [t[first : first + 1] for t in (whole.x_TD, whole.weights_TK, whole.ids_TK)]
        with invariant():
            want = experts(*one, **whole.weights)
        for value in (None, 1e30, float("nan")):
            if value is not None:
                whole.x_TD[1:rows], whole.x_TD[rows + 1 :] = value, value
            with invariant():
                got = run_share(rank, group, whole, collective)
            assert torch.equal(got[:1], want), f"{rows} rows beside {value}"


@pytest.mark.parametrize("collective", TRANSPORTS)
def test_neighbours_of_both_ranks_change_no_bit(collective: str, tmp_path: Path) -> None:
    on_gpus(tmp_path, alone, collective)


def replayed(rank: int, group: str, collective: str, rows: int, replays: int) -> None:
    """A captured call, replayed with other tokens and experts, against one GPU each time."""
    whole = on_gpu(Whole.of(Spread(name="full", tokens=(rows, rows)), BF16))
    tables = tuple(t.cuda() for t in whole.tables())
    held = whole.held(rank, tables)
    x, weights, ids = (t.clone() for t in whole.own(rank))
    E = whole.weights["w13_EFD"].shape[0]

    def call() -> Tensor:
        with invariant():
            return experts_over_ranks(
                x, weights, ids, *held.values(), *tables, rows, group, collective
            )

    call()
    captured = capture_call(call)
    generator = torch.Generator(device="cuda").manual_seed(rank)
    for step in range(replays):
        x.normal_(generator=generator)
        ids.random_(E, generator=generator)
        captured.replay()
        with invariant():
            want = experts(x, weights, ids, **whole.weights)
        assert torch.equal(captured.output, want), f"replay {step}"
    del captured  # before the group goes


@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("collective", ["gather", "push"])
def test_replays_have_the_bits_of_one_gpu(collective: str, rows: int, tmp_path: Path) -> None:
    on_gpus(tmp_path, replayed, collective, rows, 200)


SIZES: dict[str, Any] = {
    "num_experts": 8, "top_k": 3, "hidden_size": 256, "intermediate_size": 128, "dtype": BF16,
}  # fmt: skip


def replicated(rank: int, group: str) -> None:
    """A layer whose tokens are replicated, and whose parts the ranks add."""
    whole = randomize(MoELayer(**SIZES)).cuda()
    config = ParallelConfig.of(tp=2, tp_rank=rank, expert_parallel=True, collective=AUTO)
    layer = MoELayer(**SIZES, parallel=config, tokens="replicated", reduce_results=group).cuda()
    take_share(whole, layer)
    g = torch.Generator(device="cuda").manual_seed(0)
    for T in (1, 5, 64, 700):
        x = torch.randn(T, 256, generator=g, device="cuda", dtype=BF16)
        logits = torch.randn(T, 8, generator=g, device="cuda")
        with invariant():
            got = layer(x, logits)
            want = torch.cat([whole(x[t : t + 1], logits[t : t + 1]) for t in range(T)])
        assert torch.equal(got, want), f"{T} tokens"


def test_replicated_tokens_have_the_bits_of_one_gpu(tmp_path: Path) -> None:
    on_gpus(tmp_path, replicated)
