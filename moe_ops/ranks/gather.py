"""The transport `gather`: every rank gets the tokens of all, and sends back what it made of them.

Static shapes, no count and no wait for the host; any backend of torch.distributed. A slot of the
gathered rows is (source rank, token); slots without a token hold ids of -1, and NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.ranks.groups import Group, all_gather, all_to_all, sum_in_order
from moe_ops.ranks.packed import filled, pack, unpack
from moe_ops.ranks.tables import known_ids, needed, slots
from moe_ops.ranks.transport import Sent, Tables
from moe_ops.registry.gradients import needs_grad


def dispatch(sent: Sent, tables: Tables, rows: int, group: Group) -> tuple[Tensor, ...]:
    """x_GD, scale_GS, weights_GK and local ids_GK, G = ranks * rows."""
    ids_TK = known_ids(sent.ids_TK, tables.physical)
    fields = (sent.x_TD, sent.scale_TS, sent.weights_TK, ids_TK)
    if needs_grad(*fields[:3]):
        x_GD, scale_GS, weights_GK = (
            all_gather(F.pad(t, (0, 0, 0, rows - t.shape[0])), group) for t in fields[:3]
        )
        ids_TK = F.pad(ids_TK, (0, 0, 0, rows - ids_TK.shape[0]), value=-1)
        ids_GK = all_gather(ids_TK, group)
    else:
        packed_GB = all_gather(filled(pack(fields), rows), group)
        x_GD, scale_GS, weights_GK, ids_GK = unpack(packed_GB, fields)
    source_G1 = torch.arange(group.size * rows, device=ids_GK.device)[:, None] // rows
    local_GK = slots(ids_GK, tables.rank_of_P, tables.slot_of_P, group.rank, source_G1)
    return x_GD, scale_GS, weights_GK, local_GK


def combine(y_GD: Tensor, ids_TK: Tensor, tables: Tables, rows: int, group: Group) -> Tensor:
    """out_TD: each token's rows of the ranks that it needed, summed in the order of ranks."""
    T, R = ids_TK.shape[0], group.size
    back_GD = all_to_all(y_GD, [rows] * R, [rows] * R, group)
    back_RTD = back_GD.unflatten(0, (R, rows))[:, :T]
    needed_TR = needed(known_ids(ids_TK, tables.physical), tables.rank_of_P, R, group.rank)
    return sum_in_order(back_RTD.masked_fill(~needed_TR.T[..., None], 0))
