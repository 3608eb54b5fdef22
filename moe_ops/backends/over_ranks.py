"""Transports as backends of the ops over ranks: `gather` and `exchange`.

They stay one opaque op in a compiled graph, in which ranks compare before they send on CPUs, as in
eager mode. All that decides is the same on every rank: `rows`, `group`, `collective`, widths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops.ops.combine_tokens import CombineTokensCall, combine_tokens
from moe_ops.ops.combine_tokens import arithmetic as of_combine
from moe_ops.ops.dispatch_tokens import DispatchTokensCall, dispatch_tokens
from moe_ops.ops.experts_over_ranks import (
    ExpertsOverRanksCall,
    experts_over_ranks,
    over_ranks,
    traffic,
)
from moe_ops.ops.sum_ranks import IN_ORDER, SumRanksCall, in_order, sum_ranks
from moe_ops.ranks import peers
from moe_ops.ranks.groups import Group, all_reduce
from moe_ops.ranks.links import LINKS, widened
from moe_ops.ranks.transport import AUTO, EXCHANGE, GATHER
from moe_ops.registry.backend import Rows
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import Refused, by_parts


def refusal(name: str, asked: str, first: Tensor) -> str | None:
    """Why a transport cannot serve a call, or None."""
    if asked not in (AUTO, name):
        return f"collective={asked!r} was asked for"
    on_gpu = name == EXCHANGE and first.is_cuda and torch.cuda.is_available()
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return "waits for the host to read counts, which a CUDA graph cannot; take 'gather'"
    return None


def most_gathered(call: ExpertsOverRanksCall) -> int | None:
    """The most rows for which gathering all tokens takes no longer than an exchange; any number
    where nothing else may run."""
    link = LINKS.get(call.layer.x_TD.device.type, LINKS["cuda"])
    return traffic(call).most_gathered(link) if call.ranks.collective == AUTO else None


def _of_dispatch(name: str) -> Callable[[DispatchTokensCall], str | None]:
    return lambda call: refusal(name, call.collective, call.x_TD)


def _of_combine(name: str) -> Callable[[CombineTokensCall], str | None]:
    return lambda call: refusal(name, call.collective, call.y_GD)


def _of_experts(name: str) -> Callable[[ExpertsOverRanksCall], str | None]:
    return lambda call: refusal(name, call.ranks.collective, call.layer.x_TD)


@dispatch_tokens.backend(
    GATHER,
    reads=dispatch_tokens.optional,
    supports=_of_dispatch(GATHER),
    arithmetic=by_parts,
)
@dispatch_tokens.backend(
    EXCHANGE,
    reads=dispatch_tokens.optional,
    supports=_of_dispatch(EXCHANGE),
    arithmetic=by_parts,
)
def send(call: DispatchTokensCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`dispatch_tokens` as it is defined, as one op."""
    sent: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = dispatch_tokens.body(call)
    return sent


@combine_tokens.backend(
    GATHER,
    reads=combine_tokens.optional,
    supports=_of_combine(GATHER),
    arithmetic=of_combine,
)
@combine_tokens.backend(
    EXCHANGE,
    reads=combine_tokens.optional,
    supports=_of_combine(EXCHANGE),
    arithmetic=of_combine,
)
def bring_back(call: CombineTokensCall) -> Tensor:
    """`combine_tokens` as it is defined, as one op."""
    summed: Tensor = combine_tokens.body(call)
    return summed


def _not_reduced(call: SumRanksCall) -> str | None:
    return "has no gradients, and one is asked for" if needs_grad(call.part_TD) else None


def _of_reduced(call: SumRanksCall) -> str:
    """The arithmetic of an all-reduce: of two ranks there is one order."""
    if Group.of(call.group).size <= 2:
        return IN_ORDER
    return Refused("an all-reduce adds in an order that may depend on how many bytes there are")


@sum_ranks.backend(
    "all_reduce",
    reads=sum_ranks.optional,
    supports=_not_reduced,
    devices=("cuda",),
    arithmetic=_of_reduced,
)
def all_reduced(call: SumRanksCall) -> Tensor:
    """`sum_ranks` by one all-reduce, in the order that NCCL takes. Of two numbers the sum is
    rounded once; of more it is made in float32."""
    part_TD, group = call.part_TD, Group.of(call.group)
    if group.size == 1:
        return part_TD.clone()
    wide = widened(group.size, part_TD.dtype.itemsize) > 1
    summed = all_reduce(part_TD.float() if wide else part_TD, group)
    return summed.to(part_TD.dtype)


@sum_ranks.backend("shares", reads=sum_ranks.optional, arithmetic=in_order)
def add_shares(call: SumRanksCall) -> Tensor:
    """`sum_ranks` as it is defined, as one op: each rank adds a share, and shares are gathered."""
    found: Tensor = sum_ranks.body(call)
    return found


@experts_over_ranks.backend(
    GATHER,
    reads=experts_over_ranks.optional,
    supports=_of_experts(GATHER),
    rows=Rows(preferred=most_gathered),
    arithmetic=by_parts,
)
def gathered(call: ExpertsOverRanksCall) -> Tensor:
    """`experts_over_ranks` on the tokens of all ranks."""
    _connect(call)
    return over_ranks(call, GATHER)


@experts_over_ranks.backend(
    EXCHANGE,
    reads=experts_over_ranks.optional,
    supports=_of_experts(EXCHANGE),
    arithmetic=by_parts,
)
def exchanged(call: ExpertsOverRanksCall) -> Tensor:
    """`experts_over_ranks` on the tokens that need this rank."""
    _connect(call)
    return over_ranks(call, EXCHANGE)


# The host reads how many rows go where, which it does not have to on a CPU.
dispatch_tokens.waits(EXCHANGE, lambda call: call.x_TD.is_cuda)
combine_tokens.waits(EXCHANGE, lambda call: call.y_GD.is_cuda)
experts_over_ranks.waits(EXCHANGE, lambda call: call.layer.x_TD.is_cuda)


def _connect(call: ExpertsOverRanksCall) -> None:
    """Find out whether the next calls may go by `push`, where that is asked for: all ranks are here
    together, and it is known once for all calls of the group."""
    x_TD, group = call.layer.x_TD, Group.of(call.ranks.group)
    asked = call.ranks.collective == AUTO and x_TD.is_cuda and group.size > 1
    if asked and not torch.cuda.is_current_stream_capturing():
        peers.connect(group.name, x_TD.device)
