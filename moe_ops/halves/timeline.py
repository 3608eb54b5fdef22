"""How long a block takes as one batch and in two halves, reckoned.

    first   before | there          experts | back          -
    second           before | there           experts | back |

Two things are busy, this device and the link, each with one part at a time. While both are, the
collective takes some of the multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from moe_ops.halves.found import Exchanging
from moe_ops.ops.experts_over_ranks import traffic
from moe_ops.planning.cost import Cost, cost, device_of
from moe_ops.ranks.links import LINKS, Link
from moe_ops.ranks.transport import EXCHANGE

CONTENTION = 0.15  # of the time in which both are busy: NCCL has 16 to 24 of 132 multiprocessors
REACHED = 0.75  # of what products of 8192**3 reach: layers of 4096 tokens have 0.69 and 0.83
LEAST_GAIN = 1.05  # of two halves, for what is not reckoned
LAUNCHES_US = 50.0  # of a half in a graph: small launches, which take as long for fewer tokens
# Of a call that no graph holds: what the host takes for an exchange, and for another module.
HOST_EXCHANGE_US, HOST_MODULE_US = 300.0, 40.0


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


def in_halves(first: Parts, second: Parts) -> float:
    """Microseconds of two batches that take turns."""
    sent_first = first.before + first.there
    computed = first.before + second.before
    sent_second = max(sent_first, computed) + second.there
    computed = max(computed, sent_first) + first.experts
    back_first = max(sent_second, computed) + first.back
    computed = max(computed, sent_second) + second.experts
    ended = max(back_first, computed) + second.back
    alone = first.in_turn + second.in_turn
    return ended + CONTENTION * (alone - ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoned:
    """Microseconds of a block as one batch and in halves, and those of the former on the way."""

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
    block: nn.Module, x: Tensor, experts: Exchanging, rows: tuple[int, int, int], collective: str,
    captured: bool,
) -> Reckoned | None:  # fmt: skip
    """What is reckoned of a block, with the rows of one batch and of both halves; None where the
    cost of its experts is not known."""
    link = LINKS.get(x.device.type, LINKS["cuda"])
    found = [_parts(block, x, experts, each, collective, link) for each in rows]
    whole, first, second = found
    if whole is None or first is None or second is None:
        return None
    taken = cost("experts_over_ranks", experts.call, rows[0])
    assert taken is not None
    alone = whole.before + whole.experts + taken.link_us
    halves = in_halves(first, second)
    if not captured:
        host = _host_us(block)
        alone, halves = max(alone, host), max(halves, 2 * host)
    return Reckoned(whole_us=alone, halves_us=halves, sent_us=taken.link_us)


def _parts(
    block: nn.Module, x: Tensor, experts: Exchanging, rows: int, collective: str, link: Link
) -> Parts | None:
    here = cost("experts_over_ranks", experts.call, rows)
    if here is None:
        return None
    device, sent = device_of(x.device), traffic(experts.call)
    own = {id(p) for p in experts.module.parameters(recurse=False)}
    others = [p for p in block.parameters() if id(p) not in own and p.dim() > 1]
    values = sum(p.numel() for p in others)
    width = x.shape[-1] * x.dtype.itemsize
    before = Cost(
        bytes=sum(p.nbytes for p in others) + 8 * rows * width,
        flops=2.0 * rows * values / REACHED,
        dtype=str(x.dtype).removeprefix("torch."),
    )
    inside = replace(here, link_us=0.0, flops=here.flops / REACHED)
    ranks = sent.ranks - 1 if collective != EXCHANGE else sent.visited
    fixed, rate = link.fixed_us(collective) / 2, link.rate(collective)
    return Parts(
        before=device.microseconds(before) + LAUNCHES_US / 2,
        there=fixed + 1e6 * ranks * rows * sent.there / rate,
        experts=device.microseconds(inside) + LAUNCHES_US / 2,
        back=fixed + 1e6 * ranks * rows * sent.back / rate,
    )


def _host_us(block: nn.Module) -> float:
    """What the host takes to launch a block, from Python."""
    leaves = sum(1 for m in block.modules() if not any(m.children()))
    return HOST_EXCHANGE_US + HOST_MODULE_US * leaves
