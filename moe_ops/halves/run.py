"""A block on two halves of a batch, which take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.halves.found import blocks_of
from moe_ops.halves.plan import HalvesPlan, check_x, first_half, plan_halves
from moe_ops.halves.split import Given, joined, split, tensors_in
from moe_ops.ranks.turns import Streams, Turns, agreed_on, taking

# What transformers' decoder layers are given for each sequence.
BY_SEQUENCE = ("attention_mask", "position_ids", "position_embeddings")


def two_halves(
    block: nn.Module | Sequence[nn.Module],
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
    `share_experts(tokens="own")`. Several run one after the other, each on the result of the one
    before and with the same other arguments; between them halves stay apart, so that the first one
    goes on while the second one's results are on their way back.

    A forward runs twice, on the first ceil(sequences / 2) of them and on the rest, the second time
    from within the first, so its hooks run twice, and what it keeps in attributes is not to be read
    behind its experts. Arguments that are named in by_sequence, and caches of transformers, are
    split likewise; others go to both. Results have an entry for each sequence on the first axis,
    and are those of one batch but for rounding; to the bit, if backends take the same way for a
    half and for the whole.

    plan: what ranks agreed on by `plan_halves`, which is asked for without one; a CUDA graph that
    is captured needs it. Runs as one batch where the plan says so, with its reason, and in compiled
    code. Every rank of the group calls it, with any number of sequences, none too, and the plan of
    all.

    Raises ValueError as `plan_halves` does, for arguments that cannot be split, for more tokens
    than planned, and where a gradient is asked for in spite of the plan; RuntimeError for a block
    that does not exchange tokens exactly once in a call.
    """
    if torch.compiler.is_compiling():
        return _whole(blocks_of(block), x, given)
    check_x(x)
    blocks = blocks_of(block)
    if plan is None:
        plan = plan_halves(block, x)
    sequences, tokens = x.shape[:2]
    first = first_half(sequences)
    _check_rows(plan, (first * tokens, (sequences - first) * tokens))
    if not plan.split:
        with agreed_on(plan.rows):
            return _whole(blocks, x, given)
    pair, caches = split(given, by_sequence, sequences, first)
    streams = Streams(x.device)
    streams.hand_over(1, (x, *tensors_in(list(pair[1].values()))))
    halves = _in_turns(blocks, plan, (x[:first], x[first:]), pair, streams)
    kept = [t for cache in caches for t in cache.left_by_second()]
    streams.hand_over(0, (*tensors_in(halves[1]), *kept))
    for cache in caches:
        cache.put()
    return halves[0] if first == sequences else joined(*halves)


def _whole(blocks: Sequence[nn.Module], x: Tensor, given: Given) -> Any:
    out: Any = x
    for block in blocks:
        out = block(out, **given)
    return out


def _in_turns(
    blocks: Sequence[nn.Module],
    plan: HalvesPlan,
    halves: tuple[Any, Any],
    given: tuple[Given, Given],
    streams: Streams,
) -> tuple[Any, Any]:
    """What blocks make of both halves, of which the second one may have no tokens."""
    first, second = halves
    is_empty = not len(second)
    for block in blocks:
        found: list[Any] = []

        def run_second(block: nn.Module = block, x: Any = second, found: Any = found) -> None:
            found.append(block(x, **given[1]))

        run = None if is_empty else run_second
        turns = Turns(plan.rows_of_halves, plan.collective, run, streams)
        with taking(turns), agreed_on(plan.rows_of_halves[0]):
            first = block(first, **given[0])
        turns.require_both()
        second = found[0] if found else second
    return first, second


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
