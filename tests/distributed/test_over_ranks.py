"""Experts over ranks give what one process gives, whatever the tokens, transport and format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import combine_tokens, dispatch_tokens, experts, experts_over_ranks, sum_ranks
from moe_ops.ranks.agree import most_tokens
from moe_ops.ranks.tables import EVERY, HOME
from moe_ops.testing import TOL, Tol, assert_close
from tests.chosen import in_turn
from tests.distributed.ranks import results
from tests.distributed.shares import SPREADS, Spread, Whole, run_share

TRANSPORTS = ("gather", "exchange")
SPREAD = {spread.name: spread for spread in SPREADS}
SUMMED = Tol(1e-6, "a token's sum is in parts, one for each rank")
FORMATS = (("int4:1x32", ""), ("float8_e4m3fn:32x32", "float8_e4m3fn:1x32"), ("mxfp4", ""))

each_transport = pytest.mark.parametrize("collective", TRANSPORTS)


@in_turn(
    each_transport,
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]),
    pytest.mark.parametrize("spread", SPREADS, ids=lambda s: s.name),
)
def test_ranks_give_what_one_process_gives(
    spread: Spread, dtype: torch.dtype, collective: str
) -> None:
    whole = Whole.of(spread, dtype)
    got = torch.cat(results(spread.ranks, run_share, whole, collective))
    tol = SUMMED if dtype is torch.float32 else TOL["experts_over_ranks", dtype]
    assert_close(got, whole.want(), tol)


@each_transport
@pytest.mark.parametrize(("w_format", "x_format"), FORMATS, ids=[f"{w}_{x}" for w, x in FORMATS])
@pytest.mark.parametrize("name", ["uneven", "one_expert"])
def test_quantized_experts(name: str, w_format: str, x_format: str, collective: str) -> None:
    whole = Whole.of(SPREAD[name], torch.float32, w_format, x_format)
    got = torch.cat(results(whole.spread.ranks, run_share, whole, collective))
    assert_close(got, whole.want(), SUMMED)


@each_transport
def test_experts_may_lie_anywhere(collective: str) -> None:
    whole = Whole.of(SPREAD["uneven"], torch.float32)
    for seed in range(3):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
        got = torch.cat(results(4, run_share, whole, collective, order))
        assert_close(got, whole.want(), SUMMED)


@each_transport
def test_the_same_call_gives_the_same_bits(collective: str) -> None:
    whole = Whole.of(SPREAD["uneven"], torch.bfloat16)
    first, second = (torch.cat(results(4, run_share, whole, collective)) for _ in range(2))
    assert torch.equal(first, second)


def sent(rank: int, group: str, whole: Whole, collective: str) -> tuple[Tensor, ...]:
    return dispatch_tokens(
        *whole.own(rank), *whole.tables(), whole.spread.rows, group, collective=collective
    )


@pytest.mark.parametrize("name", SPREAD)
def test_a_token_is_one_row_on_each_rank_that_it_needs(name: str) -> None:
    whole = Whole.of(SPREAD[name], torch.float32)
    R, rows = whole.spread.ranks, whole.spread.rows
    gathered = results(R, sent, whole, "gather")
    exchanged = results(R, sent, whole, "exchange")
    rank_of_P, slot_of_P = whole.tables()
    for here in range(R):
        x_GD, _, _, ids_GK, token_N, splits_2R = gathered[here]
        assert (x_GD.shape[0], token_N.numel(), splits_2R.numel()) == (R * rows, 0, 0)
        served_G = (ids_GK >= 0).any(1)
        for got, want in zip(exchanged[here][:4], gathered[here][:4], strict=True):
            torch.testing.assert_close(got, want[served_G], rtol=0, atol=0)
        # Each slot is what the tables say of the token's experts.
        for source in range(R):
            x, _, ids = whole.own(source)
            known = ids.clamp(min=0).long()
            mine = (ids >= 0) & (rank_of_P[known] == here)
            slots = torch.where(mine, slot_of_P[known], -1)
            part = slice(source * rows, source * rows + x.shape[0])
            assert torch.equal(ids_GK[part], slots)
            assert torch.equal(x_GD[part], x)
        padding = torch.cat([torch.arange(rows) >= n for n in whole.spread.tokens])
        assert bool((ids_GK[padding] == -1).all())
        assert bool(x_GD[padding].isnan().all()), "what holds no token must show when it is read"
        _, received = exchanged[here][5].tolist()
        assert sum(received) == int(served_G.sum())


def by_hand(rank: int, group: str, whole: Whole, collective: str) -> Tensor:
    """`experts_over_ranks` of its parts, with NaN wherever a row is not served."""
    tables, (x, weights, ids) = whole.tables(), whole.own(rank)
    held, rows = whole.held(rank, tables), whole.spread.rows
    x_GD, _, weights_GK, ids_GK, *handle = dispatch_tokens(
        x, weights, ids, *tables, rows, group, collective=collective
    )
    unserved_G1 = (ids_GK < 0).all(1, keepdim=True)
    nan = float("nan")
    weights_GK = weights_GK.masked_fill(ids_GK < 0, nan)
    y_GD = experts(x_GD.masked_fill(unserved_G1, nan), weights_GK, ids_GK, **held)
    y_GD = y_GD.masked_fill(unserved_G1, nan)
    return combine_tokens(y_GD, ids, *tables, *handle, rows, group, collective)


@each_transport
@pytest.mark.parametrize("name", ["uneven", "one_expert", "nowhere"])
def test_slots_that_hold_no_token_are_never_read(name: str, collective: str) -> None:
    whole = Whole.of(SPREAD[name], torch.float32)
    got = torch.cat(results(whole.spread.ranks, by_hand, whole, collective))
    assert_close(got, whole.want(), SUMMED)


def float8_rows(rank: int, group: str, collective: str) -> tuple[Tensor, ...]:
    x = torch.arange(6.0).view(3, 2).add(rank).to(torch.float8_e4m3fn)
    scale = torch.full((3, 1), 120 + rank, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ids = torch.tensor([[0], [1], [0]])
    tables = (torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    return dispatch_tokens(
        x, torch.ones(3, 1), ids, *tables, 3, group, scale, collective=collective
    )


@each_transport
def test_codes_and_their_scales_travel_as_they_are(collective: str) -> None:
    for here, (x_GD, scale_GS, _, ids_GK, *_) in enumerate(results(2, float8_rows, collective)):
        served = (ids_GK >= 0).any(1)
        rows = torch.tensor([[0, 2], [1, 1]])[here].unique()
        want = torch.cat([torch.arange(6.0).view(3, 2).add(r)[rows] for r in range(2)])
        assert x_GD.dtype is torch.float8_e4m3fn
        assert torch.equal(x_GD.float()[served], want)
        bits = scale_GS.view(torch.uint8)[served, 0]
        assert bits.tolist() == [120] * len(rows) + [121] * len(rows)


def at_home(rank: int, group: str, collective: str, where: int) -> Tensor:
    """An expert that every rank holds, each a multiple of it: 1, 2, 3 times."""
    x = torch.full((2, 4), 1.0 + rank)
    one = torch.zeros(2, 1, dtype=torch.int64)
    tables = (torch.tensor([where], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    rows = dispatch_tokens(x, torch.ones(2, 1), one, *tables, 2, group, collective=collective)
    y_GD = rows[0] * (rank + 1)
    return combine_tokens(y_GD, one, *tables, *rows[4:], 2, group, collective)


@each_transport
@pytest.mark.parametrize("where", [EVERY, HOME], ids=["every", "home"])
def test_experts_that_every_rank_holds(where: int, collective: str) -> None:
    for rank, got in enumerate(results(3, at_home, collective, where)):
        factor = 1 + 2 + 3 if where == EVERY else rank + 1
        assert torch.equal(got, torch.full((2, 4), (1.0 + rank) * factor))


def summed(rank: int, group: str, T: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return sum_ranks(torch.randn(T, 8, generator=generator).to(dtype), group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("T", [0, 1, 4, 7])
def test_parts_are_added_once_and_alike(T: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(T, 8, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    want = torch.stack([part.to(dtype) for part in parts]).sum(0, dtype=torch.float32).to(dtype)
    for got in results(4, summed, T, dtype):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def summed_back(rank: int, group: str, factors_RTD: Tensor) -> Tensor:
    """The gradient of a rank's part, of losses in which each rank has factors of its own."""
    part = torch.zeros_like(factors_RTD[rank], requires_grad=True)
    with torch.enable_grad():
        loss = (sum_ranks(part, group) * factors_RTD[rank]).sum()
        return torch.autograd.grad(loss, part)[0]


@pytest.mark.parametrize("T", [0, 1, 7])
def test_a_part_has_the_gradients_of_all_ranks(T: int) -> None:
    factors_RTD = torch.randn(3, T, 8)
    for got in results(3, summed_back, factors_RTD):
        torch.testing.assert_close(got, factors_RTD.sum(0))


def gradients(rank: int, group: str, whole: Whole, collective: str) -> tuple[Tensor, ...]:
    tables, (x, weights, ids) = whole.tables(), whole.own(rank)
    held = whole.held(rank, tables)
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, *held.values())]
    with torch.enable_grad():
        out = experts_over_ranks(
            leaves[0], leaves[1], ids, leaves[2], leaves[3], *tables, whole.spread.rows, group,
            collective,
        )  # fmt: skip
        return torch.autograd.grad(out.square().sum(), leaves)


@each_transport
@pytest.mark.parametrize("name", ["uneven", "one_sided"])
def test_gradients_are_those_of_one_process(name: str, collective: str) -> None:
    whole = Whole.of(SPREAD[name], torch.float32)
    leaves = [t.clone().requires_grad_() for t in (whole.x_TD, whole.weights_TK)]
    stacked = [t.clone().requires_grad_() for t in whole.weights.values()]
    loss = experts(*leaves, whole.ids_TK, *stacked).square().sum()
    want = torch.autograd.grad(loss, (*leaves, *stacked))
    got = [
        torch.cat(parts)
        for parts in zip(*results(whole.spread.ranks, gradients, whole, collective), strict=True)
    ]
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(g, w, Tol(1e-5, "sums in another order, twice"), f"gradient {i}")


def of_scales(rank: int, group: str, collective: str) -> Tensor:
    """The gradient of the scales of codes, which have none, of a loss in which each rank has a
    factor of its own."""
    scale, ids = torch.ones(3, 1, requires_grad=True), torch.tensor([[0], [1], [0]])
    tables = (torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    given = (torch.ones(3, 2, dtype=torch.int8), torch.ones(3, 1), ids, *tables, 4, group)
    with torch.enable_grad():
        _, scale_GS, _, ids_GK, *_ = dispatch_tokens(*given, scale, collective=collective)
        loss = scale_GS.masked_fill(ids_GK < 0, 0).sum() * (rank + 1)
        return torch.autograd.grad(loss, scale)[0]


@each_transport
def test_scales_have_a_gradient(collective: str) -> None:
    for got in results(2, of_scales, collective):
        assert got[:, 0].tolist() == [1, 2, 1]


def agreed(rank: int, group: str) -> int:
    return most_tokens((3, 0, 17, 9)[rank], group, multiple=8)


def test_ranks_agree_on_the_most_tokens() -> None:
    assert results(4, agreed) == [24] * 4
    assert most_tokens(0, "", multiple=4) == 4


def many(rank: int, group: str, collective: str) -> Any:
    x = torch.full((rank % 3, 4), float(rank))
    ids = (torch.arange(rank % 3)[:, None] + rank) % 32
    tables = (torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))
    rows = dispatch_tokens(
        x, torch.ones(x.shape[0], 1), ids, *tables, 2, group, collective=collective
    )
    return combine_tokens(rows[0] + 1, ids, *tables, *rows[4:], 2, group, collective)


@each_transport
def test_thirty_two_ranks(collective: str) -> None:
    for rank, got in enumerate(results(32, many, collective)):
        assert torch.equal(got, torch.full((rank % 3, 4), rank + 1.0))
