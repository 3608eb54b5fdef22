"""Rows by choices: each pair of a token and an expert is a row of its own, there and back.

Ranks then add nothing. A token's own rank gets the row of each choice, whatever rank made it, and
sums them in the order of choices: the bits of one process that holds all experts. Pairs are what
`combine` of a transport takes for tokens of one choice each, so that what sends rows back is the
same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.ranks.groups import Group
from moe_ops.ranks.tables import EVERY, known_ids, needed
from moe_ops.ranks.transport import EXCHANGE, PUSH, Tables
from moe_ops.registry.watched import readable

Arrived = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def why_in_parts(rank_of_P: Tensor, group: Group) -> str | None:
    """Why rows of single choices are parts of a sum all the same, or None, which is also said of
    tables that the host does not read."""
    if group.size == 1 or not readable(rank_of_P) or not bool((rank_of_P == EVERY).any()):
        return None
    return (
        f"rank_of_P names experts of which each of {group.size} ranks holds a shard: their rows "
        "are sums over the intermediate width, whose order depends on the number of ranks; give "
        "each rank whole experts (expert_parallel=True)"
    )


def by_choice(arrived: Arrived, ids_TK: Tensor, tables: Tables, how: str, group: str) -> Arrived:
    """What arrived, given as `dispatch_tokens` does, with a row for each choice of a token: as if
    pairs had been sent, of which pair t * K + k is of ids_TK[t, k].

    By "exchange" there are rows for the pairs alone that are served here, in their order; else
    there is one for each choice of each slot, and ids say which are served. group: its name.
    """
    x_GD, scale_GS, weights_GK, ids_GK, token_N, splits_2R = arrived
    G, K = ids_GK.shape
    if how == EXCHANGE:
        row_R, choice_R = (ids_GK >= 0).nonzero(as_tuple=True)
        pair_N, splits_2R = _returned(ids_TK, ids_GK, tables, splits_2R, Group.of(group))
        weights_R, ids_R = (t[row_R, choice_R] for t in (weights_GK, ids_GK))
    else:
        row_R = torch.arange(G, device=x_GD.device).repeat_interleave(K)
        weights_R, ids_R = weights_GK.flatten(), ids_GK.flatten()
        pair_N = (ids_R >= 0).to(torch.int32) if how == PUSH else token_N
    rows = (x_GD[row_R], scale_GS[row_R], weights_R[:, None], ids_R[:, None])
    return (*rows, pair_N, splits_2R)


def _returned(
    ids_TK: Tensor, ids_GK: Tensor, tables: Tables, splits_2R: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    """The handle of an exchange of pairs, which no rank has to be told: the pair in each row that
    comes back, and the rows that do so from and to each rank."""
    ids_N1 = known_ids(ids_TK, tables.physical).view(-1, 1)
    needed_NR = needed(ids_N1, tables.rank_of_P, group.size, group.rank)
    _, pair_N = needed_NR.T.nonzero(as_tuple=True)
    served_G = (ids_GK >= 0).sum(1)
    received = [part.sum() for part in served_G.split(splits_2R[1].tolist())]
    counts_2R = torch.stack((needed_NR.sum(0), torch.stack(received))).cpu()
    return pair_N.to(torch.int32), counts_2R


def rows_of_pairs(ids_TK: Tensor, physical: int | None = None, fused: int = 0) -> Tensor:
    """The pair in each row of results, as `combine` takes it: int32 [T * K], -1 where an id names
    none of the physical experts. The last `fused` columns name one, whatever they hold here."""
    T, K = ids_TK.shape
    named_TK = ids_TK >= 0
    if physical is not None:
        named_TK = named_TK & (ids_TK < physical)
    if fused:
        named_TK = named_TK | (torch.arange(K, device=ids_TK.device) >= K - fused)
    pairs_N = torch.arange(T * K, dtype=torch.int32, device=ids_TK.device)
    return torch.where(named_TK.view(T * K), pairs_N, -1)
