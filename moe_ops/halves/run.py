"""A block on two halves of a batch, which take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.halves.plan import HalvesPlan, check_x, first_half, plan_halves
from moe_ops.halves.split import Given, joined, split
from moe_ops.ranks.turns import Turns, agreed_on, taking

# What transformers' decoder layers are given for each sequence.
BY_SEQUENCE = ("attention_mask", "position_ids", "position_embeddings")


def two_halves(
    block: nn.Module,
    x: Tensor,
    *,
    plan: HalvesPlan | None = None,
    by_sequence: Sequence[str] = BY_SEQUENCE,
    **given: Any,
) -> Any:
    """`block(x, **given)`, of which one half of the sequences computes while the tokens of the
    other half travel between the ranks.

        first half   attention, router | send           experts | send back
        second half    attention, router | send           experts | send back

    x: [sequences, tokens, hidden_size]. block: a module of any forward that calls experts over
    ranks once: a MoELayer of tokens="own", or a decoder layer of a transformers model after
    `share_experts(tokens="own")`. Its forward runs twice, on the first ceil(sequences / 2) of them
    and on the rest, the second time from within the first, so its hooks run twice, and what it
    keeps in attributes is not to be read behind its experts. Arguments that are named in
    by_sequence, and caches of transformers, are split likewise; others go to both. Results have an
    entry for each sequence on the first axis, and are those of one batch but for rounding; to the
    bit, if backends take the same way for a half and for the whole.

    plan: what ranks agreed on by `plan_halves`, which is asked for without one; a CUDA graph that
    is captured needs it. Runs as one batch where the plan says so, with its reason, and in compiled
    code. Every rank of the group calls it, with any number of sequences, none too, and the plan of
    all.

    Raises ValueError as `plan_halves` does, for arguments that cannot be split, for more tokens
    than planned, and where a gradient is asked for in spite of the plan; RuntimeError for a block
    that does not exchange tokens exactly once in a call.
    """
    if torch.compiler.is_compiling():
        return block(x, **given)
    check_x(x)
    if plan is None:
        plan = plan_halves(block, x)
    sequences, tokens = x.shape[:2]
    first = first_half(sequences)
    _check_rows(plan, (first * tokens, (sequences - first) * tokens))
    if not plan.split:
        with agreed_on(plan.rows):
            return block(x, **given)
    pair, caches = split(given, by_sequence, sequences, first)
    out = _in_turns(block, plan, (x[:first], x[first:]), pair)
    for cache in caches:
        cache.put()
    return out


def _in_turns(
    block: nn.Module, plan: HalvesPlan, halves: tuple[Tensor, Tensor], given: tuple[Given, Given]
) -> Any:
    second_out: list[Any] = []

    def second() -> None:
        second_out.append(block(halves[1], **given[1]))

    turns = Turns(plan.rows_of_halves, plan.collective, second if len(halves[1]) else None)
    with taking(turns), agreed_on(plan.rows_of_halves[0]):
        out = block(halves[0], **given[0])
    turns.require_both()
    return joined(out, second_out[0]) if second_out else out


def _check_rows(plan: HalvesPlan, halves: tuple[int, int]) -> None:
    """Raise ValueError for more tokens than a plan is of."""
    over = sum(halves) > plan.rows
    if over or (
        plan.split and any(n > m for n, m in zip(halves, plan.rows_of_halves, strict=True))
    ):
        raise ValueError(
            f"x has {sum(halves)} tokens, {halves[0]} and {halves[1]} in its halves, and the plan "
            f"is for at most {plan.rows}, {plan.rows_of_halves[0]} and {plan.rows_of_halves[1]}; "
            "make one for the most tokens of a rank"
        )
