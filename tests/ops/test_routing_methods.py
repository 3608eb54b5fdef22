"""Which routing method a call of `route` is, and that each is what its name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops import route
from moe_ops.layer import Routing
from moe_ops.ops.route import RouteCall
from moe_ops.ops.routing_methods import METHODS, routing_method

E, K = 16, 4
SIGMOID_SUM = {"score": "sigmoid", "renormalize": True}
IN_GROUPS = {**SIGMOID_SUM, "n_group": 4, "topk_group": 2, "scale": 2.5, "eps": 1e-20}
# By name the options of `route`, whether there is a bias, and the experts of a token.
CASES: dict[str, tuple[str, dict[str, Any], bool, int]] = {
    "softmax": ("Default", {}, False, K),
    "mixtral": ("Renormalize", {"score": "logit", "softmax_selected": True}, False, K),
    "qwen3": ("RenormalizeNaive", {"renormalize": True}, False, K),
    "llama4": ("Llama4", {"score": "sigmoid"}, False, 1),
    "logits": ("TopK", {"score": "logit"}, False, K),
    "sigmoid": ("Sigmoid", {"score": "sigmoid"}, False, K),
    "by_logits": ("TopKSigmoid", {"score": "sigmoid", "select_on": "logit"}, False, K),
    "sigmoid_sum": ("SigmoidRenorm", SIGMOID_SUM, False, K),
    "minimax": ("MiniMax2", {**SIGMOID_SUM, "eps": 1e-20}, True, K),
    "scaled": ("DeepSeekV3", {**SIGMOID_SUM, "scale": 2.5}, True, K),
    "deepseek": ("DeepSeekV3", IN_GROUPS, True, K),
    "deepseek_unbiased": ("DeepSeekV3", IN_GROUPS, False, K),
    "scaled_softmax": ("", {"scale": 2.5}, False, K),
    "scaled_unbiased": ("", {**SIGMOID_SUM, "scale": 2.5}, False, K),
    "large_eps": ("", {**SIGMOID_SUM, "eps": 1e-6}, False, K),
    "biased_softmax": ("", {}, True, K),
    "bias_of_logits": ("", {**SIGMOID_SUM, "select_on": "logit"}, True, K),
    "filled_with_0": ("", {**IN_GROUPS, "group_fill": "zero"}, True, K),
    "worth_of_one": ("", {**IN_GROUPS, "group_reduce": "max"}, True, K),
    "softmax_in_groups": ("", {"n_group": 4, "topk_group": 2}, False, K),
    "softplus": ("", {"score": "sqrtsoftplus"}, False, K),
}


@pytest.mark.parametrize(("name", "options", "biased", "top_k"), CASES.values(), ids=CASES)
def test_a_call_has_its_method(
    name: str, options: dict[str, Any], biased: bool, top_k: int
) -> None:
    bias_E = torch.randn(E) if biased else None
    call = RouteCall(torch.randn(3, E), top_k, bias_E, **options)
    route.check(call)
    assert routing_method(call) == name
    assert Routing(correction_bias=biased, **options).method(top_k) == name


def test_every_method_has_a_case() -> None:
    assert {m.name for m in METHODS} == {name for name, *_ in CASES.values()} - {""}


def test_what_is_no_method() -> None:
    logits_TE = torch.randn(3, E)
    assert not routing_method(RouteCall(logits_TE, K, per_expert_scale_E=torch.ones(E)))
    assert not Routing(custom=lambda x, logits, k: route(logits, k)).method(K)
