"""Layers of experts over ranks that are given what a router chose."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.ops.by_choice import sum_over_ranks
from tests.passes.routers import E

ops = torch.ops.moe_ops


def over_ranks(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w_EFD: Tensor) -> Tensor:
    """The experts of all ranks in one op."""
    tables = (ids := torch.arange(E, dtype=torch.int32)) * 0, ids
    halves = w_EFD, w_EFD[:, :, : w_EFD.shape[2] // 2].contiguous()
    return ops.experts_over_ranks(x_TD, weights_TK, ids_TK, *halves, *tables, x_TD.shape[0])


def there_and_back(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w_EFD: Tensor) -> Tensor:
    """What a rank is sent, by the sum of its weights, and sent back."""
    tables, T = ((ids := torch.arange(E, dtype=torch.int32)) * 0, ids), x_TD.shape[0]
    x_GD, _, weights_GK, _, *handle = ops.dispatch_tokens(x_TD, weights_TK, ids_TK, *tables, T)
    return ops.combine_tokens(x_GD * weights_GK.sum(-1, True), ids_TK, *tables, *handle, T)


def by_choice(x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, w_EFD: Tensor) -> Tensor:
    """Experts whose rows ranks add one for each choice, and then a token's own weighs."""
    halves = w_EFD, w_EFD[:, :, : w_EFD.shape[2] // 2].contiguous()
    return sum_over_ranks(
        lambda x, weights, ids: ops.experts(x, weights, ids, *halves), x_TD, weights_TK, ids_TK, ""
    )
