"""How long a transport takes between ranks, by its messages and bytes; all ranks reckon alike.

    t = messages * alpha + bytes / B + waits of the host

with the bytes that enter, or leave, the rank that most of them do. Experts are taken to be chosen
evenly: of R ranks a token needs D others, D = (R - 1) * (1 - C(E - E/R, K) / C(E, K)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ops.ranks.transport import EXCHANGE, GATHER, PUSH

# Where `gather` takes so many bytes more than `exchange` needs, `exchange` is taken.
MOST_BYTES = 2**30
# Slots of `push` stay allocated, so that long prompts are not to ask for them: 4096 tokens of 4096
# columns in bfloat16 of two ranks, there and back, and their ids; of four and more twice as much.
MOST_PUSHED = 2**27 + 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects ranks: microseconds of one small collective, bytes a second each way, and
    microseconds until the host has read a count from the device and goes on; microseconds of one
    small launch that stores to peers and waits for them, and bytes a second of such; microseconds
    of one small all-reduce."""

    alpha_us: float
    bytes_per_second: float
    wait_us: float
    push_us: float
    pushed_per_second: float
    reduce_us: float

    def fixed_us(self, transport: str) -> float:
        """What a transport takes for no rows, there and back: `exchange` sends counts before, and
        waits for the device twice."""
        if transport == GATHER:
            return 2 * self.alpha_us
        if transport == PUSH:
            return 2 * self.push_us
        return 3 * self.alpha_us + 2 * self.wait_us

    def rate(self, transport: str) -> float:
        """The bytes a second of a transport."""
        return self.pushed_per_second if transport == PUSH else self.bytes_per_second

    def sum_us(self, pushes: bool, ranks: int, nbytes: int, times: int = 1) -> float:
        """What the sum of the ranks' parts of so many bytes takes: stored to all others at once, or
        by an all-reduce, which sends shares around twice, of `widened` times as many bytes."""
        if ranks == 1:
            return 0.0
        if pushes:
            return self.push_us + 1e6 * (ranks - 1) * nbytes / self.pushed_per_second
        sent = 2 * (ranks - 1) / ranks * nbytes * times
        return self.reduce_us + 1e6 * sent / self.bytes_per_second

    def most_summed(self, ranks: int, nbytes: int, times: int = 1) -> int:
        """The most rows of so many bytes whose sum takes no longer if all ranks store their parts
        to each other."""
        begun, most = self.reduce_us - self.push_us, most_parts(ranks, nbytes)
        if begun < 0:
            return 0
        row = [
            self.sum_us(p, ranks, nbytes, times) - self.sum_us(p, ranks, 0) for p in (True, False)
        ]
        return most if row[0] <= row[1] else min(most, int(begun / (row[0] - row[1])))


def widened(ranks: int, itemsize: int) -> int:
    """How many times its bytes a part takes in an all-reduce, which adds in float32 if there are
    more than two."""
    return 1 if ranks <= 2 else max(1, 4 // itemsize)


def most_parts(ranks: int, nbytes: int) -> int:
    """The most rows of so many bytes for which ranks keep memory to store them to."""
    return (MOST_PUSHED // ranks - 16) // max(1, nbytes)


def most_pushed_bytes(ranks: int) -> int:
    """The most bytes of tokens of all ranks for which `auto` asks for memory."""
    return MOST_PUSHED if ranks < 4 else 2 * MOST_PUSHED


# Measured, by the type of the device. Two H200 of one host, NCCL in CUDA graphs, torch 2.11: an
# all-to-all of 2 KB takes 8.5 us and moves 254 GB/s at 67 MB, an all-gather 8.3 us and 241 GB/s.
# One token there and back by `gather`, packing counted, took 25.3 us on two H100 and 29.1 on four
# H200: alpha is about half. With 16384 tokens these four had 257 to 275 GB/s, and 254 to 288 by
# `push` (bench ep).
# On two H100 a layer by `exchange`, which no graph holds, took 1.0 to 2.8 ms more than by `gather`
# at 1 to 4096 tokens a rank (bench ep), most of it the host's: 1.9 in the middle. Two processes
# with gloo on two cores, torch 2.13: 250 us, 0.9 GB/s. Those of `push` are of two H100, captured:
# there and back took 9.8 us with one token and 25.8 with 512, of 8.3 KB there and back (bench ep);
# an all-reduce of up to 1 MB took 21 us there. Sums on CPUs are two collectives.
LINKS = {
    "cuda": Link(
        alpha_us=13.0, bytes_per_second=245e9, wait_us=950.0, push_us=4.9, pushed_per_second=263e9,
        reduce_us=21.0,
    ),
    "cpu": Link(
        alpha_us=250.0, bytes_per_second=0.9e9, wait_us=0.0, push_us=math.inf,
        pushed_per_second=1.0, reduce_us=500.0,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What ranks tell and send each other: the bytes of a token there and back, or, `by_choice`, of
    each of its choices back."""

    ranks: int
    experts: int  # physical ones, of all ranks
    top_k: int
    there: int
    back: int
    by_choice: bool = False

    @property
    def slot(self) -> int:
        """The bytes of a slot in which a token is sent and what was made of it comes back."""
        return self.there + self.back * (self.top_k if self.by_choice else 1)

    @property
    def visited(self) -> float:
        """The other ranks that a token is expected to need."""
        each = max(1, self.experts // self.ranks)
        missed = math.comb(max(0, self.experts - each), self.top_k)
        return (self.ranks - 1) * (1 - missed / max(1, math.comb(self.experts, self.top_k)))

    def bytes(self, transport: str, rows: float) -> float:
        """What enters a rank when each has so many tokens, there and back."""
        return self.bytes_there(transport, rows) + self.bytes_back(transport, rows)

    def bytes_there(self, transport: str, rows: float) -> float:
        """What of it enters with tokens of others."""
        ranks = self.ranks - 1 if transport == GATHER else self.visited
        return ranks * rows * self.there

    def bytes_back(self, transport: str, rows: float) -> float:
        """What of it enters with results of its own."""
        ranks = self.ranks - 1 if transport == GATHER else self.visited
        if not self.by_choice:
            return ranks * rows * self.back
        # Of a token's choices as many are elsewhere as other ranks are of all ranks.
        back = ranks if transport == GATHER else (self.ranks - 1) / self.ranks
        return back * rows * self.top_k * self.back

    def microseconds(self, transport: str, rows: float, link: Link) -> float:
        """The least time of a transport, there and back."""
        if self.ranks == 1:
            return 0.0
        return link.fixed_us(transport) + self.bytes(transport, rows) / link.rate(transport) * 1e6

    def most_gathered(self, link: Link) -> int | None:
        """The most rows of each rank for which `gather` is the cheaper one; None: any number."""
        if self.ranks == 1:
            return None
        gather, exchange = (link.fixed_us(t) for t in (GATHER, EXCHANGE))
        saved = self.bytes(GATHER, 1) - self.bytes(EXCHANGE, 1)
        needed = self.ranks * self.visited / (self.ranks - 1)  # rows of all ranks and of its own
        kept = (self.ranks - needed) * (self.there + self.back)  # of a row beyond an exchange
        if self.by_choice:  # of whose choices a rank serves as many as it has itself
            kept = (self.ranks - needed) * self.there + (self.ranks - 1) * self.top_k * self.back
        row = max(1.0, kept)
        limit = int(MOST_BYTES / row)
        if saved <= 0:
            return limit
        return min(limit, int((exchange - gather) * link.bytes_per_second / 1e6 / saved))

    def most_pushed(self, link: Link) -> int:
        """The most rows of each rank for which `push` takes no longer than `gather`."""
        limit = most_pushed_bytes(self.ranks) // (self.ranks * self.slot)
        begun = link.fixed_us(GATHER) - link.fixed_us(PUSH)
        gather, push = (1e6 * self.bytes(t, 1) / link.rate(t) for t in (GATHER, PUSH))
        if begun < 0:
            return 0
        return limit if push <= gather else min(limit, int(begun / (push - gather)))
