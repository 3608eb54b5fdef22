"""Ranks that store tokens into each other's memory give what `gather` gives, in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.kernels.triton import push
from moe_ops.kernels.triton.ranks import Rows, words_of
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group, sum_in_order
from moe_ops.ranks.tables import EVERY, HOME, known_ids, needed, slots
from moe_ops.testing import TOL, assert_close
from tests.chosen import in_turn, one_in, those_of
from tests.distributed.ranks import spawn
from tests.kernels.spread import Tokens, raw

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks of one process take turns in Triton's interpreter"
)
HALF = 2**16  # bytes of a buffer
POLLS = 3  # until a rank is given up: who has to come came before


CASES = (
    Tokens(name="even", counts=(4, 4), rows=4),
    Tokens(name="four", counts=(5, 0, 2, 1), rows=6, dtype=torch.float32, ids=torch.int64),
    Tokens(name="none", counts=(0, 0), rows=1),
    Tokens(name="one_sided", counts=(0, 3), rows=3),
    Tokens(name="more_rows_than_programs", counts=(11, 7), rows=11, D=20),
    Tokens(name="float32", counts=(3, 1), rows=3, D=33, dtype=torch.float32),
    Tokens(name="short", counts=(2, 3), rows=3, D=2, K=4, weights=torch.bfloat16),
    Tokens(name="three", counts=(1, 2, 0), rows=2, K=1, P=5),
    Tokens(name="codes", counts=(3, 2), rows=4, D=400, dtype=torch.float8_e4m3fn, scales=4),
    Tokens(name="small_scales", counts=(3, 0), rows=3, D=384, dtype=torch.int8, scales=12,
           scale=torch.uint8),
)  # fmt: skip


def arenas(ranks: int, half: int = HALF, programs: int = 4, phases: int = 2) -> list[push.Arena]:
    """Those of ranks that are all in this process."""
    size = push.arena_bytes(ranks, half, phases) // 8
    memory = [torch.zeros(size, dtype=torch.int64) for _ in range(ranks)]
    data = push.arena_bytes(ranks, 0, phases) // 8
    for words in memory:  # what nobody stored is NaN, and an id of 32767 twice
        words[data:] = 0x7FFF7FFF7FFF7FFF
    table_R = torch.tensor([words.data_ptr() for words in memory])
    return [
        push.Arena(words, table_R, torch.zeros(1, dtype=torch.int64), half, me, programs, POLLS)
        for me, words in enumerate(memory)
    ]


def tables(case: Tokens) -> tuple[Tensor, Tensor]:
    """Experts of every rank, of all of them, and of the token's own."""
    R = len(case.counts)
    rank_of_P = (torch.arange(case.P) % R).int()
    rank_of_P[-2], rank_of_P[-1] = EVERY, HOME
    return rank_of_P, torch.arange(case.P).int() // R


@dataclass
class Exchange:
    """One exchange there and back of all ranks, and what each has of it so far."""

    case: Tokens
    sent: list[Rows] = field(default_factory=list)
    returns: bool = True  # else nothing comes back
    came: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)
    out: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Tokens) -> Exchange:
        return cls(case, [case.sent(T) for T in case.counts])

    def dispatch(self, arena: push.Arena, halves: push.Halves = push.BOTH) -> tuple[Tensor, ...]:
        case = self.case
        return push.dispatch(self.sent[arena.me], tables(case), case.rows, arena, halves)

    def combine(self, arena: push.Arena, halves: push.Halves = push.BOTH) -> Tensor:
        """Of what this rank's experts are said to have made; where they served nothing, of NaN."""
        me, ids = arena.me, self.sent[arena.me].ids_TK
        served_G = self.came[me][4]
        if me not in self.made:
            dtype = self.case.dtype if self.case.dtype.itemsize > 1 else torch.bfloat16
            y_GD = torch.randn(served_G.shape[0], self.case.D).to(dtype)
            self.made[me] = y_GD.masked_fill_(served_G[:, None] == 0, float("nan"))
        rank_of_P = tables(self.case)[0]
        return push.combine(self.made[me], served_G, ids, rank_of_P, self.case.rows, arena, halves)

    def steps(self, arena: push.Arena) -> Iterator[str]:
        """What a rank does, half by half; it says what it is about to do."""
        yield "send"
        self.dispatch(arena, push.SEND)
        yield "dispatch"
        self.came[arena.me] = self.dispatch(arena, push.RECEIVE)
        if not self.returns:
            return
        yield "send"
        self.combine(arena, push.SEND)
        yield "combine"
        self.out[arena.me] = self.combine(arena, push.RECEIVE)

    def check(self) -> None:
        """What came, and sums in float32, are those of `gather` to the bit."""
        case, R = self.case, len(self.case.counts)
        rank_of_P, slot_of_P = tables(case)
        for here in range(R):
            *parts_GS, ids_GK, served_G = self.came[here]
            for source, sent in enumerate(self.sent):
                T, begin = sent.x_TD.shape[0], source * case.rows
                known = known_ids(sent.ids_TK, case.P)
                local = slots(known, rank_of_P, slot_of_P, here, source)
                assert torch.equal(ids_GK[begin : begin + T], local)
                assert bool((ids_GK[begin + T : begin + case.rows] == -1).all())
                goes = needed(known, rank_of_P, R, source)[:, here]
                assert torch.equal(served_G[begin : begin + T], goes.int())
                assert not bool(served_G[begin + T : begin + case.rows].any())
                given = (sent.x_TD, sent.scale_TS, sent.weights_TK)
                for part_GS, part_TS in zip(parts_GS, given, strict=True):
                    got, want = raw(part_GS[begin : begin + T]), raw(part_TS)
                    assert torch.equal(got[goes], want[goes])
        for here, ids in enumerate(s.ids_TK for s in self.sent if self.returns):
            T = ids.shape[0]
            parts = [self.made[r].unflatten(0, (R, case.rows))[here, :T] for r in range(R)]
            goes_TR = needed(known_ids(ids, case.P), rank_of_P, R, here)
            want = sum_in_order(torch.stack(parts).masked_fill(~goes_TR.T[..., None], 0))
            if want.dtype == torch.float32:
                assert torch.equal(self.out[here], want)
            else:  # the interpreter rounds towards 0
                assert_close(self.out[here], want, TOL["combine_tokens", want.dtype], case.name)


def course(exchanges: list[Exchange], arena: push.Arena) -> Iterator[str]:
    for one in exchanges:
        yield from one.steps(arena)


def played(exchanges: list[Exchange], every: list[push.Arena], seed: int) -> None:
    """All ranks go through the exchanges, and it is chance who is next; a rank waits only for what
    has been sent, as the others would not come while it does."""
    chance = random.Random(seed)
    sent = {arena.me: 0 for arena in every}
    todo = {arena.me: course(exchanges, arena) for arena in every}
    ahead = {me: next(steps) for me, steps in todo.items()}
    waits = dict.fromkeys(todo, 0)  # exchanges, there or back, that a rank has waited for
    while ahead:
        able = [
            me for me, step in ahead.items() if step == "send" or min(sent.values()) > waits[me]
        ]
        me = chance.choice(able)
        if ahead[me] == "send":
            sent[me] += 1
        else:
            waits[me] += 1
        step = next(todo[me], None)
        if step is None:
            del ahead[me]
        else:
            ahead[me] = step


@one_in(2, pytest.mark.parametrize("case", CASES, ids=lambda c: c.name))
def test_what_comes_is_what_gather_brings(case: Tokens) -> None:
    every = arenas(len(case.counts))
    exchanges = [Exchange.of(case) for _ in range(4)]
    played(exchanges, every, seed=0)
    for one in exchanges:
        one.check()
    assert not any(arena.error.item() for arena in every)


@one_in(
    2,
    in_turn(
        pytest.mark.parametrize("seed", those_of(range(2), range(6))),
        pytest.mark.parametrize("ranks", [2, 4]),
    ),
)
def test_no_order_of_ranks_overwrites_anything(ranks: int, seed: int) -> None:
    """Calls of other rows, widths and dtypes share the memory, as layers do."""
    kinds = [
        Tokens(name="a", counts=(2, 1, 0, 2)[:ranks], rows=2, D=8, dtype=torch.float32),
        Tokens(name="b", counts=(0, 5, 3, 1)[:ranks], rows=5, D=4, K=1),
        Tokens(name="c", counts=(1, 1, 1, 1)[:ranks], rows=1, D=12, dtype=torch.float32),
    ]
    chance = random.Random(seed)
    exchanges = [Exchange.of(chance.choice(kinds)) for _ in range(6)]
    for one in exchanges:  # one that raised may never have combined
        one.returns = chance.random() < 0.4
    played(exchanges, arenas(ranks), seed)
    for one in exchanges:
        one.check()


def text(arena: push.Arena) -> str:
    return peers.failure(int(arena.error.item()), Group("g", arena.ranks, arena.me), peers.TOKENS)


def test_a_rank_that_does_not_come_is_named() -> None:
    every = arenas(3)
    first, one, two = (Exchange.of(CASES[7]) for _ in range(3))
    played([first], every, seed=1)
    for me in (0, 2):
        one.dispatch(every[me], push.SEND)
    for me in (0, 2):
        *_, ids_GK, served_G = one.dispatch(every[me], push.RECEIVE)
        assert bool((ids_GK == -1).all()) and not bool(served_G.any())
        assert "moe_ops.dispatch_tokens: rank 1 of the group 'g' does not answer" in text(every[me])
        assert "(exchange 2)" in text(every[me])
    # It is over: nobody is waited for again, and nothing more is sent.
    before = every[1].memory.clone()
    one.came[0] = one.dispatch(every[0])
    assert not bool(one.combine(every[0]).any())
    assert torch.equal(every[1].memory, before)
    assert "(exchange 2)" in text(every[0])
    # Who comes late finds what was sent to it, and then waits in vain itself.
    one.dispatch(every[1], push.SEND)
    one.dispatch(every[1], push.RECEIVE)
    assert not every[1].error.item()
    two.dispatch(every[1])
    assert "rank 0 of the group 'g' does not answer rank 1" in text(every[1])


def test_a_rank_without_results_is_named() -> None:
    every, one = arenas(2), Exchange.of(CASES[0])
    for half in (push.SEND, push.RECEIVE):
        for arena in every:
            one.came[arena.me] = one.dispatch(arena, half)
    out = one.combine(every[0])
    assert not bool(out.any())
    assert "moe_ops.combine_tokens: rank 1 of the group 'g' does not answer" in text(every[0])


def test_a_rank_in_another_call_is_named() -> None:
    every, case = arenas(2), CASES[0]
    mine, theirs = Exchange.of(case), Exchange.of(replace(case, rows=5))
    mine.dispatch(every[0], push.SEND)
    theirs.dispatch(every[1], push.SEND)
    assert bool((mine.dispatch(every[0], push.RECEIVE)[3] == -1).all())
    assert "rank 1 of the group 'g' exchanges tokens of other sizes than rank 0" in text(every[0])


def both_halves(me: int, memory: list[Tensor], exchanges: list[Exchange]) -> None:
    torch.set_num_threads(1)
    table_R = torch.tensor([words.data_ptr() for words in memory])
    error = torch.zeros(1, dtype=torch.int64)
    arena = push.Arena(memory[me], table_R, error, HALF, me, 4, 10**6)
    for one in exchanges:
        one.came[me] = one.dispatch(arena)
        made = one.came[me][4].view(-1, 1).expand(-1, one.case.D).to(one.case.dtype)
        one.made[me] = made * (me + 1)
        got = one.combine(arena)
        ids = known_ids(one.sent[me].ids_TK, one.case.P)
        goes_TR = needed(ids, tables(one.case)[0], len(memory), me)
        want = goes_TR.long() @ torch.arange(1, len(memory) + 1)
        assert torch.equal(got, want[:, None].expand_as(got).to(got.dtype))
    assert not error.item()


@pytest.mark.slow
def test_both_halves_in_one_launch() -> None:
    """Two processes that share memory, and do wait for each other."""
    memory = [arena.memory.share_memory_() for arena in arenas(2)]
    exchanges = [Exchange.of(CASES[i]) for i in (0, 3, 4) for _ in range(3)]
    spawn(both_halves, (memory, exchanges), 2)


def test_rows_that_begin_amid_a_word_are_copied() -> None:
    held = torch.randn(1 + 3 * 8).bfloat16()
    words = words_of(held[1:].view(3, 8))
    assert torch.equal(words.view(torch.bfloat16), held[1:])
    assert words_of(held[:8]).data_ptr() == held.data_ptr()
