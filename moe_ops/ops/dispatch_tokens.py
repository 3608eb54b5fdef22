"""Dispatch over ranks: each token goes to the ranks that hold its experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.options import check_int
from moe_ops.checks.shapes import (
    INDICES,
    check_choice,
    check_devices,
    check_float,
    check_no_double,
    check_size,
    check_tensor,
)
from moe_ops.ops.dispatch import row_dtypes
from moe_ops.ranks import exchange, gather
from moe_ops.ranks.agree import Values, require_alike
from moe_ops.ranks.batches import BATCHED, LAYOUTS, ROWS, in_batches
from moe_ops.ranks.groups import Group
from moe_ops.ranks.kept import keep
from moe_ops.ranks.tables import checksums
from moe_ops.ranks.transport import EXCHANGE, GATHER, PUSH, TRANSPORTS, Sent, Tables
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import by_parts
from moe_ops.registry.spec import Op, op
from moe_ops.registry.watched import readable

SCALES = (torch.float32, torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)

MOST_ROWS = 2**20  # of a rank in one call; more are given in several
MOST_PAIRS = 2**25  # rows of a rank that come back, which may be one for each choice of a token
MOST_ALIKE = 512  # bytes, of what a rank says of itself in one header


@dataclass(slots=True)
class DispatchTokensCall:
    """The arguments of `dispatch_tokens`."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor
    rank_of_P: Tensor
    slot_of_P: Tensor
    rows: int
    group: str = ""
    scale_TS: Tensor | None = None
    collective: str = GATHER
    alike: str = ""
    layout: str = ROWS
    experts: int = 0

    ROWS: ClassVar[str] = "rows"


def check(call: DispatchTokensCall) -> None:
    """Raise ValueError or TypeError unless `dispatch_tokens` takes these arguments."""
    x_TD, weights_TK, ids_TK, scale_TS = call.x_TD, call.weights_TK, call.ids_TK, call.scale_TS
    check_tensor("x_TD", x_TD, 2, row_dtypes())
    check_float("weights_TK", weights_TK, 2, x_TD)
    check_tensor("ids_TK", ids_TK, 2, INDICES)
    check_size("ids_TK", ids_TK, 0, x_TD.shape[0], "the tokens of x_TD")
    check_size("weights_TK", weights_TK, 0, x_TD.shape[0], "the tokens of x_TD")
    check_size("weights_TK", weights_TK, 1, ids_TK.shape[1], "the top-k of ids_TK")
    check_tables(x_TD, call.rank_of_P, call.slot_of_P)
    check_choice("collective", call.collective, TRANSPORTS)
    if scale_TS is not None:
        check_no_double("x_TD", x_TD, "tokens with scales")
        check_tensor("scale_TS", scale_TS, 2, SCALES)
        check_size("scale_TS", scale_TS, 0, x_TD.shape[0], "the tokens of x_TD")
    check_devices(x_TD, weights_TK=weights_TK, ids_TK=ids_TK, scale_TS=scale_TS)
    check_rows(call.rows, call.group)
    check_layout(call.layout, call.collective)
    _check_experts(call)
    if call.alike:
        check_alike(call.alike)


def check_layout(layout: str, collective: str) -> None:
    """Raise ValueError unless rows that are sent like this may lie so."""
    check_choice("layout", layout, LAYOUTS)
    if layout == BATCHED and collective == EXCHANGE:
        raise ValueError(
            f"layout={BATCHED!r} has a slot for each row that may arrive, and collective="
            f"{EXCHANGE!r} counts them; take {GATHER!r} or {PUSH!r}, or layout={ROWS!r}"
        )


def _check_experts(call: DispatchTokensCall) -> None:
    if call.layout == BATCHED:
        check_int("experts", call.experts, least=1)
        if call.ids_TK.shape[1] < 1:
            raise ValueError(
                f"ids_TK must name at least one expert a token, got shape "
                f"{tuple(call.ids_TK.shape)}; batches are of tokens that have one"
            )
    elif call.experts:
        raise ValueError(
            f"experts={call.experts} says for how many experts here there are batches; give "
            f"layout={BATCHED!r}, or leave it out"
        )


def check_alike(alike: str) -> None:
    """Raise ValueError unless ranks can compare this."""
    try:
        named = isinstance(json.loads(alike), dict)
    except json.JSONDecodeError:
        named = False
    if not named or len(alike.encode()) > MOST_ALIKE:
        raise ValueError(
            f"alike must be a JSON object of at most {MOST_ALIKE} bytes, got {len(alike.encode())} "
            f"bytes: {alike[:80]!r}; give names and short values"
        )


def check_tables(first: Tensor, rank_of_P: Tensor, slot_of_P: Tensor) -> None:
    """Raise ValueError or TypeError unless these say who serves an expert."""
    check_tensor("rank_of_P", rank_of_P, 1, (torch.int32,))
    check_tensor("slot_of_P", slot_of_P, 1, (torch.int32,))
    check_size("slot_of_P", slot_of_P, 0, rank_of_P.shape[0], "the experts of rank_of_P")
    if rank_of_P.shape[0] < 1:
        raise ValueError("rank_of_P is empty; it must hold a rank for each physical expert")
    check_devices(first, rank_of_P=rank_of_P, slot_of_P=slot_of_P)


def check_rows(rows: Any, group: str, most: int = MOST_ROWS) -> None:
    """Raise ValueError or TypeError for a number of rows, or a group, that cannot be."""
    if isinstance(rows, int):  # while tracing it may be symbolic
        check_int("rows", rows, least=1, most=most)
    Group.of(group)


def agree(name: str, first: Tensor, tokens: Any, call: Any, values: Values) -> Group:
    """The group of a call, whose ranks have the same values and tables, and no more tokens than
    rows.

    Raises RuntimeError or ValueError if not: on every rank where the host can tell, see
    `moe_ops/ranks/agree.py`.
    """
    group = Group.of(call.group)
    if isinstance(tokens, int) and (group.size == 1 or readable(first)):
        dtype = str(first.dtype).removeprefix("torch.")
        said = {"collective": call.collective, "dtype": dtype, **values}
        if group.size > 1 and readable(call.rank_of_P) and readable(call.slot_of_P):
            said |= checksums(call.rank_of_P, call.slot_of_P)
        require_alike(name, said, group, tokens, call.rows)
    else:
        torch._check(tokens <= call.rows, lambda: f"{name}: more tokens than rows={call.rows}")
    return group


@op(check=check, arithmetic=by_parts)
def dispatch_tokens(
    call: DispatchTokensCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send each token to the ranks that serve its experts. Returns (x_GD, scale_GS, weights_GK,
    ids_GK, token_N, splits_2R): the rows that arrived here, and what `combine_tokens` needs.

        rank_of_P[p]    the rank that serves physical expert p; -1: every rank (each holds a part of
                        it), -2: the token's own rank (each holds all of it)
        slot_of_P[p]    the slot of p there
        ids_GK[g, k]    the slot here of the expert of a row, int32; -1 if another rank serves it

    A token is one row on each rank that serves an expert of it, whatever the number of experts. An
    id of ids_TK below 0, or not below P, goes nowhere. What a row holds whose ids are all -1 is
    unspecified, and so is a weight whose id is -1. `rows` is a number that all ranks agreed on, and
    that no rank has more tokens than; some may have none.

    collective: "gather" gives G = ranks * rows rows in slots (source rank, token), without any
    count: static shapes, and CUDA graphs; N = 0. "push" gives the same slots, which the ranks store
    into each other's memory: on GPUs of one host, without gradients. token_N [G] is 1 for the rows
    that are served here, 0 for others, which hold anything. "exchange" gives the rows that are
    needed here alone, in the order of ranks and tokens; the host reads how many: splits_2R int64,
    on the CPU, rows sent to and received from each rank, token_N int32 the token in each row that
    was sent.

    layout: "batched" gives the rows by experts, as `experts_batched` takes them, for so many
    `experts` here, without a count that the host waits for: (x_EMD, scale_EMS, weights_GK, slot_GK,
    counts_E, splits_2R). Expert e has the first counts_E[e] of M = ranks * rows slots, what others
    hold is unspecified; slot_GK int32 is e * M + slot of a pair, -1 if another rank serves it. It
    goes with "gather" and "push".

    x_TD: [T, D], floats or the values of `quantize`, with scale_TS [T, S] the scales of its rows
    (scale_GS is [G, 0] without); they travel as bytes. weights_TK: float [T, K]; ids_TK: int32 or
    int64 [T, K]; rank_of_P and slot_of_P: int32 [P]. group: the name of a process group; "" is this
    process alone. Every rank of the group has to call it, with the same rows, group, collective,
    tables, widths and dtypes; gradients are those of the sum of all ranks' losses. alike: a JSON
    object of what else they must have alike, by name, where they compare: on CPUs. Slots of tables
    may differ where the rank is -2.

    Raises ValueError or TypeError for wrong shapes, dtypes, devices or a group that is none; and on
    every rank RuntimeError for ranks that differ or do not answer, and ValueError for more tokens
    than rows; NotImplementedError, with the reason, where "push" cannot run; and RuntimeError where
    ranks find out that their GPUs do not reach each other, or a graph is captured before its memory
    was made.
    """
    if call.layout == BATCHED:
        return batched(call, dispatch_tokens.part(replace(call, layout=ROWS, experts=0)))
    if call.collective == PUSH:
        raise not_pushed(dispatch_tokens, call)
    return started(call)()


Arrived = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def started(call: DispatchTokensCall) -> Callable[[], Arrived]:
    """Start `dispatch_tokens` of rows by "gather" or "exchange", as it is defined; what is returned
    waits and gives its result, once. With gradients nothing is sent before that."""
    sent = Sent(call.x_TD, scales_of(call), call.weights_TK, call.ids_TK)
    tables = Tables(call.rank_of_P, call.slot_of_P)
    differentiated = _differentiated(sent)
    values: Values = {
        "D": call.x_TD.shape[1], "S": sent.scale_TS.shape[1], "K": call.ids_TK.shape[1],
        "P": tables.physical, "weights": str(call.weights_TK.dtype),
        "scales": str(sent.scale_TS.dtype), "gradients": differentiated,
    }  # fmt: skip
    if call.alike:
        values = {**values, **json.loads(call.alike)}
    group = agree("dispatch_tokens", call.x_TD, call.x_TD.shape[0], call, values)
    send: Callable[[], tuple[Tensor, ...]]
    if call.collective == EXCHANGE:
        args = (sent, tables, group)
        send = (
            partial(exchange.dispatch, *args) if differentiated else exchange.start_dispatch(*args)
        )
    else:
        more = (sent, tables, call.rows, group)
        send = partial(gather.dispatch, *more) if differentiated else gather.start_dispatch(*more)

    def arrived() -> Arrived:
        x_GD, scale_GS, weights_GK, ids_GK, *handle = send()
        if handle:
            token_N, splits_2R = handle
        else:
            token_N = ids_GK.new_empty((0,))
            splits_2R = torch.empty((2, 0), dtype=torch.int64, device="cpu")
        return x_GD, scale_GS, weights_GK, ids_GK, token_N, splits_2R

    return arrived


def batched(
    call: DispatchTokensCall, arrived: Arrived, place: Callable[..., Any] = in_batches
) -> Arrived:
    """Rows that arrived, in batches; `place` does what `in_batches` does."""
    x_GD, scale_GS, weights_GK, ids_GK, _, splits_2R = arrived
    x_EMD, scale_EMS, slot_GK, counts_E = place(x_GD, scale_GS, ids_GK, call.experts)
    return x_EMD, scale_EMS, weights_GK, slot_GK, counts_E, splits_2R


def not_pushed(op: Op, call: Any) -> NotImplementedError:
    """Why `push`, which has no definition but its kernels, cannot run a call."""
    reason = op.refusals_of(call).get(PUSH) or "runs as an op alone"
    return NotImplementedError(f"{op.name}: collective={PUSH!r} {reason}; take {GATHER!r} instead")


def _differentiated(sent: Sent) -> str:
    """The names of what has a gradient, each of which comes back by a collective of its own."""
    names = ("x_TD", "scale_TS", "weights_TK")
    return ", ".join(name for name in names if needs_grad(getattr(sent, name)))


def scales_of(call: DispatchTokensCall) -> Tensor:
    """The scales of a call's rows; without any, of no width."""
    if call.scale_TS is not None:
        return call.scale_TS
    return call.x_TD.new_empty((call.x_TD.shape[0], 0), dtype=torch.float32)


dispatch_tokens.fake(fake_impls.dispatch_tokens)
dispatch_tokens.keeps(keep)
