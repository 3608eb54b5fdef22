"""The routers of published models: their formulas as plain loops over one token's logits, and the
arguments of `route` that express them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_ops.conformance.tensors import distinct_logits

Row = list[float]
Choice = tuple[list[int], Row]


def softmax(values: Row) -> Row:
    powers = [math.exp(v - max(values)) for v in values]
    return [p / sum(powers) for p in powers]


def sigmoid(values: Row) -> Row:
    return [1 / (1 + math.exp(-v)) for v in values]


def best(values: Row, k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda e: -values[e])[:k]


def best_groups(values: Row, n_group: int, kept: int, worth: Callable[[Row], float]) -> set[int]:
    """The experts of the `kept` groups of the largest worth."""
    size = len(values) // n_group
    worths = [worth(values[g * size : (g + 1) * size]) for g in range(n_group)]
    return {g * size + i for g in best(worths, kept) for i in range(size)}


def two_largest(values: Row) -> float:
    return sum(sorted(values)[-2:])


def qwen2_moe(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    p = softmax(logits)
    ids = best(p, k)
    return ids, [p[e] for e in ids]


def mixtral(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    ids, p = qwen2_moe(logits, k, bias, scales)
    return ids, [w / sum(p) for w in p]


def gemma4(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    ids, w = mixtral(logits, k, bias, scales)
    return ids, [v * scales[e] for e, v in zip(ids, w, strict=True)]


def deepseek_v2(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    p = softmax(logits)
    kept = best_groups(p, 4, 2, max)
    ids = best([v if e in kept else 0.0 for e, v in enumerate(p)], k)
    return ids, [16.0 * p[e] for e in ids]


def mistral4(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    p = softmax(logits)
    kept = best_groups(p, 4, 2, two_largest)
    ids = best([v if e in kept else 0.0 for e, v in enumerate(p)], k)
    return ids, [p[e] / (sum(p[i] for i in ids) + 1e-20) for e in ids]


def ernie4_5(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    p = softmax(logits)
    ids = best([v + b for v, b in zip(p, bias, strict=True)], k)
    return ids, [p[e] / max(sum(p[i] for i in ids), 0.6) for e in ids]


def gpt_oss(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    ids = best(logits, k)
    return ids, softmax([logits[e] for e in ids])


def privacy_filter(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    ids, w = gpt_oss(logits, k, bias, scales)
    return ids, [v / k for v in w]


def deepseek_v3(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    s = sigmoid(logits)
    c = [v + b for v, b in zip(s, bias, strict=True)]
    kept = best_groups(c, 4, 2, two_largest)
    ids = best([v if e in kept else -math.inf for e, v in enumerate(c)], k)
    return ids, [2.5 * s[e] / (sum(s[i] for i in ids) + 1e-20) for e in ids]


def grouped_by_largest(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    s = sigmoid(logits)
    c = [v + b for v, b in zip(s, bias, strict=True)]
    kept = best_groups(c, 4, 3, max)
    ids = best([v if e in kept else -math.inf for e, v in enumerate(c)], k)
    return ids, [s[e] for e in ids]


def lfm2(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    s = sigmoid(logits)
    ids = best([v + b for v, b in zip(s, bias, strict=True)], k)
    return ids, [s[e] / (sum(s[i] for i in ids) + 0.1) for e in ids]


def kolibri(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    ids = best([v + b for v, b in zip(logits, bias, strict=True)], k)
    s = sigmoid(logits)
    return ids, [s[e] / sum(s[i] for i in ids) for e in ids]


def deepseek_v4(logits: Row, k: int, bias: Row, scales: Row) -> Choice:
    s = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    ids = best([v + b for v, b in zip(s, bias, strict=True)], k)
    return ids, [1.5 * s[e] / (sum(s[i] for i in ids) + 1e-20) for e in ids]


@dataclass(frozen=True)
class Router:
    """A published formula, and the arguments of `route` that express it."""

    formula: Callable[[Row, int, Row, Row], Choice]
    args: dict[str, Any] = field(default_factory=dict)
    biased: bool = False
    scaled: bool = False


NORM: dict[str, Any] = {"renormalize": True}
V2_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "group_fill": "zero"}
V3: dict[str, Any] = {"score": "sigmoid", "renormalize": True, "eps": 1e-20, "scale": 2.5}
SELECTED: dict[str, Any] = {"score": "logit", "softmax_selected": True}
BY_LARGEST: dict[str, Any] = {"n_group": 4, "topk_group": 3, "group_reduce": "max"}
ROUTERS = {
    "qwen2_moe": Router(qwen2_moe),
    "mixtral": Router(mixtral, NORM),
    "gemma4": Router(gemma4, NORM, scaled=True),
    "deepseek_v2": Router(
        deepseek_v2,
        {**V2_GROUPS, "group_fill": "zero_weight", "group_reduce": "max", "scale": 16.0},
    ),
    "mistral4": Router(mistral4, {**V2_GROUPS, **NORM, "eps": 1e-20}),
    "ernie4_5": Router(ernie4_5, {**NORM, "min_sum": 0.6}, biased=True),
    "gpt_oss": Router(gpt_oss, SELECTED),
    "privacy_filter": Router(privacy_filter, {**SELECTED, "scale": 1 / 4}),
    "deepseek_v3": Router(deepseek_v3, {**V3, "n_group": 4, "topk_group": 2}, biased=True),
    "largest": Router(grouped_by_largest, {"score": "sigmoid", **BY_LARGEST}, biased=True),
    "lfm2": Router(lfm2, {**NORM, "score": "sigmoid", "eps": 0.1}, biased=True),
    "kolibri": Router(kolibri, {**NORM, "score": "sigmoid", "select_on": "logit"}, biased=True),
    "deepseek_v4": Router(deepseek_v4, {**V3, "score": "sqrtsoftplus", "scale": 1.5}, biased=True),
}
T, E, K = 40, 16, 4


def arguments(router: Router, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    call = {"logits_TE": distinct_logits(T, E, dtype), "top_k": K, **router.args}
    if router.biased:
        call["bias_E"] = torch.randn(E) * 0.4
    if router.scaled:
        call["per_expert_scale_E"] = torch.rand(E) + 0.5
    return call


def oracle(router: Router, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The published formula, a token at a time in double precision."""
    bias = call["bias_E"].tolist() if router.biased else []
    scales = call["per_expert_scale_E"].tolist() if router.scaled else []
    found = [router.formula(row, call["top_k"], bias, scales) for row in call["logits_TE"].tolist()]
    weights = torch.tensor([w for _, w in found], dtype=torch.float64)
    return weights, torch.tensor([ids for ids, _ in found], dtype=torch.int32)
