"""Two GPUs of one host: experts change ranks between replays, and what was captured goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_ops import capture
from moe_ops.layer import MoELayer, rebalance_layers
from moe_ops.parallel.config import ALLGATHER, LOW_LATENCY, ParallelConfig
from moe_ops.testing import TOL, assert_close
from tests.distributed.on_gpus import NEEDS_TWO, RANKS, on_gpus
from tests.layer.shards import randomize, take_share

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16
E, K, D = 8, 2, 128


def hot(T: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens, and logits that prefer a few experts, others in every step."""
    g = torch.Generator().manual_seed(100 * step + 10 * T + rank)
    favourites = torch.randperm(E, generator=torch.Generator().manual_seed(step))
    logits = torch.randn(T, E, generator=g) - 0.7 * favourites
    return torch.randn(T, D, generator=g).to("cuda", BF16), logits.cuda()


def rebalanced(rank: int, group: str, collective: str, quant: str | None) -> None:
    sizes = {"num_experts": E, "top_k": K, "hidden_size": D, "intermediate_size": 64}
    whole = randomize(MoELayer(**sizes, dtype=BF16, quant=quant)).cuda()
    config = ParallelConfig.of(dp=RANKS, dp_rank=rank, expert_parallel=True, collective=collective)
    layer = MoELayer(
        **sizes, dtype=BF16, quant=quant, parallel=config, tokens="own", group=group,
        max_num_tokens=64, redundant_experts=2, balanced=True, device="cuda",
    )  # fmt: skip
    take_share(whole, layer)
    assert layer.loads is not None
    found = [*layer.expert_tensors().values(), layer.loads, layer.rank_of_P, layer.slot_of_P]
    addresses = [t.data_ptr() for t in found]
    # The layer is an argument, so that its counts are seen.
    run = capture(
        lambda x, logits, layer: layer(x, logits, rows=x.shape[0]), buckets=(8, 64), varying=2
    )
    moved = 0
    for step in range(4):
        counts = (3, 8, 40)
        for T in counts:
            given = hot(T, step, rank)
            want = whole(*given)
            assert_close(
                run(*given, layer), want, TOL["experts_over_ranks", BF16], f"{step}: {T} tokens"
            )
        assert int(layer.loads.sum()) == K * sum(counts), "neither padding nor a warm-up counts"
        moved += sum(len(moves.pairs) for moves in rebalance_layers([layer], group).moves)
        assert not layer.loads.any()
    assert moved > 0
    assert [t.data_ptr() for t in found] == addresses
    assert [(bucket.tokens, bucket.refusal) for bucket in run.report()] == [(8, None), (64, None)]
    run.reset()


@pytest.mark.parametrize("quant", [None, "int4:1x32", "float8_e4m3fn:32x32"], ids=str)
@pytest.mark.parametrize("collective", [ALLGATHER, LOW_LATENCY], ids=["gather", "push"])
def test_graphs_go_on_after_experts_moved(
    collective: str, quant: str | None, tmp_path: Path
) -> None:
    on_gpus(tmp_path, rebalanced, collective, quant)
