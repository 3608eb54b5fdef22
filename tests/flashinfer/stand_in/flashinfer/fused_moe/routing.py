"""The routers inside TensorRT-LLM's kernels, token by token, as their documents say."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashinfer.fused_moe.kinds import RoutingMethodType

M = RoutingMethodType
LEAST = 1e-20


def routed(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    scale: float | None,
    method: int,
) -> tuple[Tensor, Tensor]:
    """Global ids, and weights as the kernels round them."""
    kind = M(method)
    assert logits.is_contiguous() and logits.dtype in (torch.float32, torch.bfloat16)
    assert bias is None or bias.dtype in (torch.float32, torch.bfloat16)
    assert (n_group or 0) <= 1 or kind is M.DeepSeekV3, "other methods have no groups"
    assert kind is not M.Llama4 or top_k == 1
    rows = [
        _one(row, None if bias is None else bias.tolist(), top_k, n_group, topk_group, kind, scale)
        for row in logits.tolist()
    ]
    ids = torch.tensor([list(chosen) for chosen, _ in rows], dtype=torch.int32)
    weights = torch.tensor([weights for _, weights in rows]).bfloat16().float()
    return ids, weights


def _one(
    row: list[float],
    bias: list[float] | None,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    kind: RoutingMethodType,
    scale: float | None,
) -> tuple[list[int], list[float]]:
    sigmoid = [1 / (1 + math.exp(-x)) for x in row]
    whole = sum(math.exp(x) for x in row)
    softmax = [math.exp(x) / whole for x in row]
    if kind is M.MiniMax2 or (kind is M.DeepSeekV3 and (n_group or 0) <= 1):
        assert bias is not None, "is read without a look whether it is there"
    biased = [s + b for s, b in zip(sigmoid, bias or [0.0] * len(row), strict=True)]
    if kind is M.DeepSeekV3 and n_group is not None and n_group > 1:
        assert topk_group is not None
        biased = _kept(biased, n_group, topk_group)
    by = {
        M.Default: softmax, M.Sigmoid: sigmoid, M.SigmoidRenorm: sigmoid, M.Llama4: row,
        M.MiniMax2: biased, M.DeepSeekV3: biased,
    }.get(kind, row)  # fmt: skip
    chosen = sorted(range(len(row)), key=lambda e: (-by[e], e))[:top_k]
    if kind is M.Default:
        return chosen, [softmax[e] for e in chosen]
    if kind is M.TopK:
        return chosen, [row[e] for e in chosen]
    if kind in (M.Renormalize, M.RenormalizeNaive):
        total = sum(math.exp(row[e]) for e in chosen)
        return chosen, [math.exp(row[e]) / total for e in chosen]
    if kind in (M.Sigmoid, M.TopKSigmoid, M.Llama4):
        return chosen, [sigmoid[e] for e in chosen]
    total = sum(sigmoid[e] for e in chosen)
    if kind is M.SigmoidRenorm:
        return chosen, [sigmoid[e] / max(total, LEAST) for e in chosen]
    factor = 1.0 if scale is None else scale
    return chosen, [sigmoid[e] * factor / (total + LEAST) for e in chosen]


def _kept(biased: list[float], n_group: int, topk_group: int) -> list[float]:
    """Choices, those of experts in other groups never the largest."""
    size = len(biased) // n_group
    groups = [biased[g * size : (g + 1) * size] for g in range(n_group)]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(n_group), key=lambda g: (-worth[g], g))[:topk_group]
    return [b if e // size in best else -math.inf for e, b in enumerate(biased)]
