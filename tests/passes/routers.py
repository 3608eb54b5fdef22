"""Routers as models write them, each with the arguments of `route` that say the same.

A router takes logits [T, 12], a bias [12] and a scale [12], and gives (weights, ids), both [T, 3].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

E, K = 12, 3
Router = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

ROUTERS: dict[str, tuple[Router, dict[str, Any]]] = {}


def reads(**arguments: Any) -> Callable[[Router], Router]:
    """A router that is `route` with these arguments, top_k and defaults left out."""
    return lambda router: ROUTERS.setdefault(router.__name__, (router, arguments))[0]


def share(w: Tensor, eps: float = 0.0) -> Tensor:
    """The weights divided by their sum."""
    total = w.sum(-1, keepdim=True)
    return w / (total + eps) if eps else w / total


def limited(
    choice: Tensor, n: int, best: int, fill: float = float("-inf"), reduce: str = "top2sum"
) -> Tensor:
    """The scores with those outside of the best groups masked, as DeepSeek writes it."""
    groups = choice.view(-1, n, E // n)
    worth = groups.max(-1).values if reduce == "max" else groups.topk(2, dim=-1)[0].sum(dim=-1)
    index = torch.topk(worth, k=best, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(worth)
    mask.scatter_(1, index, 1)
    spread = mask.unsqueeze(-1).expand(-1, n, E // n).reshape(-1, E)
    return choice.masked_fill(~spread.bool(), fill)


@reads()
def softmax(logits, bias, scale):
    return F.softmax(logits, dim=-1, dtype=torch.float).topk(K)


@reads(out_dtype="as logits")
def softmax_in_the_logits_dtype(logits, bias, scale):
    w, i = logits.float().softmax(1).topk(K, dim=-1)
    return w.to(logits.dtype), i


@reads(renormalize=True)
def softmax_renormalised(logits, bias, scale):
    w, i = logits.float().softmax(-1).topk(K)
    w /= w.sum(-1, keepdim=True)
    return w, i


@reads(renormalize=True, scale=2.5)
def softmax_unsorted_scaled(logits, bias, scale):
    w, i = logits.float().softmax(-1).topk(K, sorted=False)
    return 2.5 * share(w), i.int()


@reads(renormalize=True, per_expert_scale_E=True)
def softmax_with_a_scale_for_each_expert(logits, bias, scale):
    w, i = logits.float().softmax(-1).topk(K)
    return share(w) * scale[i], i


@reads(scale=0.25, per_expert_scale_E=True)
def softmax_with_both_scales(logits, bias, scale):
    w, i = logits.float().softmax(-1).topk(K)
    return scale.float()[i] * (w / 4), i


@reads(n_group=4, topk_group=2, group_reduce="max", group_fill="zero_weight", scale=1.5)
def softmax_groups_by_maximum(logits, bias, scale):
    w, i = limited(logits.float().softmax(-1), 4, 2, 0.0, "max").topk(K, sorted=False)
    return w * 1.5, i


@reads(n_group=6, topk_group=1, group_reduce="max", group_fill="zero_weight", scale=2.0)
def softmax_of_fewer_experts_than_are_chosen(logits, bias, scale):
    w, i = limited(logits.float().softmax(-1), 6, 1, 0.0, "max").topk(K, sorted=False)
    return w * 2, i


@reads(score="logit", n_group=4, topk_group=2, group_fill="zero_weight")
def logits_in_groups(logits, bias, scale):
    return limited(logits.float(), 4, 2, 0.0).topk(K)


@reads(n_group=4, topk_group=3, group_fill="zero", renormalize=True, eps=1e-20)
def softmax_groups_by_two(logits, bias, scale):
    p = logits.float().softmax(-1)
    i = limited(p, 4, 3, 0.0).topk(K)[1]
    return share(p.gather(1, i), 1e-20), i


@reads(n_group=2, topk_group=1, group_reduce="max")
def softmax_one_group_of_two(logits, bias, scale):
    return limited(logits.float().softmax(-1), 2, 1, reduce="max").topk(K)


@reads(bias_E=True, renormalize=True, min_sum=1e-3)
def softmax_biased(logits, bias, scale):
    p = logits.float().softmax(-1)
    i = (p + bias).topk(K).indices
    w = p.gather(-1, i)
    return w / w.sum(-1, keepdim=True).clamp(min=1e-3), i


@reads(bias_E=True, renormalize=True, eps=0.125, min_sum=0.5)
def softmax_biased_by_a_row(logits, bias, scale):
    p = logits.float().softmax(-1)
    i = (bias[None] + p).topk(K).indices
    w = p.gather(-1, i)
    return w / (0.125 + w.sum(-1)).clamp_min(0.5)[:, None], i


@reads(score="logit", softmax_selected=True, out_dtype="as logits")
def softmax_of_the_chosen(logits, bias, scale):
    v, i = logits.topk(K)
    return v.softmax(-1, dtype=logits.dtype), i


@reads(score="logit", softmax_selected=True, scale=1 / 3)
def softmax_of_the_chosen_over_k(logits, bias, scale):
    v, i = logits.float().topk(K)
    return v.softmax(1) / K, i


@reads(score="logit", softmax_selected=True)
def softmax_of_gathered_logits(logits, bias, scale):
    i = logits.topk(K).indices
    return logits.gather(1, i).float().softmax(-1), i


@reads(score="sigmoid", select_on="logit", renormalize=True)
def sigmoid_of_the_chosen(logits, bias, scale):
    v, i = logits.topk(K)
    return share(v.float().sigmoid()), i


@reads(select_on="logit")
def softmax_chosen_by_logits(logits, bias, scale):
    i = logits.topk(K).indices
    return logits.float().softmax(-1).gather(1, i), i


@reads(score="logit")
def logits_as_weights(logits, bias, scale):
    return logits.float().topk(K)


@reads(
    score="sigmoid", bias_E=True, n_group=4, topk_group=2, renormalize=True, eps=1e-20, scale=2.5
)
def sigmoid_groups(logits, bias, scale):
    s = logits.float().sigmoid()
    i = torch.topk(limited(s + bias[None], 4, 2), k=K, dim=-1, sorted=False)[1]
    return share(s.gather(1, i), 1e-20) * 2.5, i


@reads(score="sigmoid", bias_E=True, n_group=4, topk_group=2, group_fill="zero")
def sigmoid_groups_filled_with_zero(logits, bias, scale):
    s = logits.float().sigmoid()
    i = limited(s + bias, 4, 2, 0.0).topk(K)[1]
    return s.gather(1, i), i


@reads(score="sigmoid", bias_E=True, renormalize=True, eps=1e-20)
def sigmoid_one_group(logits, bias, scale):
    s = logits.float().sigmoid()
    i = limited(s + bias, 1, 1).topk(K)[1]
    return share(s.gather(1, i), 1e-20), i


@reads(score="sigmoid", bias_E=True)
def sigmoid_every_group(logits, bias, scale):
    s = logits.float().sigmoid()
    i = limited(s + bias, 3, 3).topk(K)[1]
    return s.gather(1, i), i


@reads(score="sigmoid", bias_E=True, n_group=3, topk_group=1)
def sigmoid_one_of_three_groups(logits, bias, scale):
    s = logits.float().sigmoid()
    i = limited(s + bias, 3, 1).topk(K)[1]
    return s.gather(1, i), i


@reads(score="sigmoid", n_group=4, topk_group=2, group_reduce="max")
def sigmoid_groups_kept_by_where(logits, bias, scale):
    s = logits.float().sigmoid()
    best = s.view(-1, 4, 3).amax(-1).topk(2).indices
    kept = s.new_zeros(s.shape[0], 4).scatter(1, best, 1.0)[..., None].expand(-1, -1, 3)
    choice = torch.where(kept.reshape(-1, E) != 0, s, float("-inf"))
    return choice.topk(K)


@reads(score="sigmoid", bias_E=True, renormalize=True, eps=1e-6, scale=1.5)
def sigmoid_biased(logits, bias, scale):
    s = torch.sigmoid(logits.float())
    i = torch.topk(s + bias, K, dim=-1).indices
    return share(s.gather(-1, i), 1e-6) * 1.5, i


@reads(score="sigmoid", renormalize=True)
def sigmoid_plain(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return share(w), i


@reads(score="sigmoid", renormalize=True)
def sigmoid_spelled_out(logits, bias, scale):
    w, i = (1 / (1 + torch.exp(-logits.float()))).topk(K)
    return share(w), i


@reads(score="sigmoid", bias_E=True, select_on="logit", renormalize=True)
def sigmoid_with_biased_logits(logits, bias, scale):
    i = (logits.float() + bias).topk(K).indices
    return share(logits.float().gather(1, i).sigmoid()), i


@reads(score="sqrtsoftplus", bias_E=True, renormalize=True, eps=1e-20, scale=1.5)
def square_root_of_softplus(logits, bias, scale):
    s = F.softplus(logits.float()).sqrt()
    i = (s + bias).topk(K, sorted=False).indices
    return share(s.gather(1, i), 1e-20) * 1.5, i


@reads(score="sigmoid", bias_E=True)
def sigmoid_of_capped_logits(logits, bias, scale):
    s = ((logits.float() / 5).tanh() * 5).sigmoid()
    i = (s + bias).topk(K).indices
    return s.gather(1, i), i


@reads(score="logit", scale=2.0)
def relu_of_sigmoid(logits, bias, scale):
    w, i = (logits.float().sigmoid() - 0.5).relu().topk(K)
    return w * 2, i


@reads(score="logit")
def softmax_over_tokens(logits, bias, scale):
    return logits.float().softmax(0).topk(K)


@reads(score="logit")
def weights_with_the_bias(logits, bias, scale):
    return (logits.float().sigmoid() + bias).topk(K)


def each_router() -> Iterator[Any]:
    """In float32, but in bfloat16, of any number of tokens, some of every kind, and those whose
    weights have the dtype of their logits."""
    for number, (name, (_, wanted)) in enumerate(ROUTERS.items()):
        dynamic = "out_dtype" in wanted or number % 8 == 0
        marks = [[pytest.mark.every], []]
        yield pytest.param(name, torch.float32, False, id=f"{name}-f32", marks=marks[not dynamic])
        yield pytest.param(name, torch.bfloat16, True, id=f"{name}-bf16-dyn", marks=marks[dynamic])
