"""The routers inside TensorRT-LLM's kernels: which calls of `route` they compute, and how they are
told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_ops.backends.flashinfer import package
from moe_ops.ops.route import RouteCall
from moe_ops.ops.routing_methods import METHODS, routing_method
from moe_ops.registry.gradients import needs_grad

# The arguments of `moe` that say how tokens are routed.
READS = (
    "bias_E", "score", "select_on", "n_group", "topk_group", "group_reduce", "group_fill",
    "softmax_selected", "renormalize", "eps", "min_sum", "scale", "weights_dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Most:
    """The most experts, and choices of a token, for which a router is compiled."""

    experts: int
    choices: int


MOST = {
    "Default": Most(256, 8), "Renormalize": Most(2048, 32), "RenormalizeNaive": Most(2048, 32),
    "TopK": Most(256, 8), "Sigmoid": Most(256, 8), "TopKSigmoid": Most(256, 8),
    "SigmoidRenorm": Most(256, 8), "Llama4": Most(128, 1), "MiniMax2": Most(384, 8),
    "DeepSeekV3": Most(384, 8),
}  # fmt: skip
GROUPS, TOP_GROUPS, A_GROUP, EXPERTS = 8, 4, 32, 4


def refusal(call: RouteCall) -> str | None:
    """Why these routers cannot route a call, or None."""
    c, E, method = call, call.logits_TE.shape[1], routing_method(call)
    if torch.is_grad_enabled() and needs_grad(c.logits_TE, c.bias_E):
        return "is not differentiable, and an argument requires grad"
    if not method:
        known = ", ".join(dict.fromkeys(m.name for m in METHODS))
        return f"routes by {known}; these options of `route` are none of them"
    most = MOST[method]
    if most.experts < E or c.top_k > most.choices:
        return (
            f"routes by {method} to at most {most.choices} of {most.experts} experts, got "
            f"{c.top_k} of {E}"
        )
    if c.n_group == 1:
        return None
    if c.n_group > GROUPS or c.topk_group > TOP_GROUPS or A_GROUP * c.n_group < E or E % EXPERTS:
        return (
            f"routes to at most {TOP_GROUPS} of {GROUPS} groups of at most {A_GROUP} experts, a "
            f"multiple of {EXPERTS} in all; got {c.topk_group} of {c.n_group} groups of {E} experts"
        )
    if c.top_k >= c.topk_group * E // c.n_group:
        return f"routes to fewer experts than the kept groups have, got {c.top_k}"
    return None


def given(call: RouteCall) -> dict[str, Any]:
    """The arguments of a function that routes itself."""
    c, name = call, routing_method(call)
    methods = package.module("flashinfer.fused_moe").RoutingMethodType
    bias_E, grouped, deepseek = c.bias_E, c.n_group > 1, name == "DeepSeekV3"
    if bias_E is not None:
        known = bias_E.dtype in (torch.float32, torch.bfloat16)
        bias_E = (bias_E if known else bias_E.float()).contiguous()
    return {
        "routing_logits": c.logits_TE.float().contiguous(),  # as computed in float32
        "routing_bias": bias_E,
        "num_experts": c.logits_TE.shape[1],
        "top_k": c.top_k,
        "n_group": c.n_group if grouped or deepseek else None,
        "topk_group": c.topk_group if grouped or deepseek else None,
        "routed_scaling_factor": c.scale if deepseek else None,
        "routing_method_type": int(getattr(methods, name)),
    }
