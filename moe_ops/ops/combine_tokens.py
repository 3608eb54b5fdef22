"""Combine over ranks: a token's rows come back from the ranks that it was sent to, summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import (
    INDICES,
    check_choice,
    check_devices,
    check_float,
    check_size,
    check_tensor,
)
from moe_ops.ops.dispatch_tokens import (
    MOST_PAIRS,
    agree,
    check_layout,
    check_rows,
    check_tables,
    not_pushed,
)
from moe_ops.ranks import exchange, gather
from moe_ops.ranks.agree import Values
from moe_ops.ranks.batches import BATCHED, ROWS, from_batches, served
from moe_ops.ranks.groups import Group
from moe_ops.ranks.kept import keep
from moe_ops.ranks.transport import EXCHANGE, GATHER, PUSH, TRANSPORTS, Tables
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import Refused
from moe_ops.registry.spec import op
from moe_ops.registry.watched import readable


@dataclass(slots=True)
class CombineTokensCall:
    """The arguments of `combine_tokens`."""

    y_GD: Tensor
    ids_TK: Tensor
    rank_of_P: Tensor
    slot_of_P: Tensor
    token_N: Tensor
    splits_2R: Tensor
    rows: int
    group: str = ""
    collective: str = GATHER
    layout: str = ROWS
    weights_GK: Tensor | None = None
    slot_GK: Tensor | None = None

    ROWS: ClassVar[str] = "rows"
    HOST: ClassVar[tuple[str, ...]] = ("splits_2R",)


def check(call: CombineTokensCall) -> None:
    """Raise ValueError or TypeError unless `combine_tokens` takes these arguments."""
    y_GD, splits_2R = call.y_GD, call.splits_2R
    check_float("y_GD", y_GD, 3 if call.layout == BATCHED else 2)
    check_tensor("ids_TK", call.ids_TK, 2, INDICES)
    check_tensor("token_N", call.token_N, 1, (torch.int32,))
    check_tensor("splits_2R", splits_2R, 2, (torch.int64,))
    check_tables(y_GD, call.rank_of_P, call.slot_of_P)
    check_choice("collective", call.collective, TRANSPORTS)
    check_devices(y_GD, ids_TK=call.ids_TK, token_N=call.token_N)
    if not (splits_2R.is_cpu or (splits_2R.is_meta and y_GD.is_meta)):
        raise ValueError(f"splits_2R is on {splits_2R.device}; the host reads it: leave it on cpu")
    check_rows(call.rows, call.group, MOST_PAIRS)
    ranks = Group.of(call.group).size
    exchanged = call.collective == EXCHANGE
    check_size("splits_2R", splits_2R, 0, 2, "sent and received")
    check_size("splits_2R", splits_2R, 1, ranks if exchanged else 0, "as dispatch_tokens gave it")
    check_layout(call.layout, call.collective)
    _check_batches(call, ranks * call.rows)
    if call.layout == BATCHED:
        return
    if not exchanged:
        check_size("y_GD", y_GD, 0, ranks * call.rows, "ranks times rows")
    if call.collective == PUSH:
        check_size("token_N", call.token_N, 0, ranks * call.rows, "as dispatch_tokens gave it")


def _check_batches(call: CombineTokensCall, G: int) -> None:
    """Raise ValueError or TypeError unless weights and slots are there where batches are, and fit
    them."""
    y_EMD, weights_GK, slot_GK = call.y_GD, call.weights_GK, call.slot_GK
    if call.layout != BATCHED:
        if not weights_GK is slot_GK is None:
            raise ValueError(
                f"weights_GK and slot_GK are those of batches; give layout={BATCHED!r}, or leave "
                "them out"
            )
        return
    if weights_GK is None or slot_GK is None:
        raise ValueError(
            f"layout={BATCHED!r} needs weights_GK and slot_GK, as dispatch_tokens gave them"
        )
    check_size("y_GD", y_EMD, 1, G, "ranks times rows")
    check_float("weights_GK", weights_GK, 2, y_EMD)
    check_tensor("slot_GK", slot_GK, 2, (torch.int32,))
    for name, t in (("weights_GK", weights_GK), ("slot_GK", slot_GK)):
        check_size(name, t, 0, G, "ranks times rows")
        check_size(name, t, 1, call.ids_TK.shape[1], "the top-k of ids_TK")
    check_devices(y_EMD, weights_GK=weights_GK, slot_GK=slot_GK)


def check_handle(call: CombineTokensCall) -> None:
    """Raise ValueError unless rows and tokens are as many as an exchange sent and received, and
    NotImplementedError where a compiler traces the definition."""
    sent, received = call.splits_2R.sum(1).tolist()
    if isinstance(sent, torch.SymInt):  # gradients are taken of the definition
        raise NotImplementedError(
            "a compiled combine_tokens has no gradient by exchange, whose rows are known when it "
            'runs; use collective="gather", or call it eagerly'
        )
    T, token_N = call.ids_TK.shape[0], call.token_N
    check_size("token_N", token_N, 0, sent, "the rows that splits_2R says were sent")
    check_size("y_GD", call.y_GD, 0, received, "the rows that splits_2R says were received")
    if int(call.splits_2R.min()) < 0:
        raise ValueError("splits_2R counts less than no rows; give what dispatch_tokens returned")
    if sent and readable(token_N) and not 0 <= int(token_N.min()) <= int(token_N.max()) < T:
        raise ValueError(f"token_N names tokens beyond the {T} of ids_TK; give both of one call")


def in_rows(call: CombineTokensCall, sums: BatchSums | None = None) -> CombineTokensCall:
    """A call of rows for one of batches, of which each row is summed here over its experts; by
    `sums`, if it is given."""
    c = call
    assert c.weights_GK is not None and c.slot_GK is not None
    sum_up = _summed if sums is None else sums
    y_GD, served_G = sum_up(c.y_GD, c.weights_GK, c.slot_GK)
    token_N = served_G if c.collective == PUSH else c.token_N.new_empty((0,))
    return replace(c, y_GD=y_GD, token_N=token_N, layout=ROWS, weights_GK=None, slot_GK=None)


BatchSums = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _summed(y_EMD: Tensor, weights_GK: Tensor, slot_GK: Tensor) -> tuple[Tensor, Tensor]:
    return from_batches(y_EMD, weights_GK, slot_GK), served(slot_GK)


def arithmetic(call: CombineTokensCall) -> str:
    """That of a sum over ranks, which is one of no more than a row where rows are of choices."""
    if call.layout == BATCHED:
        return Refused(
            "a rank adds up what its experts made of a token before it sends that, and which these "
            f"are depends on the ranks; take experts_over_ranks, which sends tokens in {ROWS!r}"
        )
    if call.ids_TK.shape[1] > 1 and Group.of(call.group).size > 1:
        return Refused(
            "a row is the sum of those experts of a token that one rank serves, and which these "
            "are depends on the ranks, and with replicas on the batch; take experts_over_ranks, or "
            "send a row for each choice (ids_TK [T * K, 1]) and sum them by combine"
        )
    return "float32 in the order of ranks"


@op(check=check, arithmetic=arithmetic)
def combine_tokens(call: CombineTokensCall) -> Tensor:
    """Sum what the ranks made of each token: out_TD[t] = sum over its ranks of their row of t.

    y_GD holds a row for each that `dispatch_tokens` gave here, in its order; rows whose ids are all
    -1 may hold anything, NaN included. The sum is taken in float32, in the order of ranks, and
    rounded to y's dtype. A token that no rank serves gets zeros.

    layout: "batched" takes y_GD [E, M, D], what `experts_batched` made of batches, and weighs and
    sums what experts here made of a row, in float32 (float64 of float64); weights_GK and slot_GK:
    what `dispatch_tokens` returned, token_N its counts_E. Slots past a count are not read.

    y_GD: float [G, D]; ids_TK, rank_of_P, slot_of_P, rows, group and collective: what
    `dispatch_tokens` was given; token_N and splits_2R: what it returned. Result [T, D] in y's
    dtype. Raises as `dispatch_tokens` does, and NotImplementedError for gradients of an exchange
    that are compiled, and where calls are batch invariant and rows are sums of several choices.
    """
    if call.layout == BATCHED:
        out_TD: Tensor = combine_tokens.part(in_rows(call))
        return out_TD
    if call.collective == PUSH:
        raise not_pushed(combine_tokens, call)
    return started(call)()


def started(call: CombineTokensCall) -> Callable[[], Tensor]:
    """Start `combine_tokens` of rows by "gather" or "exchange", as it is defined; what is returned
    waits and gives its result, once. With gradients nothing is sent before that."""
    y_GD, T = call.y_GD, call.ids_TK.shape[0]
    differentiated = needs_grad(y_GD)
    values: Values = {"D": y_GD.shape[1], "gradients": differentiated}
    group = agree("combine_tokens", y_GD, T, call, values)
    if call.collective == EXCHANGE:
        check_handle(call)
        args = (y_GD, T, call.token_N, call.splits_2R, group)
        return partial(exchange.combine, *args) if differentiated else exchange.start_combine(*args)
    tables = Tables(call.rank_of_P, call.slot_of_P)
    more = (y_GD, call.ids_TK, tables, call.rows, group)
    return partial(gather.combine, *more) if differentiated else gather.start_combine(*more)


combine_tokens.fake(fake_impls.combine_tokens)
combine_tokens.keeps(keep)
