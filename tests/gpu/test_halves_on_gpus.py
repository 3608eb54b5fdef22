"""Two GPUs of one host: half a batch computes while the other half's tokens travel."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from moe_ops import plan_halves, two_halves
from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ALLGATHER, AUTO, HIGH_THROUGHPUT, ParallelConfig
from moe_ops.testing import Tol
from tests.distributed.attention_block import Block
from tests.distributed.on_gpus import NEEDS_TWO, RANKS, on_gpus
from tests.gpu.captures import captured

pytestmark = NEEDS_TWO
BF16 = torch.bfloat16
ROUNDED = Tol(2e-2, "products of fewer rows are rounded after other sums")
TURNED_OVER = 0.02  # of the tokens
HIDDEN = 256


def made(rank: int, group: str, collective: str) -> Block:
    config = ParallelConfig.of(dp=RANKS, dp_rank=rank, expert_parallel=True, collective=collective)
    layer = MoELayer(
        6, 2, HIDDEN, 128, parallel=config, tokens="own", group=group, max_num_tokens=1024,
        dtype=BF16, device="cuda",
    )  # fmt: skip
    block = Block(layer, HIDDEN, dtype=BF16, device="cuda").eval()
    generator = torch.Generator("cuda")
    for name, p in block.named_parameters():
        generator.manual_seed(rank if name.startswith("experts.") else 0)
        if p.dim() > 1:
            p.normal_(std=0.05, generator=generator)
    return block


def given(rank: int, sequences: int, tokens: int = 128) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rank)
    return torch.randn(sequences, tokens, HIDDEN, generator=generator, device="cuda").to(BF16)


def close(got: Tensor, want: Tensor, what: str) -> None:
    """Tokens are alike, but for a few whose choice of experts rounding turned over."""
    assert got.shape == want.shape
    if not want.numel():
        return
    error_T = (got.float() - want.float()).abs().amax(-1).flatten() / want.float().abs().max()
    other = float((error_T > ROUNDED.rel).float().mean())
    assert other <= TURNED_OVER, f"{what}: {other:.1%} of the tokens differ"


def as_one_batch(rank: int, group: str) -> None:
    """Halves of ranks with many, few and no sequences."""
    for collective in (ALLGATHER, HIGH_THROUGHPUT, AUTO):
        block = made(rank, group, collective)
        for many in ((6, 6), (3, 5), (1, 4), (0, 2)):
            x = given(rank, many[rank])
            plan = plan_halves(block, x, halves=True)
            assert plan.split, plan.reason
            want = block(x)
            for _ in range(3):
                got = two_halves(block, x, plan=plan)
                close(got, want, f"{collective} {many}")


def replayed(rank: int, group: str) -> None:
    """A graph of both halves of three blocks, between whose replays inputs change and ranks are
    late."""
    blocks = [made(rank, group, ALLGATHER) for _ in range(3)]
    x = given(rank, 6)
    plan = plan_halves(blocks, x, halves=True, captured=True)
    for _ in range(3):
        two_halves(blocks, x, plan=plan)
    graph, together = captured(lambda: two_halves(blocks, x, plan=plan))
    chance = torch.Generator().manual_seed(rank)
    for step in range(100):
        x.normal_()
        want = two_halves(blocks, x, plan=plan)
        whole = blocks[2](blocks[1](blocks[0](x)))
        if step % 3 == rank:
            torch.cuda._sleep(int(torch.randint(2**20, (), generator=chance)))
        graph.replay()
        assert torch.equal(together, want), f"replay {step}"
        close(together, whole, f"replay {step}")
    del graph


def test_halves_are_as_one_batch(tmp_path: Path) -> None:
    on_gpus(tmp_path, as_one_batch)


def test_a_graph_holds_both_halves_of_several_blocks(tmp_path: Path) -> None:
    on_gpus(tmp_path, replayed)
