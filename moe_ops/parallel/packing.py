"""Even loads: how many replicas each expert gets, and which bin each of them goes to.

Everything runs over all layers at once. Axes: L layers, E experts, P replicas of all experts, B
bins (ranks, or nodes), S slots of the largest bin. A bin of `sizes[b]` slots is always filled.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

EVEN = 1.001  # a layer whose highest load is this close to the mean is not packed any better
MOST_SWAPS = 500  # a layer; a few dozen do in practice
GAIN = 1e-9  # of the mean: less is rounding
AVOID = 1e6  # times the mean: only where nothing else is left


def replicate(loads_LE: Tensor, replicas: int, bins: int) -> Tensor:
    """How many replicas each expert gets, int64 [L, E]: at least one, `replicas` in all.

    One after the other goes to the expert with the highest load a replica, which makes the highest
    load as low as it can be. More replicas than bins would meet in one, and are a last resort.
    """
    L, E = loads_LE.shape
    counts_LE = torch.ones(L, E, dtype=torch.int64)
    layers = torch.arange(L)
    top = loads_LE.sum(1, keepdim=True) * AVOID
    for _ in range(replicas - E):
        # Between equals the one with more replicas already: its pieces pack better.
        share_LE = loads_LE / counts_LE + loads_LE * GAIN
        counts_LE[layers, (share_LE - top * (counts_LE >= bins)).argmax(1)] += 1
    return counts_LE


def pack(loads_LE: Tensor, counts_LE: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Fill bins with the replicas, whose loads are loads / counts: int64 [L, P] of experts, bin by
    bin.

    First greedily, the highest load to the emptiest bin with a free slot that does not hold this
    expert; then by swaps.
    """
    share_LE = loads_LE / counts_LE
    share_LE = share_LE * (len(sizes) / loads_LE.sum(1, keepdim=True))  # the mean bin is 1
    table_LBS = _improve(_greedy(share_LE, counts_LE, sizes), share_LE)
    return torch.cat([table_LBS[:, b, :size] for b, size in enumerate(sizes)], 1)


def _greedy(share_LE: Tensor, counts_LE: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """[L, B, S] experts, -1 behind the last slot of a bin."""
    L, B, P = len(share_LE), len(sizes), sum(sizes)
    sorted_LE, order_LE = share_LE.sort(dim=1, descending=True, stable=True)
    ends_LE = counts_LE.gather(1, order_LE).cumsum(1)
    places_LP = torch.arange(P).repeat(L, 1)
    at_LP = torch.searchsorted(ends_LE, places_LP, right=True)
    experts_LP, shares_LP = order_LE.gather(1, at_LP), sorted_LE.gather(1, at_LP)

    table_LBS = torch.full((L, B, max(sizes)), -1)
    load_LB = torch.zeros(L, B, dtype=share_LE.dtype)
    used_LB = torch.zeros(L, B, dtype=torch.int64)
    sizes_B, layers = torch.tensor(sizes), torch.arange(L)
    for expert_L, share_L in zip(experts_LP.T, shares_LP.T, strict=True):
        there_LB = (table_LBS == expert_L[:, None, None]).any(2)
        cost_LB = load_LB + there_LB * AVOID
        bin_L = cost_LB.masked_fill(used_LB >= sizes_B, float("inf")).argmin(1)
        table_LBS[layers, bin_L, used_LB[layers, bin_L]] = expert_L
        load_LB[layers, bin_L] += share_L
        used_LB[layers, bin_L] += 1
    return table_LBS


def _improve(table_LBS: Tensor, share_LE: Tensor) -> Tensor:
    """Swap experts of the fullest bin with those of others, for as long as that evens them out."""
    L, B, S = table_LBS.shape
    item_LBS = share_LE.gather(1, table_LBS.clamp_min(0).flatten(1)).view(L, B, S)
    item_LBS = item_LBS.masked_fill(table_LBS < 0, 0)
    todo_L = torch.arange(L)
    for _ in range(MOST_SWAPS):
        todo_L = todo_L[item_LBS[todo_L].sum(2).amax(1) > EVEN]
        if not len(todo_L):
            break
        here, there, gained_L = _best_swap(table_LBS[todo_L], item_LBS[todo_L])
        todo_L = todo_L[gained_L]
        a, b = (todo_L, *here[:, gained_L]), (todo_L, *there[:, gained_L])
        for t in (table_LBS, item_LBS):
            t[a], t[b] = t[b], t[a]
    return table_LBS


def _best_swap(table_LBS: Tensor, item_LBS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each layer two (bin, slot), int64 [2, L] each, and whether swapping them gains anything.

    The first is in the fullest bin; no swap makes two replicas of an expert meet. Gain is by how
    much the sum of the squares of all loads falls, over 2: less * (gap - less).
    """
    L, B, S = table_LBS.shape
    load_LB = item_LBS.sum(2)
    bin_L = load_LB.argmax(1)
    layers = torch.arange(L)
    mine_LS, item_LS = table_LBS[layers, bin_L], item_LBS[layers, bin_L]
    # From here on axes are [L, slot of this bin, other bin, its slot].
    same = mine_LS[:, :, None, None] == table_LBS[:, None]
    less = item_LS[:, :, None, None] - item_LBS[:, None]
    gap = (load_LB[layers, bin_L, None] - load_LB)[:, None, :, None]
    bad = same.any(3, keepdim=True) | same.any(1, keepdim=True)
    bad |= (mine_LS < 0)[:, :, None, None] | (table_LBS < 0)[:, None]
    gain_L, at_L = (less * (gap - less)).masked_fill(bad, 0).flatten(1).max(1)
    other = torch.stack((at_L // S % B, at_L % S))
    return torch.stack((bin_L, at_L // (B * S))), other, gain_L > GAIN


def keep_bins(new_LP: Tensor, old_LP: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Exchange whole bins of one size, so that many experts lie in the bin they lay in before."""
    L, B = len(new_LP), len(sizes)
    E = int(torch.maximum(new_LP.max(), old_LP.max())) + 1
    sizes_B = torch.tensor(sizes)
    bin_P = torch.arange(B).repeat_interleave(sizes_B)

    def members(experts_LP: Tensor) -> Tensor:
        held = torch.zeros(L, B * E)
        return held.index_put_(
            (torch.arange(L)[:, None], bin_P * E + experts_LP), torch.ones(())
        ).view(L, B, E)

    common_LBB = members(old_LP) @ members(new_LP).mT + torch.eye(B) / 2  # ties: stay
    common_LBB = common_LBB.masked_fill(sizes_B[:, None] != sizes_B, -1)
    take_LB = torch.zeros(L, B, dtype=torch.int64)
    layers = torch.arange(L)
    for _ in range(B):
        at_L = common_LBB.flatten(1).argmax(1)
        old_L, new_L = at_L // B, at_L % B
        take_LB[layers, old_L] = new_L
        common_LBB[layers, old_L], common_LBB[layers, :, new_L] = -2.0, -2.0
    starts_B = torch.tensor([0, *accumulate(sizes)][:-1])
    slot_P = torch.arange(len(bin_P)) - starts_B[bin_P]
    return new_LP.gather(1, starts_B[take_LB][:, bin_P] + slot_P)


def keep_slots(new_LP: Tensor, old_LP: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Reorder each bin so that experts which lay in it before keep their slots."""
    rows = [
        [expert for pair in zip(*(_bins(row, sizes) for row in rows), strict=True)
         for expert in _keep(*pair)]
        for rows in zip(new_LP.tolist(), old_LP.tolist(), strict=True)
    ]  # fmt: skip
    return torch.tensor(rows)


def _bins(row: list[int], sizes: tuple[int, ...]) -> list[list[int]]:
    return [row[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]


def _keep(new: list[int], old: list[int]) -> list[int]:
    left = list(new)
    kept: list[int | None] = []
    for expert in old:
        stays = expert in left
        kept.append(expert if stays else None)
        if stays:
            left.remove(expert)
    return [left.pop(0) if expert is None else expert for expert in kept]
