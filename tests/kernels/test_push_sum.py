"""Ranks that store parts into each other's memory have the sum of all, in any order of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton import push, push_sum
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group, sum_in_order
from moe_ops.testing import TOL, assert_close
from tests.chosen import in_turn, those_of
from tests.distributed.ranks import spawn
from tests.kernels.test_push import Exchange, Tokens, arenas, played

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks of one process take turns in Triton's interpreter"
)
HALF = 2**19  # bytes of a buffer
PROGRAMS = 4


@dataclass(frozen=True, kw_only=True)
class Parts:
    name: str
    T: int
    D: int
    dtype: torch.dtype = torch.float32


CASES = (
    Parts(name="one_token", T=1, D=64),
    Parts(name="bfloat16", T=5, D=64, dtype=torch.bfloat16),
    Parts(name="float16", T=3, D=8, dtype=torch.float16),
    Parts(name="odd", T=3, D=33),
    Parts(name="odd_bytes", T=3, D=7, dtype=torch.bfloat16),
    Parts(name="large_blocks", T=9, D=256),
    Parts(name="more_blocks_than_programs", T=21, D=1024),
    Parts(name="no_tokens", T=0, D=8),
    Parts(name="no_columns", T=2, D=0),
)


@dataclass
class Sum:
    """One sum of all ranks, in an arena of its own kind, and what each has of it so far."""

    case: Parts
    lanes: list[push.Arena]
    parts: list[Tensor]
    out: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Parts, lanes: list[push.Arena]) -> Sum:
        return cls(case, lanes, [torch.randn(case.T, case.D).to(case.dtype) for _ in lanes])

    def run(self, me: int, halves: push.Halves) -> Tensor:
        return push_sum.sum_parts(self.parts[me], self.lanes[me], halves)

    def steps(self, arena: push.Arena) -> Iterator[str]:
        """What a rank does, half by half; it says what it is about to do."""
        yield "send"
        self.run(arena.me, push.SEND)
        yield "sum"
        self.out[arena.me] = self.run(arena.me, push.RECEIVE)

    def check(self) -> None:
        """The definition's sum, and the same bits on every rank."""
        dtype, want = self.case.dtype, sum_in_order(torch.stack(self.parts))
        for got in self.out.values():
            assert torch.equal(got, self.out[0])
            if dtype == torch.float32:
                assert torch.equal(got, want)
            else:  # the interpreter rounds towards 0
                assert_close(got, want, TOL["sum_ranks", dtype], self.case.name)
        assert len(self.out) == len(self.parts)


def lanes_of(ranks: int) -> list[push.Arena]:
    return arenas(ranks, HALF, PROGRAMS, phases=1)


@in_turn(
    pytest.mark.parametrize("ranks", [2, 3, 4]),
    pytest.mark.parametrize("case", CASES, ids=lambda c: c.name),
)
def test_every_rank_has_the_sum(case: Parts, ranks: int) -> None:
    lanes = lanes_of(ranks)
    assert push_sum.sum_bytes(torch.empty(case.T, case.D, dtype=case.dtype), ranks) <= HALF
    sums = [Sum.of(case, lanes) for _ in range(3)]
    played(sums, lanes, seed=0)
    for one in sums:
        one.check()
    assert not any(arena.error.item() for arena in lanes)


@in_turn(
    pytest.mark.parametrize("seed", those_of(range(2), range(4))),
    pytest.mark.parametrize("ranks", [2, 4]),
)
def test_sums_among_exchanges_overwrite_nothing(ranks: int, seed: int) -> None:
    """Sums of other sizes share memory, and ranks are at different ones of them, and of exchanges
    of tokens."""
    chance = random.Random(seed)
    every, lanes = arenas(ranks), lanes_of(ranks)
    tokens = Tokens(name="t", counts=(2, 1, 0, 2)[:ranks], rows=2, D=8, dtype=torch.float32)
    kinds = [CASES[i] for i in (0, 3, 5)]
    rounds = [
        Exchange.of(tokens) if chance.random() < 0.4 else Sum.of(chance.choice(kinds), lanes)
        for _ in range(10)
    ]
    played(rounds, every, seed)
    for one in rounds:
        one.check()
    assert not any(arena.error.item() for arena in (*every, *lanes))


def text(arena: push.Arena) -> str:
    return peers.failure(int(arena.error.item()), Group("g", arena.ranks, arena.me), peers.SUMS)


def test_a_rank_without_a_part_is_named() -> None:
    lanes = lanes_of(3)
    first, one = (Sum.of(CASES[0], lanes) for _ in range(2))
    played([first], lanes, seed=1)
    for me in (0, 2):
        one.run(me, push.SEND)
    for me in (0, 2):
        assert not bool(one.run(me, push.RECEIVE).any())
        assert "moe_ops.sum_ranks: rank 1 of the group 'g' does not answer" in text(lanes[me])
        assert "(exchange 2)" in text(lanes[me])
    before = lanes[1].memory.clone()
    assert not bool(one.run(0, push.BOTH).any())  # nobody is waited for again
    assert torch.equal(lanes[1].memory, before)


def test_a_rank_with_another_part_is_named() -> None:
    lanes = lanes_of(2)
    mine, theirs = (Sum.of(CASES[i], lanes) for i in (0, 1))
    mine.run(0, push.SEND)
    theirs.run(1, push.SEND)
    assert not bool(mine.run(0, push.RECEIVE).any())
    assert "moe_ops.sum_ranks: rank 1 of the group 'g' exchanges tokens of other" in text(lanes[0])


def both_halves(me: int, memory: list[Tensor]) -> None:
    torch.set_num_threads(1)
    table_R = torch.tensor([words.data_ptr() for words in memory])
    error = torch.zeros(1, dtype=torch.int64)
    arena = push.Arena(memory[me], table_R, error, HALF, me, PROGRAMS, 10**6)
    for step, case in enumerate(CASES * 2):
        part = torch.full((case.T, case.D), step + me, dtype=case.dtype)
        want = torch.full_like(part, 2 * step + 1)
        assert torch.equal(push_sum.sum_parts(part, arena), want)
    assert not error.item()


@pytest.mark.slow
def test_both_halves_of_a_sum_in_one_launch() -> None:
    """Two processes that share memory, and do wait for each other."""
    spawn(both_halves, ([arena.memory.share_memory_() for arena in lanes_of(2)],), 2)
