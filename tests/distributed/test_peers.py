"""What ranks find out of each other before they store into each other's memory, and are told after
it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ops import dispatch_tokens
from moe_ops.backends.push import supports_dispatch, supports_sum
from moe_ops.backends.triton_device import unavailable
from moe_ops.ops.dispatch_tokens import DispatchTokensCall
from moe_ops.ops.sum_ranks import SumRanksCall, sum_ranks
from moe_ops.passes.inductor.cache_key import environment_key
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group, resolve
from moe_ops.ranks.links import (
    LINKS,
    MOST_PUSHED,
    Traffic,
    most_parts,
    most_pushed_bytes,
    widened,
)
from moe_ops.ranks.transport import GATHER, PUSH
from tests.distributed.ranks import fake_group

ONE = {"host": "a", "torch": "2.11.0", "processors": 132, "multicast": False}


def host(ranks: int, **differing: Any) -> list[dict[str, Any]]:
    """What ranks of one host say, of which the last one differs."""
    gpus = [f"gpu{rank}" for rank in range(ranks)]
    said = [{**ONE, "gpu": g, "reaches": [o for o in gpus if o != g]} for g in gpus]
    said[-1].update(differing)
    return said


APART = {
    "together": (host(4), None),
    "many": (host(17), "stores to at most 16 ranks, the group has 17"),
    "hosts": (host(3, host="b"), "needs ranks of one host: rank 0 has a, rank 2 b"),
    "versions": (host(2, torch="2.13.0"), "needs ranks of one torch: rank 0 has 2.11.0, rank 1"),
    "multicast": (host(3, multicast=True), "which rank 2 would make; start every rank with TORCH"),
    "links": (
        host(3, reaches=["gpu1"]), "needs GPUs that reach each other: that of rank 2 not rank 0's",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "reason"), APART.values(), ids=APART)
def test_ranks_that_do_not_reach_each_other_say_why(
    said: list[dict[str, Any]], reason: str | None
) -> None:
    found = peers._apart(said)
    assert found is None if reason is None else reason in str(found)


@pytest.fixture
def known() -> Iterator[peers.Peers]:
    """A group of two, with memory in which nothing went wrong."""
    held = peers.Memory(
        words=torch.zeros(8, dtype=torch.int64), table_R=torch.zeros(2, dtype=torch.int64),
        error=torch.zeros(1, dtype=torch.int64), half=2**20, ops=peers.TOKENS,
        handle=None,
    )  # fmt: skip
    with fake_group(2) as name:
        found = peers.Peers(
            group=Group.of(name), made=resolve(name), reason=None,
            memories=[replace(held, half=2**24), held],
        )  # fmt: skip
        peers._known[name] = found
        yield found
        peers._known.clear()


def test_the_smallest_memory_that_fits_is_taken(known: peers.Peers) -> None:
    name, (large, small) = known.group.name, known.memories
    assert peers.memory(name, 2**20) is small
    assert peers.memory(name, 2**20 + 1) is large
    assert peers.memory(name, 2**25) is None
    assert peers.memory("another", 1) is None


def test_sums_have_memory_of_their_own(known: peers.Peers) -> None:
    name = known.group.name
    assert peers.memory(name, 1, peers.SUMS) is None
    known.memories.append(replace(known.memories[1], ops=peers.SUMS, error=torch.tensor([2**24])))
    assert peers.memory(name, 1, peers.SUMS) is known.memories[2]
    assert peers.memory(name, 1) is known.memories[1]
    with pytest.raises(RuntimeError, match=r"moe_ops\.sum_ranks: rank 0 of the group"):
        peers.check()


SAID = {
    "gone": (1 << 8 | 17 << 24, "moe_ops.dispatch_tokens: rank 1 of the group '0' does not answer "
             "rank 0: it ended, raised an error, or is stuck (exchange 17); make the group anew, "
             "and call moe_ops.ranks.peers.forget('0')"),
    "back": (1 | 1 << 8 | 2**38 << 24, "moe_ops.combine_tokens: rank 1 of"),
    "other": (2 | 1 << 8 | 5 << 24, "moe_ops.dispatch_tokens: rank 1 of the group '0' exchanges "
              "tokens of other sizes than rank 0 (exchange 5); give every rank the same rows"),
}  # fmt: skip


@pytest.mark.parametrize(("said", "text"), SAID.values(), ids=SAID)
def test_what_a_kernel_said_is_raised(said: int, text: str, known: peers.Peers) -> None:
    peers.check()
    known.memories[1].error[0] = said
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            peers.check()
        assert text.replace("'0'", repr(known.group.name)) in str(raised.value)


def test_a_group_that_failed_is_in_nobody_elses_way(known: peers.Peers) -> None:
    known.memories[1].error[0] = 1 << 24
    peers.check("another group")
    with pytest.raises(RuntimeError, match="make the group anew"):
        peers.check(known.group.name)
    peers.forget(known.group.name)
    peers.check()
    assert peers.connected() == ()


def test_a_new_group_of_a_name_starts_anew(known: peers.Peers) -> None:
    known.memories[1].error[0] = 1 << 24
    assert peers.refusal(known.group.name) is None
    known.made = object()  # another one had the name
    peers.check()
    assert peers.refusal(known.group.name) == peers.UNKNOWN
    assert peers.memory(known.group.name, 1) is None


def test_graphs_are_cached_by_what_ranks_know(known: peers.Peers) -> None:
    keys = [environment_key()]
    known.reason = "needs ranks of one host"
    keys.append(environment_key())
    del peers._known[known.group.name]
    keys.append(environment_key())
    assert len(set(keys)) == 3


def rows(T: int = 2, D: int = 8, dtype: torch.dtype = torch.bfloat16) -> DispatchTokensCall:
    table = torch.zeros(4, dtype=torch.int32)
    ids, weights = torch.zeros(T, 3, dtype=torch.int64), torch.ones(T, 3)
    return DispatchTokensCall(torch.zeros(T, D, dtype=dtype), weights, ids, table, table, 2)


def test_what_cannot_be_stored_to_ranks_is_refused() -> None:
    call = rows()
    assert "stores tokens for 'push', got collective='gather'" in str(supports_dispatch(call))
    call.collective = "push"
    assert supports_dispatch(call) == "has no other rank to store to"
    with fake_group(2) as group:
        call.group = group
        assert supports_dispatch(call) in (None, unavailable())
        for wrong, text in (
            (rows(D=3), "got x_TD of 3 x 2"),
            (rows(D=2**15 + 4), "32768 columns at most, got 32772"),
        ):
            wrong.group, wrong.collective = group, "push"
            assert text in str(supports_dispatch(wrong))
        call.x_TD.requires_grad_()
        assert supports_dispatch(call) == "has no gradients, and one is asked for"


def test_parts_that_cannot_be_stored_to_ranks_are_refused(known: peers.Peers) -> None:
    call = SumRanksCall(torch.zeros(2, 8), known.group.name)
    assert supports_sum(call) == unavailable()
    (refused,) = (r for name, r in sum_ranks.refusals_of(call).items() if name == PUSH)
    assert refused == "needs a tensor on cuda, got cpu"
    known.reason = "needs ranks of one host"
    assert supports_sum(call) in (known.reason, unavailable())
    del peers._known[known.group.name]
    assert supports_sum(call) in (peers.UNKNOWN, unavailable())
    call.part_TD.requires_grad_()
    assert supports_sum(call) == "has no gradients, and one is asked for"
    call.group = ""
    assert supports_sum(call) == "has no other rank to store to"


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_parts_are_stored_where_that_is_faster(ranks: int, itemsize: int) -> None:
    nbytes, wide = 4096, widened(ranks, itemsize)
    for link in (LINKS["cuda"], replace(LINKS["cuda"], pushed_per_second=900e9)):
        most = link.most_summed(ranks, nbytes, wide)
        push, reduced = (
            [link.sum_us(p, ranks, nbytes * rows, wide) for rows in (most, most + 1)]
            for p in (True, False)
        )
        assert most > 0 and push[0] <= reduced[0]
        whole = most == most_parts(ranks, nbytes)
        assert whole or push[1] > reduced[1]
        fewer_bytes = ranks * link.bytes_per_second <= 2 * wide * link.pushed_per_second
        assert whole if fewer_bytes else not whole or link is not LINKS["cuda"]
    assert LINKS["cpu"].most_summed(ranks, nbytes) == 0
    # Of any width: a slot of each rank is a multiple of 16 bytes.
    for row in (1, 66, nbytes):
        assert ranks * (most_parts(ranks, row) * row + 15) <= MOST_PUSHED


def test_push_says_why_it_does_not_run() -> None:
    call = rows()
    args = (call.x_TD, call.weights_TK, call.ids_TK, call.rank_of_P, call.slot_of_P, 2)
    text = "dispatch_tokens: collective='push' needs a tensor on cuda, got cpu; take 'gather'"
    with fake_group(2) as group, pytest.raises(NotImplementedError, match=text):
        dispatch_tokens(*args, group, collective="push")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_push_is_taken_where_it_is_faster(ranks: int) -> None:
    traffic = Traffic(ranks=ranks, experts=128, top_k=8, there=4160, back=4096)
    for link in (
        LINKS["cuda"],
        replace(LINKS["cuda"], pushed_per_second=100e9),
        replace(LINKS["cuda"], push_us=9.0),
    ):
        most = traffic.most_pushed(link)
        push, gather = (
            [traffic.microseconds(t, rows, link) for rows in (max(1, most), most + 2)]
            for t in (PUSH, GATHER)
        )
        if most:
            assert push[0] <= gather[0]
        whole = ranks * most * (traffic.there + traffic.back)
        limit = most_pushed_bytes(ranks)
        assert push[1] > gather[1] or limit - 2**14 * ranks < whole <= limit
    assert math.isinf(traffic.microseconds(PUSH, 1, LINKS["cpu"]))
    assert traffic.most_pushed(LINKS["cpu"]) == 0
