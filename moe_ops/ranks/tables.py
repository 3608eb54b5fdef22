"""Which rank serves which expert of a token: two tables, equal on all ranks.

rank_of_P[p]    the rank that holds physical expert p; EVERY, if each rank holds it (or a shard
                of it) and all must see the token; HOME, if each holds it and the token's own
                rank serves it
slot_of_P[p]    the slot of p on the rank that serves it; of HOME, on this rank
"""

from __future__ import annotations

import ctypes
import zlib

import torch
from torch import Tensor

EVERY, HOME = -1, -2


def checksums(rank_of_P: Tensor, slot_of_P: Tensor) -> dict[str, int]:
    """A number for what tables on the CPU say, by name: ranks with other numbers differ.

    Slots of HOME are left out: they are this rank's own, which may hold more experts than others.
    """
    slot_of_P = slot_of_P.masked_fill(rank_of_P == HOME, HOME)
    return {"rank_of_P": _checksum(rank_of_P), "slot_of_P": _checksum(slot_of_P)}


def _checksum(t: Tensor) -> int:
    t = t.contiguous()
    # Through a list it takes three times as long, and torch may be without numpy.
    return zlib.crc32(ctypes.string_at(t.data_ptr(), t.nbytes))


def known_ids(ids_TK: Tensor, physical: int) -> Tensor:
    """Ids as int32; -1 for those of no physical expert."""
    return torch.where((ids_TK >= 0) & (ids_TK < physical), ids_TK, -1).to(torch.int32)


def slots(
    ids_TK: Tensor, rank_of_P: Tensor, slot_of_P: Tensor, at: int | Tensor, source: int | Tensor
) -> Tensor:
    """The slots of the experts on rank `at` that tokens of rank `source` want, int32; -1 for those
    that it does not serve."""
    place_TK = ids_TK.clamp(min=0).long()
    rank_TK = rank_of_P[place_TK]
    # One of the two is a number: a tensor made of it would have to be copied to the device.
    home = at == source
    here_TK = (rank_TK == at) | (rank_TK == EVERY) | ((rank_TK == HOME) & home)
    return torch.where((ids_TK >= 0) & here_TK, slot_of_P[place_TK], -1)


def needed(ids_TK: Tensor, rank_of_P: Tensor, ranks: int, source: int) -> Tensor:
    """Whether a token of rank `source` needs a rank: bool [T, ranks]."""
    rank_TK = rank_of_P[ids_TK.clamp(min=0).long()]
    rank_TK = torch.where(rank_TK == HOME, source, rank_TK)[..., None]
    every_R = torch.arange(ranks, device=ids_TK.device)
    return (((rank_TK == every_R) | (rank_TK == EVERY)) & (ids_TK >= 0)[..., None]).any(1)
