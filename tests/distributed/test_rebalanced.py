"""Experts that change ranks in lockstep: the results and the addresses stay, loads get even."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import sum_ranks
from moe_ops.layer import MoELayer, rebalance_layers
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.load_balance import imbalance
from moe_ops.parallel.moves import Moves
from moe_ops.parallel.over_ranks import move_over_ranks
from moe_ops.ranks.groups import Group, all_gather
from moe_ops.testing import Tol, assert_close
from tests.chosen import in_turn
from tests.distributed.ranks import processes, results, threads
from tests.layer.shards import randomize, take_share

CLOSE = Tol(1e-5, "a token's experts are summed in another order")
SIZES: dict[str, Any] = {
    "num_experts": 10, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
}  # fmt: skip


def hot(T: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens, and logits that prefer a few experts."""
    g = torch.Generator().manual_seed(seed)
    favourites = torch.randperm(10, generator=torch.Generator().manual_seed(seed % 3))
    return torch.randn(T, 64, generator=g), torch.randn(T, 10, generator=g) - 0.7 * favourites


def layers_of(
    rank: int, group: str, ranks: int, wholes: list[MoELayer], own: bool, options: dict[str, Any]
) -> list[MoELayer]:
    config = ParallelConfig.of(tp=ranks, tp_rank=rank, expert_parallel=True)
    more: dict[str, Any] = {"tokens": "replicated"}
    if own:
        config = ParallelConfig.of(dp=ranks, dp_rank=rank, expert_parallel=True)
        more = {"tokens": "own", "group": group, "max_num_tokens": 64}
    made = [
        MoELayer(**SIZES, **options, **more, parallel=config, balanced=True) for _ in wholes
    ]  # fmt: skip
    return [take_share(whole, layer) for whole, layer in zip(wholes, made, strict=True)]


def steps(
    rank: int, group: str, ranks: int, wholes: list[MoELayer], own: bool, options: dict[str, Any]
) -> tuple[list[float], int]:
    layers = layers_of(rank, group, ranks, wholes, own, options)
    found = [t for layer in layers for t in (*layer.expert_tensors().values(), layer.loads)]
    addresses = [t.data_ptr() for t in found]
    gains, moved = [], 0
    for step in range(3):
        given = hot(24, 10 * step + (rank if own else 0))
        for i, (whole, layer) in enumerate(zip(wholes, layers, strict=True)):
            got = layer(*given)
            if not own:
                got = sum_ranks(got, group)
            assert_close(got, whole(*given), CLOSE, f"layer {i} after {step} rebalancings")
        counted = torch.stack([layer.loads for layer in layers])
        if own:
            counted = all_gather(counted[None], Group.of(group)).sum(0)
        now = torch.stack([layer.physical_to_logical for layer in layers])
        done = rebalance_layers(layers, group)
        assert torch.equal(done.before, imbalance(counted, now, ranks))
        assert not any(bool(layer.loads.any()) for layer in layers)
        gains.append(float(done.before.max() - done.after.max()))
        moved += sum(len(moves.pairs) for moves in done.moves)
    assert [t.data_ptr() for t in found] == addresses
    return gains, moved


OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (4, {"bias": True}),
    "redundant": (4, {"redundant_experts": 3}),
    "fused_shared": (3, {"redundant_experts": 2, "shared_experts": 1}),
    "int4": (2, {"quant": "int4:1x32", "redundant_experts": 2}),
    "fp8": (2, {"quant": "float8_e4m3fn:32x32"}),
}


@in_turn(
    pytest.mark.parametrize("own", [True, False], ids=["own", "replicated"]),
    pytest.mark.parametrize(("ranks", "options"), OPTIONS.values(), ids=OPTIONS),
)
@torch.no_grad()
def test_ranks_go_on_with_the_same_results(ranks: int, options: dict[str, Any], own: bool) -> None:
    alone = {k: v for k, v in options.items() if k != "redundant_experts"}
    wholes = [randomize(MoELayer(**SIZES, **alone), seed) for seed in range(2)]
    found = results(ranks, steps, ranks, wholes, own, options)
    assert all(one == found[0] for one in found), "every rank plans alike"
    gains, moved = found[0]
    assert moved > 0 and max(gains) > 0


def in_processes(rank: int, group: str) -> None:
    torch.manual_seed(0)
    steps(rank, group, 2, [randomize(MoELayer(**SIZES))], True, {"redundant_experts": 2})


@pytest.mark.every
def test_two_processes_with_gloo(tmp_path: Path) -> None:
    processes(2, tmp_path, in_processes)


def apart(rank: int, group: str) -> None:
    (layer,) = layers_of(rank, group, 2, [randomize(MoELayer(**SIZES))], True, {})
    if rank == 1:
        layer.physical_to_logical.copy_(layer.physical_to_logical.flip(0))
    rebalance_layers([layer], group)


def test_ranks_that_hold_other_experts_than_thought_are_named() -> None:
    for error in threads(2, apart):
        assert isinstance(error, RuntimeError) and "ranks 1 of" in str(error)


def moved(rank: int, group: str, sizes: tuple[int, ...], pairs: Any) -> Tensor:
    start = sum(sizes[:rank])
    t = torch.arange(start, start + sizes[rank], dtype=torch.float64)[:, None].repeat(1, 3)
    code = t.to(torch.float8_e4m3fn)
    move_over_ranks({"t": t, "code": code}, Moves(sum(sizes), pairs), sizes, group)
    assert torch.equal(code.double(), t)
    return t[:, 0]


@pytest.mark.parametrize(
    ("sizes", "pairs"),
    [
        ((2, 2), ()),
        ((2, 2), ((0, 1), (1, 0))),
        ((2, 2), ((0, 2), (2, 0), (3, 1))),
        ((3, 2, 2), ((1, 6), (6, 3), (3, 0), (0, 4), (2, 1), (1, 2), (5, 5))),
        ((1, 3, 2), ((0, 1), (0, 2), (0, 3), (0, 5))),
    ],
    ids=["none", "within", "between", "cycles", "spread"],
)
def test_rows_move_between_ranks(sizes: tuple[int, ...], pairs: Any) -> None:
    want = list(range(sum(sizes)))
    for source, to in pairs:
        want[to] = source
    assert torch.cat(results(len(sizes), moved, sizes, pairs)).tolist() == want


def test_moves_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes=\(2, 2\) are of 2 ranks and 4 rows, but the"):
        move_over_ranks({"t": torch.zeros(2, 1)}, Moves(4, ()), (2, 2), "")
    layer = MoELayer(**SIZES, balanced=True)
    assert rebalance_layers([layer], "").moves[0].pairs == ()
    with pytest.raises(ValueError, match="make it with balanced=True and expert parallelism"):
        rebalance_layers([MoELayer(**SIZES)], "")
