"""How long blocks take as one batch and in two halves, reckoned.

    first   before | there          experts | back          -         | before of the next block
    second           before | there           experts | back          -          | before

Two things are busy, this device and the link, each with one part at a time, in the order of
`moe_ops/ranks/turns.py`. While both are, the collective takes some of the multiprocessors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from moe_ops.halves.found import Exchanging
from moe_ops.ops.experts_over_ranks import traffic
from moe_ops.planning.cost import Cost, Device, cost, device_of
from moe_ops.ranks.links import LINKS, Link

# Of the time in which both are busy: NCCL has 16 to 24 of 132 multiprocessors.
CONTENTION = 0.15
# Of what products of 8192**3 reach, after the weights were read, which products of some hundred
# rows do not hide.
REACHED = 0.9
LAUNCHES_US = 100.0  # of a half: small launches, which take as long for fewer tokens
# How much faster two halves have to be by this. On two H200, in graphs, what was reckoned to be
# 1.11 to 1.20 times as fast took 0.96 to 1.01 of it, 1.21 to 1.41 gave 1.05 to 1.08
# (benchmarks/results/halves_h200.json): what the collective takes of memory and multiprocessors is
# reckoned too low.
LEAST_GAIN = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Microseconds of a batch: what is computed before it is sent, its way to the experts, what
    these compute, and the way back."""

    before: float
    there: float
    experts: float
    back: float

    @property
    def in_turn(self) -> float:
        """One part after the other."""
        return self.before + self.there + self.experts + self.back


def in_halves(first: Parts, second: Parts, blocks: int = 1) -> float:
    """Microseconds of two batches that take turns in so many blocks."""
    computed = linked = first_back = second_back = 0.0
    for _ in range(blocks):
        computed = max(computed, first_back) + first.before
        linked = first_there = max(linked, computed) + first.there
        computed = max(computed, second_back) + second.before
        linked = second_there = max(linked, computed) + second.there
        computed = max(computed, first_there) + first.experts
        linked = first_back = max(linked, computed) + first.back
        computed = max(computed, second_there) + second.experts
        linked = second_back = max(linked, computed) + second.back
    ended = max(first_back, second_back)
    alone = blocks * (first.in_turn + second.in_turn)
    return ended + CONTENTION * (alone - ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoned:
    """Microseconds of blocks as one batch and in halves, and those of the former on the way."""

    whole_us: float
    halves_us: float
    sent_us: float

    @property
    def pays(self) -> bool:
        return self.halves_us * LEAST_GAIN <= self.whole_us

    def __str__(self) -> str:
        return (
            f"{self.halves_us:.0f} us are reckoned for two halves and {self.whole_us:.0f} for one "
            f"batch, {self.sent_us:.0f} of them on the way"
        )


def reckon(
    blocks: Sequence[nn.Module], x: Tensor, experts: Exchanging, rows: tuple[int, int, int],
    collective: str,
) -> Reckoned | None:  # fmt: skip
    """What is reckoned of blocks like the first one in a CUDA graph, with the rows of one batch and
    of both halves; None where the cost of its experts is not known."""
    link = LINKS.get(x.device.type, LINKS["cuda"])
    whole, first, second = [_parts(blocks[0], x, experts, each, collective, link) for each in rows]
    taken, many = cost("experts_over_ranks", experts.call, rows[0]), len(blocks)
    if whole is None or first is None or second is None or taken is None:
        return None
    alone = many * (whole.before + whole.experts + taken.link_us)
    halves = in_halves(first, second, many)
    return Reckoned(whole_us=alone, halves_us=halves, sent_us=many * taken.link_us)


def _parts(
    block: nn.Module, x: Tensor, experts: Exchanging, rows: int, collective: str, link: Link
) -> Parts | None:
    here = cost("experts_over_ranks", experts.call, rows)
    if here is None:
        return None
    device, sent = device_of(x.device), traffic(experts.call)
    own = {id(p) for p in experts.module.parameters(recurse=False)}
    others = [p for p in block.parameters() if id(p) not in own and p.dim() > 1]
    before = Cost(
        bytes=sum(p.nbytes for p in others) + 8 * rows * x.shape[-1] * x.dtype.itemsize,
        flops=2.0 * rows * sum(p.numel() for p in others),
        dtype=str(x.dtype).removeprefix("torch."),
    )
    fixed, rate = link.fixed_us(collective) / 2, link.rate(collective)
    return Parts(
        before=_us(before, device) + LAUNCHES_US / 2,
        there=fixed + 1e6 * sent.bytes_there(collective, rows) / rate,
        experts=_us(here, device) + LAUNCHES_US / 2,
        back=fixed + 1e6 * sent.bytes_back(collective, rows) / rate,
    )


def _us(of: Cost, device: Device) -> float:
    """Microseconds here: of reading, and then of products."""
    read = device.microseconds(replace(of, flops=0.0, link_us=0.0))
    return read + device.microseconds(replace(of, bytes=0.0, link_us=0.0)) / REACHED
