"""Routers under `optimize` against their own code in float32: few groups, ties, sums of zero."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops.hf.optimize import OptimizedRouter
from moe_ops.hf.rules import RULES
from moe_ops.interop.subclass import former_class
from tests.hf import families
from tests.hf.overrides import EXPERTS as E

# Of each rule one family.
ONE_EACH = (
    "afmoe", "aria", "axk2", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v4",
    "ernie4_5_moe", "flint", "gemma4", "gpt_oss", "granitemoe", "hunyuan_v1_moe", "hy_v3",
    "inkling2", "jamba", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "minimax_m2",
    "minimax_m3_vl", "mistral4", "mistral_large4", "mixtral", "muse_spark",
    "openai_privacy_filter", "qwen3_moe", "qwen3_5_moe",
)  # fmt: skip
QUICK = ("axk2", "deepseek_v2", "deepseek_v3", "minimax_m2", "mistral4", "qwen3_moe")
NOT_RULED = {"inkling", "phimoe", "zaya"}  # `route` cannot express them

# (groups, groups kept, experts chosen); the last four choose more than the kept groups have.
GROUPS = ((1, 1, 3), (2, 1, 4), (4, 2, 3), (4, 3, 6), (4, 1, 3), (4, 2, 5), (2, 1, 8), (4, 3, 7))
BIASES = (torch.zeros(E), torch.full((E,), -2.0), torch.arange(E) % 5 / 4 - 0.5)


def marks(family: str) -> list[pytest.MarkDecorator]:
    if family in QUICK:
        return []
    return [pytest.mark.slow] if family in ONE_EACH else [pytest.mark.slow, pytest.mark.every]


def router_of(model: nn.Module) -> Any:
    found = [m for m in model.modules() if isinstance(m, OptimizedRouter)]
    if not found:  # older releases have other code for some families
        pytest.skip(f"no rule knows the router of this transformers' {type(model).__name__}")
    return found[0]


def logits_with_ties(n_group: int) -> Tensor:
    """Rows without ties, with some, of one value, with equal groups, and beyond float32's range."""
    distinct = torch.rand(8, E).argsort(-1) / 2 - 2.0
    tied = torch.randint(-2, 3, (12, E)).float()
    groups = torch.rand(4, E // n_group).argsort(-1).repeat(1, n_group) / 2
    far = torch.tensor([-200.0, 0.0, 200.0])[torch.randint(3, (6, E))]
    return torch.cat([distinct, tied, groups, far, torch.full((1, E), -200.0), torch.zeros(1, E)])


def configurations(router: Any) -> Iterator[dict[str, Any]]:
    """Attributes to give to the router, whatever its configuration was."""
    for n_group, topk_group, top_k in GROUPS if hasattr(router, "num_group") else GROUPS[:2]:
        grouped = {"num_group": n_group, "topk_group": topk_group}
        yield {"top_k": top_k, **grouped, "norm_topk_prob": top_k % 2 == 0}
    if hasattr(router, "topk_method"):
        yield {"top_k": 3, "num_group": 4, "topk_group": 1, "topk_method": "greedy"}
    if hasattr(router, "expert_selection_fn"):
        yield {"top_k": 3, "expert_selection_fn": "sigmoid", "norm_topk_prob": True}


def configure(router: Any, settings: dict[str, Any], bias_E: Tensor) -> Tensor:
    """Give a router settings, a bias, and weights that make known logits of the inputs returned."""
    for name, value in settings.items():
        if hasattr(router, name):
            setattr(router, name, value)
    if not hasattr(router, "top_k"):
        router.config.top_k_experts = settings["top_k"]
    weights = [p for name, p in router.named_parameters() if name.endswith("weight")]
    (weight_ED,) = (p for p in weights if p.shape[0] == E)
    logits_TE = logits_with_ties(settings.get("num_group", 1))[: weight_ED.shape[1]]
    weight_ED.zero_()[:, : len(logits_TE)] = logits_TE.T
    for name, tensor in router.state_dict().items():
        if name == "bias":
            tensor.zero_()
        elif name.endswith("correction_bias"):
            tensor.copy_(bias_E)
    return torch.eye(len(logits_TE), weight_ED.shape[1])


def chosen(forward: Any, router: Any, x_TD: Tensor, bias_E: Tensor) -> tuple[Tensor, Tensor]:
    """The ids that a router's forward chooses, in their order, and the weights [T, E]."""
    given = [bias_E] if RULES[router._moe_ops_rule].bias_argument else []
    x_TD = x_TD[None] if type(router).__name__.startswith("Afmoe") else x_TD
    first, weights_TK, last = forward(router, x_TD, *given)
    ids_TK = first if RULES[router._moe_ops_rule].logits_last else last
    weights_TE = torch.zeros(len(ids_TK), E).scatter(1, ids_TK, weights_TK)
    return ids_TK.sort(-1).values, weights_TE


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=marks(f)) for f in families.discover() if f not in NOT_RULED],
)
@torch.no_grad()
def test_a_router_chooses_and_weighs_as_its_own_code_does(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = moe_ops.optimize(families.build(family).model)
    router = router_of(model)
    caplog.set_level(logging.INFO, logger="moe_ops")
    for settings in configurations(router):
        for bias_E in BIASES:
            monkeypatch.setattr("moe_ops.hf.report._said", set())
            caplog.clear()
            x_TD = configure(router, settings, bias_E)
            want_ids, want_TE = chosen(former_class(router).forward, router, x_TD, bias_E)
            ids, weights_TE = chosen(type(router).forward, router, x_TD, bias_E)
            assert torch.equal(ids, want_ids), (settings, bias_E)
            torch.testing.assert_close(
                weights_TE, want_TE, rtol=2e-6, atol=1e-7, equal_nan=True,
                msg=lambda m, s=settings, b=bias_E: f"{s}, {b}: {m}",
            )  # fmt: skip
            kept = settings.get("topk_group", 1) * E // settings.get("num_group", 1)
            own = settings["top_k"] > kept and not hasattr(router, "topk_method")
            reason = f"keeps its own forward: top_k={settings['top_k']} exceeds the {kept} experts"
            kept_own = [m for m in caplog.messages if "keeps its own forward" in m]
            assert [reason in m for m in kept_own] == [True] * own, settings


@pytest.mark.slow
def test_every_rule_has_a_family_here() -> None:
    """But those of older versions of transformers, which this one does not have."""
    lacking = [f for f in ONE_EACH if f not in families.discover()]
    if lacking:
        pytest.skip(f"this transformers has no {', '.join(lacking)}")
    found = {router_of(moe_ops.optimize(families.build(f).model))._moe_ops_rule for f in ONE_EACH}
    assert len(found) == len(ONE_EACH)
    assert len(RULES.keys() - found) <= 2


def outputs(family: str, change: Callable[[Any], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """What a router and its own code give, for a model that was changed."""
    if family not in families.discover():
        pytest.skip(f"this transformers has no {family}")
    model = families.build(family).model
    change(model)
    router = router_of(moe_ops.optimize(model))
    weight = next(p for p in router.parameters() if p.shape[0] == E)
    x_TD = torch.randn(9, weight.shape[1]).to(model.dtype)
    with torch.no_grad():
        return list(router(x_TD)), list(former_class(router).forward(router, x_TD))


def set_on_routers(**settings: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        for router in model.modules():
            for name, value in settings.items():
                if hasattr(router, name):
                    setattr(router, name, value)

    return change


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("mixtral", lambda m: m.double(), "it computes in torch.float64"),
        ("deepseek_v3", lambda m: m.double(), "it computes in torch.float64"),
        ("jamba", lambda m: m.double(), "it computes in torch.float64"),
        ("mistral4", lambda m: m.bfloat16(), "it rounds its scores to torch.bfloat16"),
        (
            "cohere2_moe",
            lambda m: set_on_routers(expert_selection_fn="sigmoid")(m.bfloat16()),
            "it rounds its scores to torch.bfloat16",
        ),
        ("inkling2", set_on_routers(score_fn=nn.Softplus()), "its score function is Softplus"),
    ],
    ids=["float64", "float64_bias", "float64_input", "mistral4", "cohere2", "score"],
)
def test_what_route_cannot_express_runs_their_own_code(
    family: str,
    change: Callable[[Any], Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("moe_ops.hf.report._said", set())
    caplog.set_level(logging.INFO, logger="moe_ops")
    got, want = outputs(family, change)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))
    assert sum(f"keeps its own forward: {reason}" in m for m in caplog.messages) == 1


@pytest.mark.parametrize(
    ("family", "settings"),
    [("cohere2_moe", {"expert_selection_fn": "relu"}), ("deepseek_v2", {"topk_method": "none"})],
)
def test_settings_that_their_code_refuses_are_refused_as_there(
    family: str, settings: dict[str, str]
) -> None:
    model = families.build(family).model
    set_on_routers(**settings)(model)
    with pytest.raises((ValueError, UnboundLocalError)) as stock:
        model(torch.arange(9)[None])
    moe_ops.optimize(model)
    with pytest.raises(type(stock.value), match=re.escape(str(stock.value))), torch.no_grad():
        model(torch.arange(9)[None])


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_a_model_in_float64_runs_as_without_us(family: str) -> None:
    tiny = families.build(family, "eager")
    tiny.model.double()
    want = families.run(tiny, tiny.inputs)
    moe_ops.optimize(tiny.model)
    assert torch.equal(families.run(tiny, tiny.inputs), want)
    assert want.dtype == torch.float64
