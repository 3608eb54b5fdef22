"""Shapes of `route`."""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    logits_TE: Tensor,
    top_k: int,
    bias_E: Tensor | None = None,
    per_expert_scale_E: Tensor | None = None,
    score: str = "softmax",
    select_on: str = "score",
    n_group: int = 1,
    topk_group: int = 1,
    group_reduce: str = "top2sum",
    group_fill: str = "-inf",
    softmax_selected: bool = False,
    renormalize: bool = False,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scale: float = 1.0,
    out_dtype: str = "float32",
) -> tuple[Tensor, Tensor]:
    """[T, E] logits to ([T, top_k] weights in out_dtype, [T, top_k] int32 ids)."""
    shape = (logits_TE.shape[0], top_k)
    weights_TK = logits_TE.new_empty(shape, dtype=getattr(torch, out_dtype))
    return weights_TK, logits_TE.new_empty(shape, dtype=torch.int32)
