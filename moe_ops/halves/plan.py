"""Whether all ranks run a block in two halves, and of how many tokens: what they agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moe_ops.checks.options import check_type
from moe_ops.halves.found import Exchanging, blocks_of, exchanging, transport_of, why_whole
from moe_ops.halves.timeline import Reckoned, reckon
from moe_ops.layer.exchange import is_captured
from moe_ops.ops.experts_over_ranks import traffic
from moe_ops.ranks.agree import said_by_all
from moe_ops.ranks.groups import Group
from moe_ops.ranks.links import LINKS

Value = int | str  # that a rank tells of itself
NAME = "two_halves"
MOST_REASON = 400  # characters, of what ranks tell each other
ON_CPU = "the processors that compute send, too"
FROM_PYTHON = (
    "launched from Python, halves took longer in all that was measured; capture the calls in a "
    "CUDA graph, and say captured=True"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvesPlan:
    """What ranks agreed on for calls of `two_halves`, until a rank has more tokens.

    split: whether they run in halves; reason: why, or why not. rows: the most tokens of a rank in
    a call, and in the first and the second half of one. collective: how halves are sent.
    """

    split: bool
    reason: str
    rows: int
    rows_of_halves: tuple[int, int]
    collective: str

    def __str__(self) -> str:
        if not self.split:
            return f"one batch of up to {self.rows} tokens a rank: {self.reason}"
        first, second = self.rows_of_halves
        sizes = f"two halves of up to {first} and {second} tokens a rank by {self.collective}"
        return f"{sizes}: {self.reason}"


def plan_halves(
    block: nn.Module | Sequence[nn.Module],
    x: Tensor,
    *,
    halves: bool | None = None,
    captured: bool = False,
) -> HalvesPlan:
    """Agree with all ranks on how `two_halves(block, x)` runs; the host waits for them twice.

    block: one, or several, as `two_halves` takes them. x: [sequences, tokens, hidden_size], which
    may differ from rank to rank in sequences and tokens. halves: None for what takes less time,
    True for halves wherever they can be, False for one batch. captured: whether a CUDA graph will
    hold the calls; launched from Python halves take longer.

    A plan serves all blocks like these, as many at once, and calls in which no rank has more
    tokens, in all and in a half. Every rank of the block's group has to call it. Rank 0 reckons,
    and all do as it says. Raises ValueError for a block without, or with more than one module that
    exchanges tokens, and for an x of other axes; RuntimeError for ranks that differ or do not
    answer.
    """
    blocks = blocks_of(block)
    check_x(x)
    experts = exchanging(blocks, x)
    group = Group.of(experts.group)
    if is_captured(x):
        raise ValueError(
            "ranks cannot agree on halves while a CUDA graph is captured; make a plan before, by "
            "plan_halves(block, x, captured=True), and give it as plan="
        )
    said: dict[str, Value] = {
        "blocks": len(blocks), "halves": str(halves), "captured": captured,
        "collective": experts.collective, "max_num_tokens": experts.most,
        "sequences": x.shape[0], "tokens": x.shape[1],
        "why": (why_whole(blocks, x, experts) or "")[:MOST_REASON],
    }  # fmt: skip
    every = said_by_all(NAME, said, group, own=("sequences", "tokens", "why"), device=x.device)
    rows, each = _rows(every)
    collective = transport_of(experts, each[0], captured, _most_gathered(x, experts))
    split, reason = _choice(every, halves, rows, each, experts)
    if split and halves is None:
        # One rank says it for all: others may have another device, or as many threads as it has.
        split, reason = _reckoned(blocks, x, experts, (rows, *each), collective, captured)
    told: dict[str, Value] = {"split": split, "reason": reason[:MOST_REASON]}
    first = said_by_all(NAME, told, group, own=tuple(told), device=x.device)[0]
    return HalvesPlan(
        split=first["split"], reason=first["reason"], rows=rows, rows_of_halves=each,
        collective=collective,
    )  # fmt: skip


def check_x(x: Any) -> None:
    """Raise TypeError or ValueError unless x has sequences of tokens."""
    check_type("x", x, Tensor, "a tensor")
    if x.dim() != 3:
        raise ValueError(
            f"x must be [sequences, tokens, hidden_size], got {list(x.shape)}; halves are of "
            "sequences: unflatten its tokens"
        )


def first_half(sequences: int) -> int:
    """How many of the sequences of a rank are in its first half."""
    return (sequences + 1) // 2


def _rows(every: list[dict[str, Any]]) -> tuple[int, tuple[int, int]]:
    """The most tokens of a rank, in all and in each half."""
    firsts = [first_half(rank["sequences"]) * rank["tokens"] for rank in every]
    wholes = [rank["sequences"] * rank["tokens"] for rank in every]
    seconds = [whole - first for whole, first in zip(wholes, firsts, strict=True)]
    return max(1, *wholes), (max(1, *firsts), max(1, *seconds))


def _choice(
    every: list[dict[str, Any]],
    halves: bool | None,
    rows: int,
    each: tuple[int, int],
    experts: Exchanging,
) -> tuple[bool, str]:
    """Whether halves can be, and why, or why not: from what all ranks know."""
    for rank, said in enumerate(every):
        if said["why"]:
            return False, f"rank {rank}: {said['why']}"
    if halves is False:
        return False, "halves=False"
    if max(said["sequences"] for said in every) < 2:
        return False, "no rank has two sequences"
    if max(each) > experts.most:
        return False, f"a half of {max(each)} tokens is sent in parts of {experts.most}"
    return True, "halves=True"


def _reckoned(
    blocks: Sequence[nn.Module],
    x: Tensor,
    experts: Exchanging,
    rows: tuple[int, int, int],
    collective: str,
    captured: bool,
) -> tuple[bool, str]:
    if x.is_cpu:
        return False, ON_CPU
    if not captured:
        return False, FROM_PYTHON
    found: Reckoned | None = reckon(blocks, x, experts, rows, collective)
    if found is None:
        return False, "what the experts take is not known"
    return found.pays, str(found)


def _most_gathered(x: Tensor, experts: Exchanging) -> int | None:
    link = LINKS.get(x.device.type, LINKS["cuda"])
    return traffic(experts.call).most_gathered(link)
