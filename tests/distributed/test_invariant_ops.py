"""Ops over ranks in batch invariant calls: rows by choices, what is refused, and what is sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import combine_tokens, experts, experts_over_ranks, plan_halves, sum_ranks, two_halves
from moe_ops.ops.experts_over_ranks import sent_as, traffic
from moe_ops.parallel.config import HIGH_THROUGHPUT
from moe_ops.ranks.links import LINKS, Traffic
from moe_ops.ranks.transport import EXCHANGE, GATHER, PUSH
from moe_ops.registry.invariance import PLANNED, Refused, invariant
from moe_ops.testing import Tol, assert_close
from tests.distributed.attention_block import share_of_block, whole_block
from tests.distributed.ranks import fake_group, results, threads
from tests.distributed.shares import SPREADS, Spread, Whole, run_share
from tests.distributed.test_invariant import same
from tests.distributed.test_transformers import WIDE
from tests.distributed.test_transformers import make as make_model

BF16 = torch.bfloat16
CLOSE = Tol(1e-5, "a token's experts are summed in another order")
UNEVEN = next(s for s in SPREADS if s.name == "uneven")
each_transport = pytest.mark.parametrize("collective", [GATHER, EXCHANGE])


def share(rank: int, group: str, whole: Whole, collective: str) -> Tensor:
    with invariant():
        return run_share(rank, group, whole, collective)


def in_one(whole: Whole) -> Tensor:
    """What one process makes of all tokens."""
    with torch.no_grad(), invariant():
        return whole.want()


@each_transport
@pytest.mark.parametrize("spread", SPREADS, ids=lambda s: s.name)
def test_ids_of_any_kind_have_the_bits_of_one_process(spread: Spread, collective: str) -> None:
    whole = Whole.of(spread, BF16)
    if len(whole.ids_TK) > 2:  # an expert twice, and weights that mean nothing
        whole.ids_TK[0] = whole.ids_TK[0, :1]
        whole.ids_TK[1, 1], whole.weights_TK[1, 1] = -1, float("nan")
        whole.ids_TK[2, 0] = -1
    found = results(spread.ranks, share, whole, collective)
    assert same(torch.cat(found), in_one(whole))


def planned(rank: int, group: str, whole: Whole, plan: str) -> Tensor:
    """What a compiled graph calls."""
    tables = whole.tables()
    held = whole.held(rank, tables)
    args = (*whole.own(rank), held["w13_EFD"], held["w2_EDI"], *tables)
    run = torch.ops.moe_ops.experts_over_ranks.planned
    return run(*args, whole.spread.rows, group, plan.partition(";")[2] or plan, plan=plan)


@each_transport
def test_plans_of_graphs_say_it_to_ranks(collective: str) -> None:
    whole = Whole.of(UNEVEN, torch.float32)
    want = in_one(whole)
    got, usual = (
        torch.cat(results(4, planned, whole, f"{said}{collective}")) for said in (PLANNED, "")
    )
    assert same(got, want) and not same(usual, want)
    assert_close(usual, want, CLOSE)


def gradients(rank: int, group: str, whole: Whole, collective: str, obeys: bool) -> list[Tensor]:
    """A rank's result and the gradients of its tokens, their weights and its experts."""
    tables = whole.tables()
    held = whole.held(rank, tables)
    x, weights, ids = whole.own(rank)
    leaves = [t.clone().requires_grad_() for t in (x, weights, held["w13_EFD"], held["w2_EDI"])]
    x, weights, w13, w2 = leaves
    with torch.enable_grad():
        with invariant(obeys):
            out = experts_over_ranks(
                x, weights, ids, w13, w2, *tables, whole.spread.rows, group, collective
            )
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@each_transport
def test_training_forward_has_the_bits_and_gradients_are_close(collective: str) -> None:
    whole = Whole.of(UNEVEN, torch.float32)
    obeyed, usual = (results(4, gradients, whole, collective, obeys) for obeys in (True, False))
    x, weights = (t.clone().requires_grad_() for t in (whole.x_TD, whole.weights_TK))
    with torch.enable_grad(), invariant():
        want = experts(x, weights, whole.ids_TK, **whole.weights)
    assert same(torch.cat([found[0] for found in obeyed]), want.detach())
    for got, expected in zip(obeyed, usual, strict=True):
        for one, other in zip(got, expected, strict=True):
            assert_close(one, other, Tol(1e-4, "sums of products in another order"))


def halves(rank: int, group: str, whole: Any, config: dict[str, Any]) -> tuple[bool, bool]:
    """Whether halves are run, and give the bits of one batch."""
    mine = share_of_block(whole, rank, 2, group, config=config)
    x = torch.randn(3 + rank, 5, 64, generator=torch.Generator().manual_seed(rank))
    with invariant():
        plan = plan_halves(mine, x, halves=True)
        return plan.split, same(two_halves(mine, x, plan=plan), mine(x))


@pytest.mark.parametrize("collective", ["allgather_reducescatter", HIGH_THROUGHPUT])
def test_halves_of_a_batch_have_the_bits_of_all(collective: str) -> None:
    config = {"dp": 2, "expert_parallel": True, "collective": collective}
    assert results(2, halves, whole_block(), config) == [(True, True)] * 2


def parts(rank: int, group: str, layout: str) -> None:
    """Rows that are sums of what a rank serves of a token."""
    tables = (torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    ids, ones = torch.tensor([[0, 1]]), torch.ones(1, 2)
    token_N = torch.empty(0, dtype=torch.int32)
    splits = torch.empty(2, 0, dtype=torch.int64)
    more: dict[str, Any] = {}
    y = torch.ones(2, 8)
    if layout == "batched":
        slots = torch.tensor([[0, -1], [-1, 0]], dtype=torch.int32)
        more = {"layout": layout, "weights_GK": ones.expand(2, 2), "slot_GK": slots}
        y, token_N = y.expand(1, 2, 8), torch.ones(1, dtype=torch.int32)
    with invariant():
        combine_tokens(y, ids, *tables, token_N, splits, 1, group, **more)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("rows", "the sum of those experts of a token that one rank serves"),
        ("batched", "take experts_over_ranks, which sends tokens in 'rows'"),
    ],
)
def test_rows_that_are_sums_are_refused(layout: str, said: str) -> None:
    for error in threads(2, parts, layout):
        assert isinstance(error, NotImplementedError) and said in str(error), error


def of_shards(rank: int, group: str, collective: str) -> None:
    whole = Whole.of(Spread(name="two", tokens=(2, 2)), torch.float32)
    everywhere = torch.full((8,), -1, dtype=torch.int32)
    args = (*whole.own(rank), *whole.weights.values(), everywhere, torch.arange(8).int())
    with invariant():
        experts_over_ranks(*args, 2, group, collective)


@each_transport
def test_experts_in_shards_are_refused(collective: str) -> None:
    for error in threads(2, of_shards, collective):
        assert isinstance(error, NotImplementedError), error
        assert "of which each of 2 ranks holds a shard" in str(error)


def differently(rank: int, group: str, whole: Whole) -> None:
    with invariant(rank == 0):
        run_share(rank, group, whole, GATHER)


def test_ranks_that_differ_in_it_are_named() -> None:
    for error in threads(4, differently, Whole.of(UNEVEN, torch.float32)):
        assert "the ranks differ in batch_invariant (rank 0: True, rank 1: False" in str(error)


def test_sums_of_parts_say_in_which_order() -> None:
    for ranks, refused in ((2, False), (3, True)):
        with fake_group(ranks) as group:
            call = sum_ranks.call(torch.ones(2, 4), group)
            said = sum_ranks.backends["all_reduce"].arithmetic(call)
            assert isinstance(said, Refused) == refused
            names = {sum_ranks.backends[n].arithmetic(call) for n in ("shares", PUSH, "reference")}
            assert len(names) == 1 and (refused or said in names)


def test_bytes_are_those_of_a_row_for_each_choice() -> None:
    usual = Traffic(ranks=4, experts=64, top_k=8, there=4160, back=4096)
    rows = Traffic(ranks=4, experts=64, top_k=8, there=4160, back=4096, by_choice=True)
    for transport in (GATHER, EXCHANGE, PUSH):
        assert rows.bytes_there(transport, 5) == usual.bytes_there(transport, 5)
    assert rows.bytes_back(GATHER, 5) == 8 * usual.bytes_back(GATHER, 5) == 3 * 5 * 8 * 4096
    assert rows.bytes_back(EXCHANGE, 5) == rows.bytes_back(PUSH, 5) == 3 / 4 * 8 * 5 * 4096
    assert rows.most_pushed(LINKS["cuda"]) < usual.most_pushed(LINKS["cuda"])
    most = (t.most_gathered(LINKS["cuda"]) or 0 for t in (rows, usual))
    assert 0 < next(most) < next(most)


def test_calls_say_how_rows_come_back() -> None:
    with fake_group(4) as group:
        whole = Whole.of(UNEVEN, BF16)
        tables = whole.tables()
        args = (*whole.own(0), *whole.weights.values(), *tables, 8, group)
        call = experts_over_ranks.call(*args)
        assert not traffic(call).by_choice and not sent_as(call.layer)
        with invariant():
            assert traffic(call).by_choice
            assert sent_as(call.layer) == "each of 3 choices comes back as a row of 128 bytes"


def of_a_model(rank: int, group: str, whole: Any, how: dict[str, str], given: Any) -> Tensor:
    """What a rank's share of a transformers model's experts makes of its tokens."""
    import moe_ops

    model = moe_ops.share_experts(copy.deepcopy(whole), group, **how)
    mine = slice(None) if not how else slice(6 * rank, 6 * rank + 6)
    with invariant():
        found: Tensor = model.model.layers[0].mlp.experts(*(t[mine] for t in given))
    return found


WAYS: dict[str, dict[str, str]] = {
    "replicated": {}, "own": {"tokens": "own"},
    "own_exchange": {"tokens": "own", "collective": EXCHANGE},
}  # fmt: skip


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_models_that_are_shared_obey(how: dict[str, str]) -> None:
    whole = make_model("qwen3_moe", WIDE)
    held = whole.model.layers[0].mlp.experts
    x, weights, ids = torch.randn(12, 64), torch.rand(12, 2), torch.randint(8, (12, 2))
    with torch.no_grad(), invariant():
        want = experts(x, weights, ids, held.gate_up_proj, held.down_proj)
    found = results(2, of_a_model, whole, how, (x, ids, weights))
    assert all(same(got, want) for got in found) if not how else same(torch.cat(found), want)
