"""Steps attend by our function where it computes what the model's own does, and only there."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_ops.forward.kinds import Keeps, kinds_of
from moe_ops.generation import one_query, own_attention
from moe_ops.generation.one_query import NAME, in_place_of, one_query_attention
from moe_ops.generation.own_attention import (
    attention_modules,
    eager_refusal,
    refusal,
    step_attention,
)
from moe_ops.generation.refusals import shape_refusal
from tests.hf import families
from tests.hf.twins import twin_of, uncompiled

UNCOMPILED = uncompiled()
PLAIN = {"pad_token_id": 0, "eos_token_id": None}


def tokens_of(family: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, int]:
    """Of transformers and of steps, 20 after prompts longer than a window of 16 with padding on the
    left; and how often ours attended."""
    model = families.build(family).model
    twin = twin_of(model, UNCOMPILED)
    ids = torch.randint(16, 90, (3, 21))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    want = model.generate(ids, attention_mask=mask, max_new_tokens=20, **PLAIN)
    calls = []

    def counted(*args: Any) -> Tensor:
        calls.append(args)
        return attended(*args)

    attended = one_query.attended
    monkeypatch.setattr(one_query, "attended", counted)
    return want, twin.generate(ids, attention_mask=mask, max_new_tokens=20, **PLAIN), len(calls)


@pytest.mark.parametrize("family", ["gpt_oss", "mimo_v2_flash", "mixtral"])
def test_tokens_with_sinks_and_windows(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want, got, calls = tokens_of(family, monkeypatch)
    assert torch.equal(got, want)
    assert calls == 2 * 19  # layers, steps


@pytest.mark.slow
def test_every_family_with_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for family in families.discover():
        model = families.build(family).model
        if shape_refusal(model) or not any("sinks" in n for n, _ in model.named_parameters()):
            continue
        if any(kind.keeps is Keeps.STATES for kind in kinds_of(model.config)):
            continue  # an indexer chooses what they attend to
        found.add(family)
        with monkeypatch.context() as patch:
            want, got, calls = tokens_of(family, patch)
        assert torch.equal(got, want), family
        assert calls == 2 * 19, family
    assert found >= {"gpt_oss", "granitemoe_swa", "mimo_v2_flash"}


def test_an_attention_that_was_chosen_stays() -> None:
    model = families.build("qwen3_moe").model
    assert step_attention(model, "sdpa") == NAME
    assert step_attention(model, "eager") is None
    assert step_attention(model, "flex_attention") is None


def eager(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    if module.sinks is not None:
        sinks = module.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), weights


eager_attention_forward = eager


class Attention(nn.Module):
    """What a model's file has, as far as it is looked at."""

    def __init__(self, sinks: Tensor | None) -> None:
        super().__init__()
        self.sinks = sinks
        self.num_key_value_groups = 2

    def forward(self) -> Any:
        name = self.config._attn_implementation
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)


def capped(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    def cap(x: Tensor) -> Tensor:
        return 50 * torch.tanh(x / 50)

    return eager(module, cap(query), *args, **kwargs)


def without_sinks(module: Any, *args: Any, **kwargs: Any) -> Any:
    return eager(copy.copy(module).__class__(**{**vars(module), "sinks": None}), *args, **kwargs)


def with_a_window(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **kwargs: Any) -> Any:
    mask = mask.clone()
    mask[..., : -kwargs["sliding_window"]] = torch.finfo(mask.dtype).min
    return eager(module, q, k, v, mask, **kwargs)


def with_more(module: Any, *args: Any, **kwargs: Any) -> Any:
    return eager(module, *args, **{**kwargs, "scaling": module.temperature})


def use(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the function that the forward above names."""
    monkeypatch.setitem(globals(), "eager_attention_forward", function)


@pytest.mark.parametrize("function", [capped, without_sinks, with_a_window, with_more])
def test_another_formula_is_not_ours(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [Attention(torch.randn(6))]
    use(eager, monkeypatch)
    assert refusal(modules) is None and eager_refusal(modules) is None
    use(function, monkeypatch)
    assert "computes something else" in (eager_refusal(modules) or "")


def test_functions_that_cannot_be_told_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Attention):
        def forward(self) -> Any:
            return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)

    class Asks(Attention):
        def forward(self) -> Any:
            if self.config._attn_implementation == "sdpa":
                return None
            return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)

    use(eager, monkeypatch)
    own, sinks = Attention(None), torch.randn(6)
    assert eager_refusal([own]) is None  # like layers without sinks beside others with some
    for modules in ([Other(sinks)], [own, Other(sinks)]):
        assert "do not call it eager_attention_forward" in (eager_refusal(modules) or "")
    del own.sinks
    assert eager_refusal([own]) == "some of its layers know no sinks"
    assert "does more with its name than look it up" in (refusal([Asks(sinks)]) or "")


def test_a_refusal_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = families.build("gpt_oss").model
    monkeypatch.setattr(own_attention, "same_results", lambda eager, with_sinks: False)
    with caplog.at_level(logging.INFO, "moe_ops"):
        assert step_attention(model, "eager") is None
    (record,) = caplog.records
    assert "steps keep the model's attention (eager)" in record.getMessage()
    assert "modeling_gpt_oss.eager_attention_forward computes something else" in record.getMessage()


def test_a_forward_is_found_by_what_it_mentions() -> None:
    model = families.build("gpt_oss").model
    names = {type(m).__name__ for m in attention_modules(model)}
    assert names == {"GptOssAttention"}


MIN = torch.finfo(torch.float32).min
NEAR_MISSES: dict[str, dict[str, Any]] = {
    "two queries": {"query": torch.ones(2, 4, 2, 16)},
    "no mask": {"attention_mask": None},
    "a mask for each head": {"attention_mask": torch.zeros(2, 4, 1, 9)},
    "a mask of float64": {"attention_mask": torch.zeros(2, 1, 1, 9, dtype=torch.float64)},
    "a mask for fewer slots": {"attention_mask": torch.zeros(2, 1, 1, 1)},
    "dropout": {"dropout": 0.1},
    "a cap": {"softcap": 30.0},
    "a bias": {"position_bias": torch.zeros(2, 4, 1, 9)},
    "attentions": {"output_attentions": True},
    "something unheard of": {"temperature": 2.0},
}
OF_EAGER = {
    "a mask of bool": {"attention_mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)},
    "no scaling": {"scaling": None},
    "sinks of somewhere else": {"s_aux": torch.zeros(4)},
    "no sinks": {"s_aux": None},
}
OF_SDPA = {"sinks": {"s_aux": torch.zeros(4)}}
HARMLESS = {"sliding_window": 3, "position_ids": torch.zeros(2, 1), "softcap": None}


def call(function: Any, module: nn.Module, **but: Any) -> Any:
    noise = {"query": (2, 4, 1, 16), "key": (2, 2, 9, 16), "value": (2, 2, 9, 16)}
    given = {name: torch.randn(shape) for name, shape in noise.items()}
    return function(module, **{**given, "scaling": 0.5, "dropout": 0.0, **HARMLESS, **but})


@pytest.mark.parametrize("case", NEAR_MISSES | OF_EAGER)
def test_what_eager_gets_that_is_not_ours(case: str) -> None:
    module = Attention(torch.randn(4))
    got = []

    def stock(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> tuple[str, None]:
        got.append(kwargs)
        return "stock", None

    usual = {"attention_mask": torch.zeros(2, 1, 1, 9), "s_aux": module.sinks}
    ours = in_place_of(stock)
    assert call(ours, module, **usual)[0] != "stock"
    but = (NEAR_MISSES | OF_EAGER)[case]
    assert call(ours, module, **{**usual, **but})[0] == "stock"
    wanted = {"scaling": 0.5, "dropout": 0.0, "s_aux": module.sinks, **HARMLESS, **but}
    for name in wanted.keys() - {"query", "attention_mask"}:
        assert got[0][name] is wanted[name], name


@pytest.mark.parametrize("case", NEAR_MISSES | OF_SDPA)
def test_what_sdpa_gets_that_is_not_ours(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        one_query, "sdpa_attention_forward", lambda *args, **kwargs: ("stock", kwargs)
    )
    module = Attention(None)
    usual = {"attention_mask": torch.ones(2, 1, 1, 9, dtype=torch.bool)}
    assert call(one_query_attention, module, **usual)[0] != "stock"
    assert call(one_query_attention, module, **{**usual, **(NEAR_MISSES | OF_SDPA)[case]})[0] == (
        "stock"
    )


def test_hidden_slots_have_no_weight() -> None:
    """As under "eager", whose mask adds the least number of its type."""
    module = Attention(torch.randn(4))
    mask = torch.zeros(2, 1, 1, 9)
    mask[..., 4:] = MIN
    torch.manual_seed(1)
    want = call(eager, module, attention_mask=mask, s_aux=module.sinks)[0]
    torch.manual_seed(1)
    got = call(in_place_of(eager), module, attention_mask=mask, s_aux=module.sinks)[0]
    torch.testing.assert_close(got, want)


def test_gradients_come_from_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are kernels; where none is asked for it is the op."""
    monkeypatch.setattr(one_query, "has_kernels", lambda _: True)
    asked: list[Any] = []
    op = one_query.one_query
    monkeypatch.setattr(one_query, "one_query", lambda *given: (asked.append(given), op(*given))[1])
    q = torch.randn(1, 4, 1, 16, requires_grad=True)
    k, v = torch.randn(2, 1, 2, 20, 16)
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    out = one_query.attended(q, k, v, mask)
    out.square().sum().backward()
    assert q.grad is not None and bool(q.grad.abs().sum() > 0) and not asked
    with torch.no_grad():
        torch.testing.assert_close(one_query.attended(q, k, v, mask), out)
    assert len(asked) == 1
