"""Attention of one query token per sequence, for the steps of `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "moe_ops_one_query"


def one_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """softmax(q kᵀ · scaling) v with the queries that share a key as rows of one product.

    transformers' own function repeats each key and value for every query head that shares it,
    which at one query is most of the memory traffic. Other calls go there.
    """
    mask = attention_mask
    ours = query.shape[2] == 1 and mask is not None and mask.dtype == torch.bool and dropout == 0.0
    if not ours or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert mask is not None
    B, H, _, D = query.shape
    heads = key.shape[1]
    scale = D**-0.5 if scaling is None else scaling
    if query.is_cuda:
        from moe_ops.kernels.triton.one_query import attend, refusal

        mask_BS = mask[:, 0, 0]
        if mask.shape[:3] == (B, 1, 1) and refusal(query, key, value, mask_BS) is None:
            out = attend(query.reshape(B, H, D), key, value, mask_BS, scale)
            return out[:, None], None
    grouped = query.reshape(B, heads, H // heads, D) * scale
    scores = (grouped @ key.transpose(2, 3)).float()  # [B, heads, H / heads, slots]
    scores = scores.masked_fill(~mask, float("-inf"))  # the mask is [B, 1, 1, slots]
    out = scores.softmax(-1).to(value.dtype) @ value
    return out.reshape(B, 1, H, value.shape[3]), None


def register() -> None:
    """Make it known to transformers; models that have "sdpa" get it for single steps."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, one_query_attention)
    if torch.cuda.is_available():
        import moe_ops.kernels.triton.one_query  # noqa: F401  (not first in the midst of a trace)
