"""The transport `exchange`: a token goes once to each rank that it needs, and to no other.

How many rows go where is read by the host, so it cannot be captured in a CUDA graph. Rows lie in
the order of their source ranks and, within one, of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ops.checks.shapes import wide, wide_dtype
from moe_ops.ranks.groups import Group, all_to_all, start_all_to_all
from moe_ops.ranks.packed import pack, unpack
from moe_ops.ranks.tables import known_ids, needed, slots
from moe_ops.ranks.transport import Sent, Tables
from moe_ops.registry.gradients import needs_grad


def start_dispatch(sent: Sent, tables: Tables, group: Group) -> Callable[[], tuple[Tensor, ...]]:
    """Start to send, for which ranks tell each other counts; what is returned waits, and gives
    what `dispatch` does."""
    fields, (token_N, splits_2R) = _sorted_by_rank(sent, tables, group)
    to, of = splits_2R.tolist()
    swapped = start_all_to_all(pack(fields), to, of, group)
    return lambda: (*unpack(swapped(), fields), token_N, splits_2R)


def dispatch(sent: Sent, tables: Tables, group: Group) -> tuple[Tensor, ...]:
    """x_GD, scale_GS, weights_GK and local ids_GK; then the handle: token_N, the token in each row
    that was sent, and splits_2R, on the CPU, the rows sent to each rank and those received."""
    if not needs_grad(sent.x_TD, sent.scale_TS, sent.weights_TK):
        return start_dispatch(sent, tables, group)()
    fields, handle = _sorted_by_rank(sent, tables, group)
    to, of = handle[1].tolist()
    return (*[all_to_all(t, to, of, group) for t in fields], *handle)


def _sorted_by_rank(
    sent: Sent, tables: Tables, group: Group
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """What is sent, in the order of the ranks that it goes to, and the handle."""
    ids_TK, R = known_ids(sent.ids_TK, tables.physical), group.size
    needed_TR = needed(ids_TK, tables.rank_of_P, R, group.rank)
    rank_N, token_N = needed_TR.T.nonzero(as_tuple=True)
    sent_R = needed_TR.sum(0)
    received_R = all_to_all(sent_R, [1] * R, [1] * R, group)
    splits_2R = torch.stack((sent_R, received_R)).cpu()
    ids_NK = slots(ids_TK[token_N], tables.rank_of_P, tables.slot_of_P, rank_N[:, None], group.rank)
    fields = [t[token_N] for t in (sent.x_TD, sent.scale_TS, sent.weights_TK)]
    return (*fields, ids_NK), (token_N.to(torch.int32), splits_2R)


def start_combine(
    y_GD: Tensor, tokens: int, token_N: Tensor, splits_2R: Tensor, group: Group
) -> Callable[[], Tensor]:
    """Start to send results back; what is returned waits, and gives what `combine` does."""
    sent, received = splits_2R.tolist()
    back = start_all_to_all(y_GD, received, sent, group)
    return lambda: _summed(back(), tokens, token_N, sent)


def combine(y_GD: Tensor, tokens: int, token_N: Tensor, splits_2R: Tensor, group: Group) -> Tensor:
    """out_TD: each token's rows of the ranks that it was sent to, summed in the order of ranks."""
    sent, received = splits_2R.tolist()
    return _summed(all_to_all(y_GD, received, sent, group), tokens, token_N, sent)


def _summed(back_ND: Tensor, tokens: int, token_N: Tensor, sent: list[int]) -> Tensor:
    out_TD = back_ND.new_zeros((tokens, back_ND.shape[1]), dtype=wide_dtype(back_ND))
    # A rank's tokens are distinct, so that the order of a sum is that of the ranks.
    pieces = zip(token_N.split(sent), back_ND.split(sent), strict=True)
    for token_n, back_nD in pieces:
        out_TD = out_TD.index_add_(0, token_n, wide(back_nD))
    return out_TD.to(back_ND.dtype)
