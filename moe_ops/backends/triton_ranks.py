"""The Triton backends of tokens that every rank gathers: one launch before each exchange of bytes,
and one after it. Of rows that come back by choices: the sum that the kernels of experts make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.triton_device import refuse_device
from moe_ops.ops.combine import CombineCall, combine
from moe_ops.ops.combine_tokens import CombineTokensCall, combine_tokens, in_rows
from moe_ops.ops.combine_tokens import arithmetic as of_combine
from moe_ops.ops.dispatch_tokens import (
    Arrived,
    DispatchTokensCall,
    agree,
    batched,
    dispatch_tokens,
    scales_of,
)
from moe_ops.ranks.batches import BATCHED
from moe_ops.ranks.groups import Group, all_gather, all_to_all
from moe_ops.ranks.transport import GATHER
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import by_parts

MOST_COLUMNS = 2**15  # which one program copies
NO_GRADIENT = "is not differentiable, and an argument requires grad"


def supports_dispatch(call: DispatchTokensCall) -> str | None:
    """Why the kernels cannot pack the tokens of a call, or None."""
    if call.collective != GATHER:
        return f"packs tokens for {GATHER!r}, got collective={call.collective!r}"
    parts = parts_of(call)
    if needs_grad(*parts.values()):
        return NO_GRADIENT
    return refuse_words(parts) or refuse_device(call.x_TD)


def parts_of(call: DispatchTokensCall) -> dict[str, Tensor]:
    """What is copied of each token, but for its ids."""
    parts = {"x_TD": call.x_TD, "weights_TK": call.weights_TK}
    return parts if call.scale_TS is None else {**parts, "scale_TS": call.scale_TS}


def refuse_words(rows: Mapping[str, Tensor]) -> str | None:
    """Why rows of these tensors are not copied as words, or None."""
    for name, t in rows.items():
        if t.shape[1] * t.dtype.itemsize % 4 or not t.shape[1]:
            return f"copies words of four bytes, got {name} of {t.shape[1]} x {t.dtype.itemsize}"
        if t.shape[1] > MOST_COLUMNS:
            return f"takes {MOST_COLUMNS} columns at most, got {t.shape[1]}"
    return None


OF_BATCHES = ("layout", "weights_GK", "slot_GK")  # arguments of `combine_tokens`


def laid_out(call: DispatchTokensCall, arrived: Arrived) -> Arrived:
    """Rows that arrived, in the layout that a call asks for."""
    if call.layout != BATCHED:
        return arrived
    from moe_ops.kernels.triton.batches import in_batches

    return batched(call, arrived, in_batches)


def summed(call: CombineTokensCall) -> CombineTokensCall:
    """A call of rows, of one of batches too."""
    if call.layout != BATCHED:
        return call
    from moe_ops.kernels.triton.batches import from_batches

    def sums(*given: Tensor) -> tuple[Tensor, Tensor]:
        return from_batches(*(t.contiguous() for t in given))

    return in_rows(call, sums)


def contiguous_of(call: DispatchTokensCall) -> Any:
    """What a call sends, as kernels take it."""
    from moe_ops.kernels.triton.ranks import Rows

    parts = (call.x_TD, scales_of(call), call.weights_TK, call.ids_TK)
    return Rows(*(t.contiguous() for t in parts))


def supports_combine(call: CombineTokensCall) -> str | None:
    """Why the kernel cannot sum the rows of a call, or None."""
    if call.collective != GATHER:
        return f"sums the rows of {GATHER!r}, got collective={call.collective!r}"
    if not call.ids_TK.shape[1]:
        return "needs an id for each token"
    return NO_GRADIENT if needs_grad(call.y_GD) else refuse_device(call.y_GD)


@dispatch_tokens.backend(
    "triton",
    reads=("group", "collective", "scale_TS", "alike", "layout", "experts"),
    supports=supports_dispatch,
    arithmetic=by_parts,
    devices=("cuda",),
    priority=1,
)
def gather_packed(
    call: DispatchTokensCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`dispatch_tokens` by one all-gather between two launches."""
    from moe_ops.kernels.triton import ranks

    sent = contiguous_of(call)
    group = agree("dispatch_tokens", sent.x_TD, sent.x_TD.shape[0], call, {})
    packed = ranks.pack(sent, call.rows, call.rank_of_P.shape[0])
    x_GD, scale_GS, weights_GK, ids_GK = ranks.unpack(
        all_gather(packed, group), (call.rank_of_P.contiguous(), call.slot_of_P.contiguous()),
        sent, call.rows, group.rank,
    )  # fmt: skip
    splits_2R = torch.empty((2, 0), dtype=torch.int64, device="cpu")
    arrived = (x_GD, scale_GS, weights_GK, ids_GK, ids_GK.new_empty((0,)), splits_2R)
    return laid_out(call, arrived)


@combine_tokens.backend(
    "triton",
    reads=("group", "collective", *OF_BATCHES),
    supports=supports_combine,
    arithmetic=of_combine,
    devices=("cuda",),
    priority=1,
)
def sum_gathered(call: CombineTokensCall) -> Tensor:
    """`combine_tokens` by one all-to-all, and one launch after it."""
    from moe_ops.kernels.triton import ranks

    call = summed(call)
    group: Group = agree("combine_tokens", call.y_GD, call.ids_TK.shape[0], call, {})
    each = [call.rows] * group.size
    back_GD = all_to_all(call.y_GD, each, each, group).contiguous()
    return ranks.combine(
        back_GD, call.ids_TK.contiguous(), call.rank_of_P.contiguous(), call.rows, group.size,
        group.rank,
    )  # fmt: skip


def supports_sum(call: CombineCall) -> str | None:
    """Why the kernel does not sum the rows of tokens, or None."""
    return NO_GRADIENT if needs_grad(call.y_RD, call.weights_TK) else refuse_device(call.y_RD)


def as_in_experts(call: CombineCall) -> str:
    """The arithmetic of the sum behind the second product of invariant `experts`."""
    return "each product and sum at once, rounded to float32, in the order of choices"


@combine.backend(
    "triton", supports=supports_sum, devices=("cuda",), priority=1, arithmetic=as_in_experts
)
def sum_choices(call: CombineCall) -> Tensor:
    """`combine` by the kernel that sums rows behind the second product of `experts`."""
    from moe_ops.kernels.triton.experts.schedule.combine import sum_rows

    (T, K), rows_R = call.weights_TK.shape, call.rows_R
    if T == 0:
        return call.y_RD.new_empty((0, call.y_RD.shape[1]))
    R, device = T * K, rows_R.device
    places_R = torch.arange(R, dtype=torch.int32, device=device)
    # Slot R takes what the unused rows would write.
    inverse_R = torch.full((R + 1,), -1, dtype=torch.int32, device=device)
    inverse_R.scatter_(0, rows_R.long().clamp(-1, R) % (R + 1), places_R)
    given = (call.y_RD.contiguous(), inverse_R[:R], call.weights_TK.contiguous(), K)
    return sum_rows(*given, ordered=True)


combine.keeps_for_invariant("triton")
