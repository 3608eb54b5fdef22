"""The transport `exchange`: a token goes once to each rank that it needs, and to no other.

How many rows go where is read by the host, so it cannot be captured in a CUDA graph. Rows lie in
the order of their source ranks and, within one, of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.checks.shapes import wide, wide_dtype
from moe_ops.ranks.groups import Group, all_to_all
from moe_ops.ranks.packed import pack, unpack
from moe_ops.ranks.tables import known_ids, needed, slots
from moe_ops.ranks.transport import Sent, Tables
from moe_ops.registry.gradients import needs_grad


def dispatch(sent: Sent, tables: Tables, group: Group) -> tuple[Tensor, ...]:
    """x_GD, scale_GS, weights_GK and local ids_GK; then the handle: token_N, the token in each row
    that was sent, and splits_2R, on the CPU, the rows sent to each rank and those received."""
    ids_TK, R = known_ids(sent.ids_TK, tables.physical), group.size
    needed_TR = needed(ids_TK, tables.rank_of_P, R, group.rank)
    rank_N, token_N = needed_TR.T.nonzero(as_tuple=True)
    sent_R = needed_TR.sum(0)
    received_R = all_to_all(sent_R, [1] * R, [1] * R, group)
    splits_2R = torch.stack((sent_R, received_R)).cpu()
    to, of = splits_2R.tolist()
    ids_NK = slots(ids_TK[token_N], tables.rank_of_P, tables.slot_of_P, rank_N[:, None], group.rank)
    fields = [t[token_N] for t in (sent.x_TD, sent.scale_TS, sent.weights_TK)]
    if needs_grad(*fields):
        arrived = [all_to_all(t, to, of, group) for t in (*fields, ids_NK)]
    else:
        packed_GB = all_to_all(pack((*fields, ids_NK)), to, of, group)
        arrived = unpack(packed_GB, (*fields, ids_NK))
    return (*arrived, token_N.to(torch.int32), splits_2R)


def combine(y_GD: Tensor, tokens: int, token_N: Tensor, splits_2R: Tensor, group: Group) -> Tensor:
    """out_TD: each token's rows of the ranks that it was sent to, summed in the order of ranks."""
    sent, received = splits_2R.tolist()
    back_ND = all_to_all(y_GD, received, sent, group)
    out_TD = back_ND.new_zeros((tokens, y_GD.shape[1]), dtype=wide_dtype(y_GD))
    # A rank's tokens are distinct, so that the order of a sum is that of the ranks.
    pieces = zip(token_N.split(sent), back_ND.split(sent), strict=True)
    for token_n, back_nD in pieces:
        out_TD = out_TD.index_add_(0, token_n, wide(back_nD))
    return out_TD.to(y_GD.dtype)
