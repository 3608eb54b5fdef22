"""Tokens that several ranks have alike: each works on a share of them and gets all results."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from moe_ops.ranks.groups import Group, all_gather


def in_shares(
    group: Group,
    run: Callable[[Tensor, Tensor, Tensor], Tensor],
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
) -> Tensor:
    """run(x, weights, ids) for all tokens, of which this rank runs a share: as many as the others,
    where the last ones may be padding, with ids of -1."""
    T = x_TD.shape[0]
    share = share_of(T, group)
    added = (0, 0, 0, share * group.size - T)
    padded = (F.pad(x_TD, added), F.pad(weights_TK, added), F.pad(ids_TK, added, value=-1))
    x_SD, weights_SK, ids_SK = (t.narrow(0, group.rank * share, share) for t in padded)
    return all_gather(run(x_SD, weights_SK, ids_SK), group)[:T]


def share_of(tokens: int, group: Group) -> int:
    """The tokens of a share."""
    return (tokens + group.size - 1) // group.size
