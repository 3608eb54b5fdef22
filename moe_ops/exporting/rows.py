"""`dispatch` and `combine` in operators that every runtime has: by counting, without a stable sort,
a search in sorted values or a division of integers."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.ops.combine import CombineCall
from moe_ops.ops.dispatch import DispatchCall, local_ids


def dispatch(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    """`dispatch` by counting: a pair's row is the number of pairs that come before it.

    Rows of no expert hold the tokens of their pairs, as the definition has them. Needs [R, E + 1]
    integers.
    """
    x_TD, num_experts = call.x_TD, call.num_experts
    ids_R = local_ids(call.ids_TK, num_experts, call.expert_map)  # num_experts: not here
    bins = torch.arange(num_experts + 1, device=x_TD.device)
    is_in = (ids_R[:, None] == bins).long()
    ends = is_in.sum(0).cumsum(0)
    # Of a pair: where its expert's rows begin, and how many pairs of that expert came before.
    before = is_in.cumsum(0) - is_in + (ends - is_in.sum(0))
    row_R = (before * is_in).sum(1)
    pairs_R = torch.arange(ids_R.shape[0], device=x_TD.device)
    order_R = torch.zeros_like(ids_R).scatter(0, row_R, pairs_R)
    token_R = tokens_of_pairs(call.ids_TK)[order_R]
    rows_R = torch.where(ids_R[order_R] < num_experts, order_R, -1).to(torch.int32)
    return x_TD[token_R], rows_R, ends[:num_experts].to(torch.int32)


def combine(call: CombineCall) -> Tensor:
    """`combine` by the row of each pair, which is found by scattering the rows' numbers."""
    y_RD, weights_TK, rows_R = call.y_RD, call.weights_TK, call.rows_R
    T, K = weights_TK.shape
    R = rows_R.shape[0]
    rows = rows_R.long()
    used = (rows >= 0) & (rows < R)
    target = torch.where(used, rows, R)  # slot R takes what unused rows would write
    numbers = torch.arange(R, device=y_RD.device)
    none = torch.full((R + 1,), -1, dtype=torch.int64, device=y_RD.device)
    row_of_pair = none.scatter(0, target, numbers)[:R]
    products = y_RD[row_of_pair.clamp(min=0)].view(T, K, y_RD.shape[1]) * weights_TK[..., None]
    here = (row_of_pair >= 0).view(T, K, 1)
    # Unused rows may hold NaN, which a product with zero would keep.
    zero = torch.zeros((), dtype=products.dtype, device=products.device)
    return torch.where(here, products, zero).float().sum(1).to(y_RD.dtype)


def tokens_of_pairs(ids_TK: Tensor) -> Tensor:
    """The token of each pair as int64 [R]."""
    T, K = ids_TK.shape
    return torch.arange(T, device=ids_TK.device)[:, None].expand(T, K).reshape(-1)


def experts_of_rows(ends_E: Tensor, R: int) -> Tensor:
    """The expert of each of R rows as int64; the number of experts for rows of none."""
    rows = torch.arange(R, device=ends_E.device)
    return (rows[:, None] >= ends_E).long().sum(1)
