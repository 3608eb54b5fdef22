"""The router: from one logit per expert to k experts and k weights per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.options import check_finite
from moe_ops.checks.shapes import (
    DOUBLE,
    DTYPES,
    FLOATS_OR_DOUBLE,
    check_choice,
    check_devices,
    check_float,
    check_size,
    check_tensor,
    wide,
)
from moe_ops.registry.formulas import Formula, Gradients
from moe_ops.registry.invariance import INVARIANT
from moe_ops.registry.spec import Op, op

SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logit")
SELECT_ON = ("score", "logit")
GROUP_REDUCE = ("max", "top2sum")
GROUP_FILL = ("-inf", "zero", "zero_weight")


@dataclass(slots=True)
class RouteCall:
    """The arguments of `route`."""

    logits_TE: Tensor
    top_k: int
    bias_E: Tensor | None = None
    per_expert_scale_E: Tensor | None = None
    score: str = "softmax"
    select_on: str = "score"
    n_group: int = 1
    topk_group: int = 1
    group_reduce: str = "top2sum"
    group_fill: str = "-inf"
    softmax_selected: bool = False
    renormalize: bool = False
    eps: float = 0.0
    min_sum: float = 0.0
    scale: float = 1.0
    out_dtype: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        as_computed = self.out_dtype == "float32" and self.logits_TE.dtype is DOUBLE
        return DOUBLE if as_computed else DTYPES[self.out_dtype]


def check(call: RouteCall) -> None:
    """Raise ValueError or TypeError unless `route` takes these arguments."""
    logits_TE, bias_E, per_expert_scale_E = call.logits_TE, call.bias_E, call.per_expert_scale_E
    check_tensor("logits_TE", logits_TE, 2, FLOATS_OR_DOUBLE)
    E = logits_TE.shape[1]
    if not 1 <= call.top_k <= E:
        raise ValueError(
            f"top_k={call.top_k} must be from 1 to the {E} experts of logits_TE; lower top_k"
        )
    check_choice("score", call.score, SCORES)
    check_choice("select_on", call.select_on, SELECT_ON)
    check_choice("out_dtype", call.out_dtype, tuple(DTYPES))
    if bias_E is not None:
        check_float("bias_E", bias_E, 1, logits_TE)
        check_size("bias_E", bias_E, 0, E, "one per expert of logits_TE")
    if per_expert_scale_E is not None:
        check_float("per_expert_scale_E", per_expert_scale_E, 1, logits_TE)
        check_size("per_expert_scale_E", per_expert_scale_E, 0, E, "one per expert of logits_TE")
    if call.n_group != 1 or call.topk_group != 1:
        _check_groups(call)
    elif call.group_reduce not in GROUP_REDUCE or call.group_fill not in GROUP_FILL:
        _check_fold(call)
    total = call.eps + call.min_sum + call.scale
    if total - total != 0.0:  # one of them, or their sum, is infinite or not a number
        for name in ("eps", "min_sum", "scale"):
            check_finite(name, getattr(call, name))
    if call.softmax_selected and call.renormalize:
        raise ValueError("softmax_selected already makes weights that sum to 1; drop renormalize")
    if bias_E is not None or per_expert_scale_E is not None:
        check_devices(logits_TE, bias_E=bias_E, per_expert_scale_E=per_expert_scale_E)


def _check_groups(call: RouteCall) -> None:
    _check_fold(call)
    E, n_group, topk_group = call.logits_TE.shape[1], call.n_group, call.topk_group
    if n_group < 1 or E % n_group:
        raise ValueError(f"n_group={n_group} must divide the {E} experts of logits_TE")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group={topk_group} must be from 1 to n_group={n_group}")
    if call.group_reduce == "top2sum" and n_group == E:
        raise ValueError(
            f"group_reduce='top2sum' needs two experts a group, got {E} experts in {n_group} groups"
        )
    beyond = beyond_groups(E, call.top_k, n_group, topk_group)
    if call.group_fill == "-inf" and beyond is not None:
        raise ValueError(beyond)


def beyond_groups(E: int, top_k: int, n_group: int, topk_group: int) -> str | None:
    """That more experts are chosen than the kept groups have, or None.

    All others have the same choice, the fill, so ties decide which of them are chosen.
    """
    kept = E if n_group == 1 else topk_group * (E // n_group)
    if top_k <= kept:
        return None
    return f"top_k={top_k} exceeds the {kept} experts of topk_group={topk_group} groups"


def _check_fold(call: RouteCall) -> None:
    check_choice("group_reduce", call.group_reduce, GROUP_REDUCE)
    check_choice("group_fill", call.group_fill, GROUP_FILL)


@op(check=check)
def route(call: RouteCall) -> tuple[Tensor, Tensor]:
    """Choose top_k experts for each token. Returns (weights_TK in out_dtype, ids_TK in int32).

    With l = logits_TE in float32, b = bias_E and s the score (softmax(l), sigmoid(l),
    sqrt(softplus(l)) or l):

        selection  c = s + b, or c = l + b where select_on is "logit"; b = 0 without a bias_E
        groups     if n_group > 1, experts outside the topk_group best groups get c = -inf, or
                   c = 0 where group_fill is "zero", or c = 0 and s = 0 where it is "zero_weight";
                   a group's worth is its largest c ("max") or the sum of its two largest
                   ("top2sum")
        experts    i = the top_k largest c, largest first; of equal c those that torch.topk takes
                   (the Triton kernel: those with the lower ids)
        weights    w = s[i]; w = softmax(w) if softmax_selected;
                   w /= max(sum(w) + eps, min_sum) if renormalize; w *= scale; w *=
                   per_expert_scale_E[i]

    All of it is computed in float32; only the result is rounded to out_dtype. Of float64 logits it
    is computed in float64, of which "float32", the default, rounds nothing. The logits must come as
    the model rounds them, or near-tied experts change places. NaN is larger than any number, as
    torch.topk has it, and reaches the weights. T = 0 gives empty results.

    Shapes: logits_TE [T, E] float; bias_E, per_expert_scale_E [E] float; results [T, top_k].
    Raises ValueError or TypeError for wrong shapes, dtypes, devices, names, or top_k > E.

    Sources: softmax then top-k, Shazeer et al. 2017 (arXiv:1701.06538); the selection bias and
    grouped sigmoid scores, DeepSeek-V3 (arXiv:2412.19437, section 2.1.2).
    """
    logits = wide(call.logits_TE)
    T, E = logits.shape
    scores_TE = score_of(logits, call.score)
    choice_TE = scores_TE if call.select_on == "score" else logits
    if call.bias_E is not None:
        choice_TE = choice_TE + wide(call.bias_E)
    if call.n_group > 1:
        n_group = call.n_group
        groups = choice_TE.view(T, n_group, E // n_group)
        worth_TG = (
            groups.amax(-1) if call.group_reduce == "max" else groups.topk(2, dim=-1).values.sum(-1)
        )
        best = worth_TG.topk(call.topk_group, dim=-1).indices
        kept = torch.zeros_like(worth_TG, dtype=torch.bool).scatter(1, best, True)
        kept_TE = kept[:, :, None].expand_as(groups).reshape(T, E)
        fill = float("-inf") if call.group_fill == "-inf" else 0.0
        choice_TE = choice_TE.masked_fill(~kept_TE, fill)
        if call.group_fill == "zero_weight":
            scores_TE = scores_TE.masked_fill(~kept_TE, 0.0)
    ids_TK = choice_TE.topk(call.top_k, dim=-1).indices
    return finished(call, scores_TE.gather(1, ids_TK), ids_TK), ids_TK.to(torch.int32)


def finished(call: RouteCall, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """The weights of chosen experts by their scores, in the dtype of the call."""
    if call.softmax_selected:
        weights_TK = weights_TK.softmax(-1)
    if call.renormalize:
        total_T1 = weights_TK.sum(-1, keepdim=True) + call.eps
        weights_TK = weights_TK / total_T1.clamp(min=call.min_sum)
    if call.scale != 1.0:
        weights_TK = weights_TK * call.scale
    if call.per_expert_scale_E is not None:
        weights_TK = weights_TK * wide(call.per_expert_scale_E)[ids_TK]
    return weights_TK.to(call.dtype)


def score_of(logits: Tensor, score: str) -> Tensor:
    """The scores of logits, of a softmax by whole rows."""
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    if score == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits


def gradients(
    call: RouteCall, ids_TK: Tensor, grad_TK: Tensor | None, wanted: frozenset[str]
) -> Gradients:
    """The gradients of the weights of chosen experts, by the definition; a choice has none."""
    if grad_TK is None:
        return {}
    twice = torch.is_grad_enabled()  # the gradient of the gradient is wanted, too
    named = {"logits_TE": call.logits_TE, "per_expert_scale_E": call.per_expert_scale_E}
    of: dict[str, Any] = {n: t for n, t in named.items() if n in wanted and t is not None}
    with torch.enable_grad():
        if not twice:
            of = {n: t.detach().requires_grad_() for n, t in of.items()}
        c = replace(call, **of)
        ids_TK = ids_TK.to(torch.int64)
        scores_TE = score_of(wide(c.logits_TE), c.score)
        weights_TK = finished(c, scores_TE.gather(1, ids_TK), ids_TK)
        found = torch.autograd.grad(weights_TK, [*of.values()], grad_TK, create_graph=twice)
    return dict(zip(of, found, strict=True))


def takes(call: RouteCall) -> bool:
    """Whether gradients are made of the choice: of calls that have to be batch invariant, which a
    backend without gradients runs. Experts of groups that weigh nothing are left to autograd."""
    return INVARIANT.get() and call.group_fill != "zero_weight"


def formula_of(
    op: Op, routing: Callable[[Any], RouteCall], writes: tuple[str, ...] = ()
) -> Formula:
    """The gradients of an op that gives weights and ids as `route` does; `routing` gives the call
    of `route` in its record, `writes` are the arguments that it writes to."""
    return Formula(
        takes=lambda call: takes(routing(call)),
        forward=lambda call: op.part(call),
        backward=lambda call, saved, grads, wanted: gradients(
            routing(call), saved[0], grads[0], wanted
        ),
        writes=writes,
        results=2,
    )


route.differentiated(formula_of(route, lambda call: call))
route.fake(fake_impls.route)
