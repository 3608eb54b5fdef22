"""The router: from one logit per expert to k experts and k weights per token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.options import check_finite
from moe_ops.shapes import DTYPES, FLOATS, check_choice, check_devices, check_size, check_tensor
from moe_ops.spec import op

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logit")
SELECT_ON = ("score", "logit")
GROUP_REDUCE = ("max", "top2sum")
GROUP_FILL = ("-inf", "zero")


def check(
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
) -> None:
    """Raise ValueError or TypeError unless `route` takes these arguments."""
    check_tensor("logits_TE", logits_TE, 2, FLOATS)
    E = logits_TE.shape[1]
    if not 1 <= top_k <= E:
        raise ValueError(
            f"top_k={top_k} must be from 1 to the {E} experts of logits_TE; lower top_k"
        )
    check_choice("score", score, SCORES)
    check_choice("select_on", select_on, SELECT_ON)
    check_choice("out_dtype", out_dtype, tuple(DTYPES))
    if bias_E is not None:
        check_tensor("bias_E", bias_E, 1, FLOATS)
        check_size("bias_E", bias_E, 0, E, "one per expert of logits_TE")
    if per_expert_scale_E is not None:
        check_tensor("per_expert_scale_E", per_expert_scale_E, 1, FLOATS)
        check_size("per_expert_scale_E", per_expert_scale_E, 0, E, "one per expert of logits_TE")
    if n_group != 1 or topk_group != 1:
        _check_groups(E, top_k, n_group, topk_group, group_reduce, group_fill)
    elif group_reduce not in GROUP_REDUCE or group_fill not in GROUP_FILL:
        _check_fold(group_reduce, group_fill)
    total = eps + min_sum + scale
    if total - total != 0.0:  # one of them, or their sum, is infinite or not a number
        for name, value in (("eps", eps), ("min_sum", min_sum), ("scale", scale)):
            check_finite(name, value)
    if softmax_selected and renormalize:
        raise ValueError("softmax_selected already makes weights that sum to 1; drop renormalize")
    check_devices(logits_TE, bias_E=bias_E, per_expert_scale_E=per_expert_scale_E)


def _check_groups(
    E: int, top_k: int, n_group: int, topk_group: int, group_reduce: str, group_fill: str
) -> None:
    _check_fold(group_reduce, group_fill)
    if n_group < 1 or E % n_group:
        raise ValueError(f"n_group={n_group} must divide the {E} experts of logits_TE")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group={topk_group} must be from 1 to n_group={n_group}")
    if group_reduce == "top2sum" and n_group == E:
        raise ValueError(
            f"group_reduce='top2sum' needs two experts a group, got {E} experts in {n_group} groups"
        )
    if group_fill == "-inf" and topk_group * (E // n_group) < top_k:
        raise ValueError(
            f"top_k={top_k} exceeds the {topk_group * (E // n_group)} experts "
            f"of topk_group={topk_group} groups"
        )


def _check_fold(group_reduce: str, group_fill: str) -> None:
    check_choice("group_reduce", group_reduce, GROUP_REDUCE)
    check_choice("group_fill", group_fill, GROUP_FILL)


@op(check=check)
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
    """Choose top_k experts for each token. Returns (weights_TK in out_dtype, experts_TK in int32).

    With l = logits_TE in float32, b = bias_E and s the score (softmax(l), sigmoid(l),
    sqrt(softplus(l)) or l):

        selection  c = s + b, or c = l + b where select_on is "logit"; b = 0 without a bias_E
        groups     if n_group > 1, experts outside the topk_group best groups get c = group_fill,
        where a
                   group's worth is its largest c ("max") or the sum of its two largest ("top2sum")
        experts    i = the top_k largest c, largest first
        weights    w = s[i]; w = softmax(w) if softmax_selected;
                   w /= max(sum(w) + eps, min_sum) if renormalize; w *= scale; w *=
                   per_expert_scale_E[i]

    All of it is computed in float32; only the result is rounded to out_dtype. The logits must come
    as the model rounds them, or near-tied experts change places. NaN is larger than any number, as
    torch.topk has it, and reaches the weights. T = 0 gives empty results.

    Shapes: logits_TE [T, E] float; bias_E, per_expert_scale_E [E] float; results [T, top_k].
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, names, or top_k > E.

    Sources: softmax then top-k, Shazeer et al. 2017 (arXiv:1701.06538); the selection bias and
    grouped sigmoid scores, DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """
    logits = logits_TE.float()
    T, E = logits.shape
    scores_TE = _score(logits, score)
    choice_TE = scores_TE if select_on == "score" else logits
    if bias_E is not None:
        choice_TE = choice_TE + bias_E.float()
    if n_group > 1:
        groups = choice_TE.view(T, n_group, E // n_group)
        worth_TG = (
            groups.amax(-1) if group_reduce == "max" else groups.topk(2, dim=-1).values.sum(-1)
        )
        best = worth_TG.topk(topk_group, dim=-1).indices
        kept = torch.zeros_like(worth_TG, dtype=torch.bool).scatter(1, best, True)
        kept_TE = kept[:, :, None].expand_as(groups).reshape(T, E)
        choice_TE = choice_TE.masked_fill(~kept_TE, 0.0 if group_fill == "zero" else float("-inf"))
    experts_TK = choice_TE.topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if softmax_selected:
        weights_TK = weights_TK.softmax(-1)
    if renormalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + eps).clamp(min=min_sum)
    if scale != 1.0:
        weights_TK = weights_TK * scale
    if per_expert_scale_E is not None:
        weights_TK = weights_TK * per_expert_scale_E.float()[experts_TK]
    return weights_TK.to(DTYPES[out_dtype]), experts_TK.to(torch.int32)


def _score(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    if score == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits


route.fake(fake_impls.route)
