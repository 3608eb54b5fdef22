"""The transport `gather`: every rank gets the tokens of all, and sends back what it made of them.

Static shapes, no count and no wait for the host; any backend of torch.distributed. A slot of the
gathered rows is (source rank, token); slots without a token hold ids of -1, and NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.ranks.groups import (
    Group,
    all_gather,
    all_to_all,
    start_all_gather,
    start_all_to_all,
    sum_in_order,
)
from moe_ops.ranks.packed import filled, pack, unpack
from moe_ops.ranks.tables import known_ids, needed, slots
from moe_ops.ranks.transport import Sent, Tables
from moe_ops.registry.gradients import needs_grad


def start_dispatch(
    sent: Sent, tables: Tables, rows: int, group: Group
) -> Callable[[], tuple[Tensor, ...]]:
    """Start to send; what is returned waits, and gives x_GD, scale_GS, weights_GK and local ids_GK,
    G = ranks * rows."""
    ids_TK = known_ids(sent.ids_TK, tables.physical)
    fields = (sent.x_TD, sent.scale_TS, sent.weights_TK, ids_TK)
    gathered = start_all_gather(filled(pack(fields), rows), group)

    def arrived() -> tuple[Tensor, ...]:
        *parts, ids_GK = unpack(gathered(), fields)
        return (*parts, _local(ids_GK, tables, rows, group))

    return arrived


def dispatch(sent: Sent, tables: Tables, rows: int, group: Group) -> tuple[Tensor, ...]:
    """What `start_dispatch` ends in, with gradients where they are wanted."""
    floats = (sent.x_TD, sent.scale_TS, sent.weights_TK)
    if not needs_grad(*floats):
        return start_dispatch(sent, tables, rows, group)()
    parts = [all_gather(F.pad(t, (0, 0, 0, rows - t.shape[0])), group) for t in floats]
    ids_TK = known_ids(sent.ids_TK, tables.physical)
    ids_TK = F.pad(ids_TK, (0, 0, 0, rows - ids_TK.shape[0]), value=-1)
    return (*parts, _local(all_gather(ids_TK, group), tables, rows, group))


def _local(ids_GK: Tensor, tables: Tables, rows: int, group: Group) -> Tensor:
    source_G1 = torch.arange(group.size * rows, device=ids_GK.device)[:, None] // rows
    return slots(ids_GK, tables.rank_of_P, tables.slot_of_P, group.rank, source_G1)


def start_combine(
    y_GD: Tensor, ids_TK: Tensor, tables: Tables, rows: int, group: Group
) -> Callable[[], Tensor]:
    """Start to send results back; what is returned waits, and gives out_TD: each token's rows of
    the ranks that it needed, summed in the order of ranks."""
    each = [rows] * group.size
    return partial(_summed, start_all_to_all(y_GD, each, each, group), ids_TK, tables, rows, group)


def combine(y_GD: Tensor, ids_TK: Tensor, tables: Tables, rows: int, group: Group) -> Tensor:
    """What `start_combine` ends in, with gradients where they are wanted."""
    each = [rows] * group.size
    return _summed(lambda: all_to_all(y_GD, each, each, group), ids_TK, tables, rows, group)


def _summed(
    back: Callable[[], Tensor], ids_TK: Tensor, tables: Tables, rows: int, group: Group
) -> Tensor:
    T, R = ids_TK.shape[0], group.size
    back_RTD = back().unflatten(0, (R, rows))[:, :T]
    needed_TR = needed(known_ids(ids_TK, tables.physical), tables.rank_of_P, R, group.rank)
    return sum_in_order(back_RTD.masked_fill(~needed_TR.T[..., None], 0))
