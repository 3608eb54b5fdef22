"""Ranks with the same tokens, whose shared experts run beside routed ones, get the whole sum."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.passes.inductor.compiled import inductor_options
from moe_ops.testing import Tol, assert_close
from tests.distributed.ranks import processes, results
from tests.layer.shards import randomize, take_share

CLOSE = Tol(1e-5, "a token's experts are summed in another order")
RANKS = 2
SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
}  # fmt: skip


class Shared(nn.Module):
    """A gated shared expert; of several ranks each has so many rows of its first products."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first, self.up = nn.Linear(64, width, bias=False), nn.Linear(64, width, bias=False)
        self.down = nn.Linear(width, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.first(x)) * self.up(x))
        return out

    def share(self, rank: int, ranks: int) -> Shared:
        """A rank's part of the sum."""
        held = Shared(48 // ranks)
        for name in ("first", "up"):
            getattr(held, name).weight.copy_(getattr(self, name).weight.chunk(ranks)[rank])
        held.down.weight.copy_(self.down.weight.chunk(ranks, 1)[rank])
        return held


def layer_of(rank: int, group: str, whole: MoELayer, reduction: str, ep: bool) -> MoELayer:
    config = ParallelConfig.of(tp=RANKS, tp_rank=rank, expert_parallel=ep)
    shared: Any = whole.shared_experts
    layer = MoELayer(
        **SIZES, parallel=config, tokens="replicated", reduce_results=group, beside=True,
        shared_experts=shared.share(rank, RANKS) if reduction == "partial" else shared,
        shared_reduction=reduction,
    )  # fmt: skip
    take_share(whole, layer)
    return layer


def given() -> tuple[MoELayer, Tensor, Tensor]:
    torch.manual_seed(0)
    whole = randomize(MoELayer(**SIZES, shared_experts=Shared()))
    return whole, torch.randn(7, 64), torch.randn(7, 6)


def eager(rank: int, group: str, reduction: str, ep: bool, whole: MoELayer, *args: Any) -> Tensor:
    out: Tensor = layer_of(rank, group, whole, reduction, ep)(*args)
    return out


@pytest.mark.parametrize("ep", [True, False], ids=["experts", "shards"])
@pytest.mark.parametrize("reduction", ["partial", "replicated"])
@torch.no_grad()
def test_each_rank_gets_the_sum(reduction: str, ep: bool) -> None:
    whole, x, logits = given()
    for rank, got in enumerate(results(RANKS, eager, reduction, ep, whole, x, logits)):
        assert_close(got, whole(x, logits), CLOSE, f"rank {rank}")


def compiled(rank: int, group: str) -> None:
    """Both reductions in graphs with the pair of ops, which a CPU runs in order."""
    whole, x, logits = given()
    want = whole(x, logits)
    importlib.import_module("moe_ops.passes.run_beside").has_streams = lambda device: True
    for reduction in ("partial", "replicated"):
        layer = layer_of(rank, group, whole, reduction, True).requires_grad_(False)
        options = inductor_options(beside=True)
        torch._dynamo.reset()
        with config.patch(fx_graph_cache=False):  # the first rank would save for the others
            got = torch.compile(layer, options=options)(x, logits)
        (run,) = options["post_grad_custom_post_pass"].runs
        assert [n.rule for n in run.rewrites].count("run_beside") == 1, run.refusals
        assert_close(got, want, CLOSE, reduction)


@pytest.mark.slow
def test_compiled_ranks_get_the_sum(tmp_path: Path) -> None:
    processes(RANKS, tmp_path, compiled)
