"""The transport `push` as a backend: each rank stores its tokens into the memory of the others; and
the sum of parts that are stored so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.triton_device import refuse_device
from moe_ops.backends.triton_ranks import (
    OF_BATCHES,
    contiguous_of,
    laid_out,
    parts_of,
    refuse_words,
    summed,
)
from moe_ops.backends.widths import whole_words
from moe_ops.ops.combine_tokens import CombineTokensCall, combine_tokens
from moe_ops.ops.combine_tokens import arithmetic as of_combine
from moe_ops.ops.dispatch_tokens import DispatchTokensCall, agree, dispatch_tokens
from moe_ops.ops.experts_over_ranks import (
    ExpertsOverRanksCall,
    experts_over_ranks,
    over_ranks,
    traffic,
)
from moe_ops.ops.sum_ranks import SumRanksCall, in_order, sum_ranks
from moe_ops.ranks import peers
from moe_ops.ranks.batches import BATCHED
from moe_ops.ranks.groups import Group
from moe_ops.ranks.links import LINKS, most_parts, widened
from moe_ops.ranks.packed import ALIGNMENT
from moe_ops.ranks.transport import AUTO, PUSH
from moe_ops.registry.backend import Rows
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import by_parts

NO_GRADIENT = "has no gradients, and one is asked for"
NO_MEMORY = "needs memory that no eager call has made; run the call before the capture"
NO_OTHER = "has no other rank to store to"


def refuse_rows(collective: str, group: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Why rows of these tensors cannot be stored to the other ranks of a group, or None."""
    if collective != PUSH:
        return f"stores tokens for {PUSH!r}, got collective={collective!r}"
    if Group.of(group).size == 1:
        return NO_OTHER
    if needs_grad(*tensors.values()):
        return NO_GRADIENT
    return refuse_words(tensors) or refuse_device(next(iter(tensors.values())))


def supports_dispatch(call: DispatchTokensCall) -> str | None:
    """Why the tokens of a call cannot be stored to other ranks, or None."""
    return refuse_rows(call.collective, call.group, parts_of(call))


def supports_combine(call: CombineTokensCall) -> str | None:
    """Why the rows of a call cannot be stored back, or None."""
    if not call.ids_TK.shape[1]:
        return "needs an id for each token"
    rows = call.y_GD[0] if call.layout == BATCHED else call.y_GD
    return refuse_rows(call.collective, call.group, {"y_GD": rows})


def supports_experts(call: ExpertsOverRanksCall) -> str | None:
    """Why the tokens of a layer cannot go by `push`, or None."""
    layer, asked = call.layer, call.ranks.collective
    if asked not in (AUTO, PUSH):
        return f"collective={asked!r} was asked for"
    if needs_grad(layer.w13_EFD, layer.w2_EDI, layer.b13_EF, layer.b2_ED):
        return NO_GRADIENT
    rows = {"x_TD": layer.x_TD, "weights_TK": layer.weights_TK}
    reason = refuse_rows(PUSH, call.ranks.group, rows)
    if reason is not None or asked == PUSH:
        return reason
    return peers.refusal(call.ranks.group) or _uncaptured(call)


def _uncaptured(call: ExpertsOverRanksCall) -> str | None:
    """Why a call that is captured may not make memory, or None."""
    rows = call.ranks.rows
    if not isinstance(rows, int) or not torch.cuda.is_current_stream_capturing():
        return None
    return NO_MEMORY if peers.memory(call.ranks.group, _bytes(call)) is None else None


def _bytes(call: ExpertsOverRanksCall) -> int:
    """The bytes of a buffer that holds the tokens of all ranks, or their results."""
    sent = traffic(call)
    back = (sent.back + -sent.back % ALIGNMENT) * (sent.top_k if sent.by_choice else 1)
    return sent.ranks * call.ranks.rows * max(sent.there, back)


def supports_sum(call: SumRanksCall) -> str | None:
    """Why the parts of a call cannot be stored to all ranks, or None."""
    part_TD, group = call.part_TD, Group.of(call.group)
    if group.size == 1:
        return NO_OTHER
    if needs_grad(part_TD):
        return NO_GRADIENT
    reason = refuse_device(part_TD) or peers.refusal(group.name)
    if reason is not None or not isinstance(part_TD.shape[0], int):
        return reason
    if not part_TD.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    from moe_ops.kernels.triton.push_sum import sum_bytes

    nbytes = sum_bytes(part_TD, group.size)
    return NO_MEMORY if peers.memory(group.name, nbytes, peers.SUMS) is None else None


def most_summed(call: SumRanksCall) -> int:
    """The most rows whose sum takes no longer than an all-reduce."""
    ranks, nbytes = _sizes(call)
    return LINKS["cuda"].most_summed(ranks, nbytes, widened(ranks, call.part_TD.dtype.itemsize))


def most_stored(call: SumRanksCall) -> int:
    """The most rows that there is memory for."""
    return most_parts(*_sizes(call))


def _sizes(call: SumRanksCall) -> tuple[int, int]:
    """The ranks, and the bytes of a row."""
    return Group.of(call.group).size, call.part_TD.shape[1] * call.part_TD.dtype.itemsize


def most_pushed(call: ExpertsOverRanksCall) -> int | None:
    """The most rows for which storing to peers takes no longer than gathering, where both may."""
    return traffic(call).most_pushed(LINKS["cuda"]) if call.ranks.collective == AUTO else None


@dispatch_tokens.backend(
    PUSH,
    reads=("group", "collective", "scale_TS", "alike", "layout", "experts"),
    supports=supports_dispatch,
    arithmetic=by_parts,
    devices=("cuda",),
    priority=1,
)
def store_tokens(
    call: DispatchTokensCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`dispatch_tokens` in one launch; of batches one or two more place the rows."""
    from moe_ops.kernels.triton import push

    sent = contiguous_of(call)
    group = agree("dispatch_tokens", sent.x_TD, sent.x_TD.shape[0], call, {})
    nbytes = push.dispatch_bytes(sent, group.size, call.rows)
    tables = (call.rank_of_P.contiguous(), call.slot_of_P.contiguous())
    x_GD, scale_GS, weights_GK, ids_GK, served_G = push.dispatch(
        sent, tables, call.rows, _arena(group, nbytes, sent.x_TD.device)
    )
    splits_2R = torch.empty((2, 0), dtype=torch.int64, device="cpu")
    return laid_out(call, (x_GD, scale_GS, weights_GK, ids_GK, served_G, splits_2R))


@combine_tokens.backend(
    PUSH,
    reads=("group", "collective", *OF_BATCHES),
    supports=supports_combine,
    arithmetic=of_combine,
    devices=("cuda",),
    priority=1,
)
def store_back(call: CombineTokensCall) -> Tensor:
    """`combine_tokens` in one launch; of batches one more sums rows first."""
    from moe_ops.kernels.triton import push

    call = summed(call)
    y_GD = call.y_GD.contiguous()
    group = agree("combine_tokens", y_GD, call.ids_TK.shape[0], call, {})
    return push.combine(
        y_GD, call.token_N.contiguous(), call.ids_TK.contiguous(), call.rank_of_P.contiguous(),
        call.rows, _arena(group, push.combine_bytes(y_GD), y_GD.device),
    )  # fmt: skip


@experts_over_ranks.backend(
    PUSH,
    reads=experts_over_ranks.optional,
    supports=supports_experts,
    arithmetic=by_parts,
    rows=Rows(preferred=most_pushed),
    devices=("cuda",),
    priority=1,
)
def pushed(call: ExpertsOverRanksCall) -> Tensor:
    """`experts_over_ranks` on the tokens that need this rank, in static slots."""
    # Results may be wider than tokens in codes: memory is made once for both.
    _arena(Group.of(call.ranks.group), _bytes(call), call.layer.x_TD.device)
    return over_ranks(call, PUSH)


@sum_ranks.backend(
    PUSH,
    reads=sum_ranks.optional,
    supports=supports_sum,
    arithmetic=in_order,
    rows=Rows(preferred=most_summed, possible=most_stored),
    devices=("cuda",),
    priority=1,
)
def sum_pushed(call: SumRanksCall) -> Tensor:
    """`sum_ranks` in one launch."""
    from moe_ops.kernels.triton import push_sum

    part_TD, group = call.part_TD.contiguous(), Group.of(call.group)
    nbytes = push_sum.sum_bytes(part_TD, group.size)
    return push_sum.sum_parts(part_TD, _arena(group, nbytes, part_TD.device, peers.SUMS))


def _arena(
    group: Group, nbytes: int, device: torch.device, ops: tuple[str, ...] = peers.TOKENS
) -> Any:
    """The memory of a group for these ops, as kernels take it."""
    from moe_ops.kernels.triton import push

    known, held = peers.reserve(group.name, nbytes, ops, push.arena_bytes, device)
    programs = min(push.MOST_PROGRAMS, 1 << (known.processors.bit_length() - 1))
    return push.Arena(
        held.words, held.table_R, held.error, held.half, group.rank, programs, known.limit
    )


dispatch_tokens.rounds(PUSH, whole_words)
