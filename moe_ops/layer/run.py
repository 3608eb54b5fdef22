"""The experts of a layer run: those of this rank on tokens given, or all ranks' on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ops.layer.exchange import Exchange
from moe_ops.layer.operands import Operands
from moe_ops.layer.parts import ordered_rows
from moe_ops.ops import (
    combine,
    combine_tokens,
    dispatch_tokens,
    experts,
    experts_accumulating,
    experts_over_ranks,
    sum_ranks,
)
from moe_ops.ops.by_choice import sum_over_ranks
from moe_ops.ops.experts_over_ranks import alike, in_turn
from moe_ops.ranks.choices import by_choice, rows_of_pairs
from moe_ops.ranks.groups import Group
from moe_ops.ranks.kept import after
from moe_ops.ranks.shares import in_shares, share_of
from moe_ops.ranks.transport import AUTO, GATHER, Tables
from moe_ops.ranks.turns import turns
from moe_ops.registry.gradients import needs_grad, without_gradient
from moe_ops.registry.invariance import invariant, invariant_if

NO_GRADIENT = (
    "this MoELayer quantises its inputs, through which no gradients are defined, as rounding is "
    "flat; for inference call it under torch.inference_mode(), or train without quantised inputs"
)


class Routed(NamedTuple):
    """Tokens, and for each the experts that were chosen and their weights."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


@dataclass(slots=True)
class Ranks:
    """Who exchanges tokens, and on which rank and in which slot a physical expert is."""

    exchange: Exchange
    rank_of_P: Tensor
    slot_of_P: Tensor


def run_here(held: Operands, routed: Routed, expert_map: Tensor | None) -> Tensor:
    """The weighted sum of this rank's experts; expert_map as `experts` takes it."""
    return _recorded(held, partial(_run_here, held, expert_map=expert_map), routed)


def run_over_ranks(held: Operands, ranks: Ranks, rows: int, routed: Routed) -> Tensor:
    """The weighted sum of the experts of all ranks for this rank's tokens, at most `rows`, of which
    no more are sent at once than the ranks' exchange says."""
    return _recorded(held, partial(_in_chunks, held, ranks, rows), routed)


def run_summed(
    held: Operands, routed: Routed, expert_map: Tensor | None, group: str, fused: int
) -> Tensor:
    """The weighted sum of the experts of all ranks for tokens that all ranks have, in the order of
    choices. fused: how many of a token's experts every rank holds."""

    def run(routed: Routed) -> Tensor:
        if held.has_order_by_expert:
            add = invariant_if(held.batch_invariant, sum_ranks)
            y_ND: Tensor = add(_of_pairs(held, routed, expert_map), group)
            return y_ND.unflatten(0, routed.ids_TK.shape).sum(1)

        def here(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
            return _once(held, Routed(held.ordered(x_TD), weights_TK, ids_TK), expert_map)

        return sum_over_ranks(
            here, *routed, group, fused=fused, batch_invariant=held.batch_invariant
        )

    return _recorded(held, run, routed)


def _in_chunks(held: Operands, ranks: Ranks, rows: int, routed: Routed) -> Tensor:
    """Each chunk by itself; every rank has as many, also of no tokens."""
    run = _exchanged if ranks.exchange.sharers == 1 else _in_shares
    most = ranks.exchange.most
    if rows <= most:
        return run(held, ranks, rows, routed)
    done: list[Tensor] = []
    for start in range(0, rows, most):
        # The last one takes what is left, for the op to refuse what nobody agreed on.
        stop = start + most if start + most < rows else None
        x_TD, weights_TK, ids_TK = [t[start:stop] for t in routed]
        chunk = Routed(x_TD, weights_TK, after(ids_TK, done[-1] if done else None))
        done.append(run(held, ranks, min(most, rows - start), chunk))
    return torch.cat(done)


def _recorded(held: Operands, run: Callable[[Routed], Tensor], routed: Routed) -> Tensor:
    """What a run makes of tokens and weights. Rounding is flat: where a gradient is wanted of what
    is quantised, a backward raises RuntimeError."""
    if not (held.quantizes_inputs and needs_grad(routed.x_TD, held.w13.bias)):
        return run(routed)
    with torch.no_grad():
        out_TD = run(routed)
    sources = (routed.x_TD, routed.weights_TK, held.w13.bias, held.w2.bias)
    return without_gradient(out_TD, NO_GRADIENT, *sources)


def _run_here(held: Operands, routed: Routed, expert_map: Tensor | None) -> Tensor:
    x_TD, weights_TK, ids_TK = routed
    if not held.has_order_by_expert:
        return _once(held, Routed(held.ordered(x_TD), weights_TK, ids_TK), expert_map)
    return _of_pairs(held, routed, expert_map).unflatten(0, ids_TK.shape).sum(1)


def _of_pairs(held: Operands, routed: Routed, expert_map: Tensor | None) -> Tensor:
    """A weighted row [T * K, D] for each pair of a token and an expert, each of which takes columns
    in an order of its own."""
    x_TD, weights_TK, ids_TK = routed
    assert held.input_order is not None
    x_RD = ordered_rows(x_TD, ids_TK, held.input_order, expert_map)
    pairs = Routed(x_RD, weights_TK.reshape(-1, 1), ids_TK.reshape(-1, 1))
    return _once(held, pairs, expert_map)


def _once(held: Operands, routed: Routed, expert_map: Tensor | None) -> Tensor:
    """One call of `experts`."""
    run, options = experts, held.options()
    if held.adds_to_main_grad:
        run, options = experts_accumulating, held.training_options()
    out_TD = invariant_if(held.batch_invariant, run)(
        held.padded(routed.x_TD), routed.weights_TK, routed.ids_TK, held.w13.weight, held.w2.weight,
        held.w13.bias, held.w2.bias, expert_map=expert_map,
        expert_offset=None if expert_map is None else held.expert_offset, **options,
    )  # fmt: skip
    return held.cut(out_TD)


def _in_shares(held: Operands, ranks: Ranks, rows: int, routed: Routed) -> Tensor:
    """Exchange tokens that neighbours all hold: each of them sends a share."""
    group = Group.of(ranks.exchange.tp_group)
    most = share_of(rows, group)

    def send(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        return _exchanged(held, ranks, most, Routed(x_TD, weights_TK, ids_TK))

    return in_shares(group, send, *routed)


def _exchanged(held: Operands, ranks: Ranks, rows: int, routed: Routed) -> Tensor:
    """The weighted sum of the experts of all ranks, for tokens that are sent at once."""
    if why_by_parts(held) is None:
        args, options = arguments_over_ranks(held, ranks, rows, routed)
        taken = turns()
        if taken is not None:
            with invariant(held.is_invariant):
                return held.cut(in_turn(experts_over_ranks.call(*args, **options), taken))
        return held.cut(invariant_if(held.batch_invariant, experts_over_ranks)(*args, **options))
    # An expert's order of columns, and its main_grad, are known where it lies.
    x_TD, weights_TK, ids_TK = routed
    tables, group = Tables(ranks.rank_of_P, ranks.slot_of_P), ranks.exchange.group
    plain, collective, apart = held.plain_options(), ranks.exchange.collective, held.is_invariant
    collective = GATHER if collective == AUTO else collective
    send, bring_back = (
        invariant_if(held.batch_invariant, op) for op in (dispatch_tokens, combine_tokens)
    )
    arrived = send(
        x_TD, weights_TK, ids_TK, tables.rank_of_P, tables.slot_of_P, rows, group,
        collective=collective, alike=alike(lambda name: plain[name], x_TD, group, apart),
    )  # fmt: skip
    K = ids_TK.shape[1] if apart else 1
    if apart:
        arrived = by_choice(arrived, ids_TK, tables, collective, group)
        ids_TK = ids_TK.reshape(-1, 1)
    x_GD, _, weights_GK, ids_GK, *handle = arrived
    if apart and not held.has_order_by_expert:
        weights_GK = torch.ones_like(weights_GK)
    y_GD = run_here(held, Routed(x_GD, weights_GK, ids_GK), None)
    out_TD: Tensor = bring_back(
        y_GD, ids_TK, tables.rank_of_P, tables.slot_of_P, *handle, rows * K, group, collective
    )
    return _weighed(held, routed, out_TD, tables.physical) if apart else out_TD


def _weighed(held: Operands, routed: Routed, y_ND: Tensor, physical: int) -> Tensor:
    """The sum of each token's rows, one for each choice, as one process makes it of its own."""
    if held.has_order_by_expert:  # rows that are weighed already
        return y_ND.unflatten(0, routed.ids_TK.shape).sum(1)
    weigh = invariant_if(held.batch_invariant, combine)
    out_TD: Tensor = weigh(y_ND, routed.weights_TK, rows_of_pairs(routed.ids_TK, physical))
    return out_TD


def why_by_parts(held: Operands) -> str | None:
    """Why a layer's tokens are sent, and its experts run, by ops of their own, or None."""
    if held.has_order_by_expert:
        return "each of its experts takes columns in an order of its own"
    return "it adds gradients to a main_grad" if held.adds_to_main_grad else None


def arguments_over_ranks(
    held: Operands, ranks: Ranks, rows: int, routed: Routed
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `experts_over_ranks` by place and by name."""
    args = (
        held.padded(held.ordered(routed.x_TD)), routed.weights_TK, routed.ids_TK, held.w13.weight,
        held.w2.weight, ranks.rank_of_P, ranks.slot_of_P, rows, ranks.exchange.group,
        ranks.exchange.collective,
    )  # fmt: skip
    return args, {"b13_EF": held.w13.bias, "b2_ED": held.w2.bias, **held.options()}
