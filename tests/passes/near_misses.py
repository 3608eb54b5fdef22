"""Routers that `route` is not, each with the reason that must be given (a regular expression)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.passes.routers import E, K, Router, limited, share

OTHERS: dict[str, tuple[Router, str]] = {}


def refused(reason: str) -> Callable[[Router], Router]:
    """A router that is nothing that `route` can do, for a reason that matches."""
    return lambda router: OTHERS.setdefault(router.__name__, (router, reason))[0]


@refused("chooses the smallest")
def smallest(logits, bias, scale):
    return logits.float().sigmoid().topk(K, largest=False)


@refused("not output 1 of aten.topk")
def sorted_instead(logits, bias, scale):
    i = logits.float().argsort(-1, descending=True)[:, :K]
    return logits.float().sigmoid().gather(1, i), i


@refused("of another topk")
def weights_of_another_topk(logits, bias, scale):
    s = logits.float().sigmoid()
    return s.topk(K)[0], (s + bias).topk(K)[1]


@refused("ids of another topk")
def weights_at_other_ids(logits, bias, scale):
    s = logits.float().sigmoid()
    return s.gather(1, s.topk(K)[1]), (s + bias).topk(K)[1]


@refused("chooses by something else")
def other_scores(logits, bias, scale):
    return logits.float().tanh().gather(1, (i := logits.float().sigmoid().topk(K)[1])), i


@refused("chooses by something else")
def scaled_bias_for_each_token(logits, bias, scale):
    s = logits.float().sigmoid()
    i = (s + bias * logits.float()[:, :1]).topk(K)[1]
    return s.gather(1, i), i


@refused("not the scores of the chosen experts")
def bias_on_the_weights(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return w + bias[i], i


@refused("not the scores of the chosen experts")
def relu_on_the_weights(logits, bias, scale):
    w, i = logits.float().topk(K)
    return w.relu(), i


@refused("divides the weights by others than their sum")
def share_of_all_tokens(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return w / w.sum(0, keepdim=True), i


@refused("the sum of others")
def share_of_all_experts(logits, bias, scale):
    s = logits.float().sigmoid()
    w, i = s.topk(K)
    return w / (w * w).sum(-1, keepdim=True), i


@refused("what divides the weights is aten.clamp_max")
def sum_clamped_from_above(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return w / w.sum(-1, keepdim=True).clamp(0.1, 1.0), i


@refused("a sum that may be negative")
def share_of_logits(logits, bias, scale):
    w, i = logits.float().topk(K)
    return share(w), i


@refused("a sum that may be negative")
def negative_eps(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return share(w, -0.5), i


@refused("adds a tensor to the weights' sum")
def eps_for_each_token(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return w / (w.sum(-1, keepdim=True) + logits.float()[:, :1].exp()), i


@refused("computes the weights' sum in bfloat16")
def share_of_rounded_weights(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return share(w.bfloat16()), i


@refused("computes the biased scores in bfloat16")
def rounded_scores(logits, bias, scale):
    s = logits.bfloat16().sigmoid()
    i = (s + bias.bfloat16()).topk(K)[1]
    return s.gather(1, i).float(), i


@refused("computes the worth of groups in bfloat16")
def groups_by_rounded_scores(logits, bias, scale):
    w, i = limited(logits.softmax(-1).bfloat16(), 4, 2).topk(K)
    return w.float(), i


@refused("what divides the weights is aten.clamp_min")
def eps_after_the_clamp(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return w / (w.sum(-1, keepdim=True).clamp(min=0.5) + 0.1), i


@refused("drop renormalize")
def softmax_and_share(logits, bias, scale):
    v, i = logits.float().topk(K)
    return share(v.softmax(-1), 0.5), i


@refused("masks with -1.0")
def masked_with_minus_one(logits, bias, scale):
    s = logits.float().sigmoid()
    i = limited(s + bias, 4, 2, -1.0).topk(K)[1]
    return s.gather(1, i), i


@refused("rates groups by their 3 largest")
def groups_by_three(logits, bias, scale):
    s = logits.float().sigmoid()
    worth = s.view(-1, 3, 4).topk(3).values.sum(-1)
    kept = torch.zeros_like(worth).scatter(1, worth.topk(2).indices, 1)
    kept = kept[..., None].expand(-1, -1, 4).reshape(-1, E).bool()
    return s.masked_fill(~kept, float("-inf")).topk(K)


@refused("rates groups by other scores")
def groups_by_unbiased_scores(logits, bias, scale):
    s = logits.float().sigmoid()
    worth = s.view(-1, 4, 3).amax(-1)
    kept = torch.zeros_like(worth).scatter(1, worth.topk(2).indices, 1)
    kept = kept[..., None].expand(-1, -1, 3).reshape(-1, E).bool()
    i = (s + bias).masked_fill(~kept, float("-inf")).topk(K)[1]
    return s.gather(1, i), i


@refused("smallest groups")
def worst_groups(logits, bias, scale):
    s = logits.float().sigmoid()
    worth = s.view(-1, 4, 3).amax(-1)
    kept = torch.zeros_like(worth).scatter(1, worth.topk(2, largest=False).indices, 1)
    kept = kept[..., None].expand(-1, -1, 3).reshape(-1, E).bool()
    return s.masked_fill(~kept, float("-inf")).topk(K)


@refused("masked experts may be chosen")
def sigmoid_of_zero_for_masked_experts(logits, bias, scale):
    w, i = limited(logits.float(), 4, 2, 0.0).topk(K)
    return w.sigmoid(), i


@refused("top_k=3 exceeds the 2 experts of topk_group=1 groups, and ties decide")
def masked_experts_with_their_scores(logits, bias, scale):
    s = logits.float().softmax(-1)
    i = limited(s, 6, 1, 0.0).topk(K)[1]
    return s.gather(1, i), i


@refused("top_k=3 exceeds the 2 experts")
def too_few_experts_in_a_group(logits, bias, scale):
    return limited(logits.float().sigmoid(), 6, 1).topk(K)


@refused("the mask|its mask|is not spread")
def strided_groups(logits, bias, scale):
    s = logits.float().sigmoid()
    worth = s.view(-1, 3, 4).amax(1)
    kept = torch.zeros_like(worth).scatter(1, worth.topk(2).indices, 1).repeat(1, 3).bool()
    return s.masked_fill(~kept, float("-inf")).topk(K)


@refused("two numbers for each expert")
def two_scales_for_each_expert(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return w * scale[i] * bias[i], i


@refused("not the scores of the chosen experts")
def scale_of_another_expert(logits, bias, scale):
    w, i = logits.float().sigmoid().topk(K)
    return w * scale[i.flip(-1)], i
