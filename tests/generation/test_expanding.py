"""Which modules' latents steps leave as they are: what is read in their source, and tried."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_ops.generation.expanding import expands, refusal, refusal_of_forward
from moe_ops.generation.own_attention import attention_modules, latent_attention
from tests.generation.latents import expand, wrapped
from tests.hf import families


def attention_of(model: nn.Module) -> Any:
    return attention_modules(model)[0]


def hooked(linear: nn.Linear) -> nn.Module:
    linear.register_forward_hook(lambda module, args, out: out * 2)
    return linear


def in_codes(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)
    return linear


def biased(linear: nn.Linear) -> nn.Module:
    linear.bias = nn.Parameter(torch.ones(len(linear.weight)))
    return linear


def narrower(linear: nn.Linear) -> nn.Module:
    return nn.Linear(linear.in_features, linear.out_features - 1, bias=False)


LINEARS: dict[str, tuple[Callable[[nn.Linear], nn.Module], str]] = {
    "an adapter": (wrapped, "its kv_b_proj is no plain linear layer, but Sequential"),
    "a hook": (hooked, "its kv_b_proj has hooks"),
    "codes": (in_codes, "its kv_b_proj is torch.int8, or has a bias"),
    "a bias": (biased, "its kv_b_proj is torch.float32, or has a bias"),
    "another size": (narrower, "its kv_b_proj is ["),
}


@pytest.mark.parametrize("case", LINEARS)
def test_a_weight_that_is_not_plain_expands_as_before(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, said = LINEARS[case]
    model = families.build("deepseek_v3").model
    assert refusal(attention_of(model)) is None
    for module in attention_modules(model):
        module.kv_b_proj = change(module.kv_b_proj)
    with caplog.at_level(logging.INFO, "moe_ops"):
        assert latent_attention(model, "sdpa") == {}
    (record,) = caplog.records  # for all layers
    start = "generate: steps expand all latents in DeepseekV3Attention: "
    assert record.getMessage().startswith(start + said)


def scaled(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = expand(module, latents, rotated)
    return keys, values * 2


def rotated_first(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = expand(module, latents, rotated)
    return keys.roll(module.qk_rope_head_dim, -1), values


def of_more(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return expand(module, module.norm(latents), rotated)


def test_another_expansion_is_not_ours() -> None:
    assert expands(expand)
    assert not any(map(expands, (scaled, rotated_first, of_more)))


class Forwards:
    """What a model's file has, as far as it is looked at."""

    def good(self, x: Any, mask: Any, cache: Any) -> Any:
        latents, rotated = cache.update(x, x, 0)
        keys, values = self.expand_kv(latents, rotated)
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, keys, values, mask[..., : keys.shape[2]])

    def chosen(self, x: Any, mask: Any, cache: Any) -> Any:
        latents, rotated = cache.update(x, x, 0)
        keys, values = self.expand_kv(latents, rotated)
        indices = None
        if self.config._attn_implementation in ("eager", "sdpa"):
            mask = mask & x
        else:
            indices = x
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, keys, values, mask, indices=indices)

    def cached_expanded(self, x: Any, mask: Any, cache: Any) -> Any:
        keys, values = self.expand_kv(x, x)
        keys, values = cache.update(keys, values, 0)
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, keys, values, mask)

    def normed(self, x: Any, mask: Any, cache: Any) -> Any:
        latents, rotated = cache.update(x, x, 0)
        keys, values = self.expand_kv(latents, rotated)
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, self.norm(keys), values, mask)

    def twice(self, x: Any, mask: Any, cache: Any) -> Any:
        latents, rotated = cache.update(x, x, 0)
        keys, _ = self.expand_kv(latents, rotated)
        _, values = self.expand_kv(latents, rotated)
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, keys, values, mask)

    def asks(self, x: Any, mask: Any, cache: Any) -> Any:
        latents, rotated = cache.update(x, x, 0)
        keys, values = self.expand_kv(latents, rotated)
        if self.config._attn_implementation == "sdpa":
            mask = mask & x
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, keys, values, mask)

    def keeps_what_it_chose(self, x: Any, mask: Any, cache: Any) -> Any:
        latents, rotated = cache.update(x, x, 0)
        keys, values = self.expand_kv(latents, rotated)
        if self.config._attn_implementation in ("eager", "sdpa"):
            mask = mask & x
        name = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, keys, values, mask)

    def of_another_config(self, x: Any, mask: Any, cache: Any) -> Any:
        latents, rotated = cache.update(x, x, 0)
        keys, values = self.expand_kv(latents, rotated)
        name = self.text._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, None)
        return attention(self, x, keys, values, mask)


FORWARDS = {
    "good": None,
    "chosen": None,
    "cached_expanded": "its forward caches what was expanded",
    "normed": "its forward does more with keys than to call its attention",
    "twice": "its forward does not call expand_kv once, for keys and values",
    "asks": "its forward does more with the name of its attention than look it up",
    "keeps_what_it_chose": "its forward does not tell its attention which slots it chose",
    "of_another_config": "its forward does not look its attention up in self.config",
}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_a_forward_may_do_with_its_latents(name: str) -> None:
    assert refusal_of_forward(getattr(Forwards, name)) == FORWARDS[name]


def test_a_forward_without_a_source_is_not_ours() -> None:
    space: dict[str, Any] = {}
    exec("def forward(self): return self.expand_kv()", space)
    assert refusal_of_forward(space["forward"]) == "its forward has no source to look at"
