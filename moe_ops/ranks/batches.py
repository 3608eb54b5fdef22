"""Rows that arrived, in batches by experts: as kernels take them that wait for no counts.

Row g of one expert lies in a slot of that expert's, in the order of rows; a row of several experts
lies in a slot of each. Sizes are static: an expert has a slot for each row that there may be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.checks.shapes import wide_dtype

ROWS, BATCHED = "rows", "batched"
LAYOUTS = (ROWS, BATCHED)


def in_batches(
    x_GD: Tensor, scale_GS: Tensor, ids_GK: Tensor, experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x_EMD, scale_EMS, slot_GK, counts_E) of rows and the local ids of their experts, M = G.

    slot_GK: int32, expert * M + slot of a pair, -1 of none; pairs of one row and one expert share a
    slot. Slots past a count hold whatever memory held.
    """
    slot_GK, counts_E = slots_of(ids_GK, experts)
    x_EMD, scale_EMS = (_placed(t, slot_GK, experts) for t in (x_GD, scale_GS))
    return x_EMD, scale_EMS, slot_GK, counts_E


def slots_of(ids_GK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """slot_GK and counts_E of `in_batches`."""
    (G, K), device = ids_GK.shape, ids_GK.device
    known_GK = (ids_GK >= 0) & (ids_GK < experts)
    ids_GK = torch.where(known_GK, ids_GK, experts).long()
    # Of equal ids of a row the first one has a slot of its own.
    first_GK = _first(ids_GK)
    is_first = known_GK & (first_GK == torch.arange(K, device=device))
    key_N = torch.where(is_first, ids_GK, experts).flatten()
    order_N = key_N.argsort(stable=True)
    every_E = ids_GK.new_zeros(experts + 1).scatter_add_(0, key_N, torch.ones_like(key_N))
    begin_E = every_E.cumsum(0) - every_E
    of_N = key_N[order_N]
    slot_N = of_N * G + torch.arange(G * K, device=device) - begin_E[of_N]
    own_GK = torch.empty_like(key_N).scatter_(0, order_N, slot_N).view(G, K)
    slot_GK = torch.where(known_GK, own_GK.gather(1, first_GK), -1)
    return slot_GK.to(torch.int32), every_E[:experts].to(torch.int32)


def _first(t_GK: Tensor) -> Tensor:
    """The place [G, K] in its row of the first value like each one."""
    return (t_GK[:, :, None] == t_GK[:, None, :]).int().argmax(2)


def _placed(t_GD: Tensor, slot_GK: Tensor, experts: int) -> Tensor:
    """Rows in the slots of their pairs, [E, M, D]."""
    (M, K), width, device = slot_GK.shape, t_GD.shape[1], t_GD.device
    is_code = not t_GD.dtype.is_floating_point or t_GD.dtype.itemsize == 1
    rows = t_GD.contiguous().view(torch.uint8) if is_code and width else t_GD
    token_N = torch.arange(M, device=device).repeat_interleave(K)
    # What goes nowhere goes behind the last slot, and so does a row that its slot has already: it
    # would get the gradient of its slot once more.
    goes_GK = (slot_GK >= 0) & (_first(slot_GK) == torch.arange(K, device=device))
    to_N = torch.where(goes_GK, slot_GK, experts * M).flatten().long()
    room = rows.new_empty((experts * M + 1, rows.shape[1]))
    placed = room.index_copy(0, to_N, rows[token_N])[: experts * M]
    return (placed.view(t_GD.dtype) if is_code and width else placed).view(experts, M, width)


def from_batches(y_EMD: Tensor, weights_GK: Tensor, slot_GK: Tensor) -> Tensor:
    """y_GD: the weighted sum of what experts made of a row, in float32 (float64 of float64) and in
    the order of choices; 0 of a row without any."""
    y_RD, held_GK1 = y_EMD.flatten(0, 1), (slot_GK >= 0)[..., None]
    wide = wide_dtype(y_EMD)
    rows_GKD = y_RD[slot_GK.clamp(min=0).long()].to(wide)
    # Both are masked: what is unspecified in one would be in the gradient of the other.
    weights_GK1 = torch.where(held_GK1, weights_GK.to(wide)[..., None], 0)
    return (torch.where(held_GK1, rows_GKD, 0) * weights_GK1).sum(1).to(y_EMD.dtype)


def served(slot_GK: Tensor) -> Tensor:
    """1 for rows of which an expert is here, else 0: int32 [G]."""
    return (slot_GK >= 0).any(1).to(torch.int32)
