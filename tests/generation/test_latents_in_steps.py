"""Steps attend over latents as they are where a model would expand them, and only there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import moe_ops
from moe_ops import compiler
from moe_ops.forward.layer_cache import CACHE
from moe_ops.forward.regions import layer_lists
from moe_ops.generation import latents
from moe_ops.generation.expanding import METHOD, refusal
from moe_ops.generation.own_attention import (
    attention_modules,
    latent_attention,
    layers_of_steps,
)
from tests.chosen import in_turn
from tests.generation.latents import expand, wrapped
from tests.hf import families
from tests.hf.twins import PLAIN, check, twin_of, uncompiled
from tests.recompiling import Traced

SERVED = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "axk1"]
CALLS = {"greedy": {}, "sampled": {"do_sample": True, "top_k": 9}, "beams": {"num_beams": 2}}


def with_latents() -> list[str]:
    """The families of the installed transformers that have latents."""
    models = Path(transformers.__file__).parent / "models"
    return [
        family
        for family in families.discover()
        if any(f"def {METHOD}" in f.read_text() for f in (models / family).glob("modeling_*.py"))
    ]


@pytest.fixture
def over_latents(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What steps got of attention over latents since, None for a call that was not its."""
    made: list[Tensor | None] = []

    def absorbed(*args: Any) -> Tensor | None:
        made.append(of(*args))
        return made[-1]

    of = latents.absorbed
    monkeypatch.setattr(latents, "absorbed", absorbed)
    return made


@in_turn(
    pytest.mark.parametrize(
        "family",
        [pytest.param(f, marks=[] if f == "deepseek_v3" else pytest.mark.slow) for f in SERVED],
    ),
    pytest.mark.parametrize("call", CALLS),
)
def test_tokens_are_those_of_transformers(
    family: str, call: str, over_latents: list[Tensor | None]
) -> None:
    model = families.build(family).model
    twin = twin_of(model, uncompiled())
    ids = torch.randint(16, 90, (3, 21))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    check(model, twin, ids, attention_mask=mask, max_new_tokens=20, **CALLS[call])
    check(model, twin, ids[:1], max_new_tokens=20, **CALLS[call])
    assert len(over_latents) == 2 * 2 * 19  # calls, layers, steps
    assert all(out is not None for out in over_latents)


def test_a_captured_step_has_latents_too(over_latents: list[Tensor | None]) -> None:
    model = families.build("deepseek_v3").model
    check(model, twin_of(model), torch.randint(16, 90, (2, 7)))
    assert over_latents and all(out is not None for out in over_latents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("deepseek_v3", "eager"),
        *(pytest.param(family, "inductor", marks=pytest.mark.every) for family in SERVED),
    ],
)
def test_a_compiled_step_calls_the_op(
    family: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a layer, and expands nothing; as Dynamo reads it, and compiled."""
    if backend == "eager":
        monkeypatch.setattr(compiler, "Net", Traced)
    torch._dynamo.reset()
    model = families.build(family).model
    twin = moe_ops.compile(model)
    ids = torch.randint(16, 90, (2, 7))
    check(model, twin, ids)
    with torch.profiler.profile() as profiled:
        twin.generate(ids, **PLAIN)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls["moe_ops::one_query_latents"] == 2 * 8  # layers, steps


def test_caches_handed_out_are_those_of_transformers() -> None:
    model = families.build("deepseek_v3").model
    call: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": None}
    call |= {"return_dict_in_generate": True}
    ids = torch.randint(16, 90, (2, 7))
    want, got = (m.generate(ids, **call)[CACHE] for m in (model, twin_of(model)))
    for theirs, ours in zip(want.layers, got.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)


def one_more(model: nn.Module, cache: DynamicCache, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits of one more token, after a prompt that a cache holds."""
    with torch.no_grad():
        more = {"attention_mask": mask, "use_cache": True, CACHE: copy.deepcopy(cache)}
        return model(input_ids=ids[:, -1:], position_ids=mask.cumsum(1)[:, -1:] - 1, **more).logits


def swapped(model: Any) -> int:
    """Put the layers of its steps into a model; returns how many there were."""
    (path,) = layer_lists(model)
    found = layers_of_steps(model, model.config.get_text_config(decoder=True)._attn_implementation)
    layers = model.get_submodule(path)
    for i, layer in enumerate(layers):
        layers[i] = found.get(layer, layer)
    return len(found)


@pytest.mark.slow
@pytest.mark.parametrize("family", with_latents())
def test_a_step_of_every_family_that_has_latents(
    family: str, over_latents: list[Tensor | None]
) -> None:
    """Also of those whose `generate` is not by steps: with sinks, gates, and slots chosen by an
    indexer."""
    model = families.build(family).model
    if len(layer_lists(model)) != 1:
        pytest.skip("has several lists of layers, and so no steps")
    names = {type(m).__name__ for m in model.modules() if hasattr(m, METHOD)}
    ids = torch.randint(16, 90, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    before = ids[:, :-1], mask[:, :-1]
    with torch.no_grad():
        cache = model(input_ids=before[0], attention_mask=before[1], use_cache=True)[CACHE]
    want = one_more(model, cache, ids, mask)
    twin = copy.deepcopy(model)
    if not swapped(twin):
        assert refusals_of(model), "has layers of steps"
        pytest.skip("; ".join(refusals_of(model)))
    torch.testing.assert_close(one_more(twin, cache, ids, mask), want, rtol=1e-4, atol=1e-5)
    assert over_latents and all(out is not None for out in over_latents), names


def refusals_of(model: nn.Module) -> list[str]:
    modules = {type(m): m for m in attention_modules(model) if hasattr(m, METHOD)}
    return [reason for m in modules.values() if (reason := refusal(m)) is not None]


def test_an_adapter_gives_the_tokens_of_transformers(over_latents: list[Tensor | None]) -> None:
    model = families.build("deepseek_v3").model
    for module in attention_modules(model):
        module.kv_b_proj = wrapped(module.kv_b_proj)
    check(model, twin_of(model), torch.randint(16, 90, (2, 7)))
    assert not over_latents


def test_an_attention_that_was_chosen_stays() -> None:
    model = families.build("deepseek_v3").model
    assert latent_attention(model, "eager") == {}
    assert latent_attention(model, "flex_attention") == {}
    assert len(latent_attention(model, "sdpa")) == 2


class Attention(nn.Module):
    """What an attention function reads of a module."""

    qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank = 6, 4, 5, 8
    num_key_value_groups, expand_kv = 1, expand

    def __init__(self, sinks: Tensor | None) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(8, 4 * 11, bias=False)
        self.sinks = sinks


class AttentionOverLatents(latents.OverLatents, Attention):
    pass


def hides(slots: int = 9) -> Tensor:
    return (torch.arange(slots) < 7).expand(2, 1, 1, slots)


def call_of(**but: Any) -> dict[str, Any]:
    shapes = {"query": (2, 4, 1, 10), "latents": (2, 1, 9, 8), "rotated": (2, 1, 9, 4)}
    given: dict[str, Any] = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {**given, "attention_mask": hides(), "scaling": 0.5, "dropout": 0.0, **but}


CHOSEN = torch.tensor([[[0, 3, 8]], [[5, 2, 1]]])
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "positions and a window": {"position_ids": torch.zeros(2, 1), "sliding_window": 3},
    "chosen": {"indices": CHOSEN},
    "none chosen": {"indices": None},
}
NOT_OURS: dict[str, dict[str, Any]] = {
    "two queries": {"query": torch.randn(2, 4, 2, 10), "attention_mask": hides()},
    "two queries of chosen slots": {
        "query": torch.randn(2, 4, 2, 10),
        "indices": CHOSEN.expand(-1, 2, -1),
    },
    "no mask": {"attention_mask": None},
    "no mask, and chosen slots": {"attention_mask": None, "indices": CHOSEN},
    "an added mask": {"attention_mask": torch.randn(2, 1, 1, 9)},
    "an added mask and chosen slots": {
        "attention_mask": torch.randn(2, 1, 1, 9),
        "indices": CHOSEN,
    },
    "no scaling": {"scaling": None},
}


@pytest.mark.parametrize("case", OURS | NOT_OURS)
def test_the_attention_function(case: str, over_latents: list[Tensor | None]) -> None:
    module = AttentionOverLatents(None)
    call = call_of(**(OURS | NOT_OURS)[case])
    with torch.no_grad():
        attend = ALL_ATTENTION_FUNCTIONS[latents.register(None)]
        got, _ = attend(module, **call)
        keys, values = expand(module, call["latents"], call["rotated"])
        mask, indices = call["attention_mask"], call.get("indices")
        if indices is not None:
            slots = torch.arange(9)
            seen = (indices[..., None] == slots).any(2)[:, None]
            added = mask if mask is not None and mask.dtype != torch.bool else torch.zeros(())
            shown = seen if mask is None or mask.dtype != torch.bool else seen & mask
            mask = added.masked_fill(~shown, torch.finfo(torch.float32).min)
        want = torch.nn.functional.scaled_dot_product_attention(
            call["query"], keys, values, mask, scale=call["scaling"]
        )
    torch.testing.assert_close(got, want.transpose(1, 2))
    assert bool(over_latents) == (case in OURS)


@pytest.mark.parametrize("sinks", [True, False])
def test_an_eager_attention_with_sinks(sinks: bool, over_latents: list[Tensor | None]) -> None:
    """Which adds its mask."""
    module = AttentionOverLatents(torch.randn(4))
    attend = latents.over_latents(eager, adds=True)
    mask = torch.zeros(2, 1, 1, 9).masked_fill(~hides(), torch.finfo(torch.float32).min)
    call = call_of(attention_mask=mask, s_aux=module.sinks if sinks else torch.zeros(4))
    with torch.no_grad():
        got, _ = attend(module, **call)
        keys, values = expand(module, call.pop("latents"), call.pop("rotated"))
        want, _ = eager(module, call.pop("query"), keys, values, **call)
    torch.testing.assert_close(got, want)
    assert bool(over_latents) == sinks  # those of somewhere else are not read


def eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor,
    scaling: float, s_aux: Tensor, dropout: float = 0.0,
) -> tuple[Tensor, None]:  # fmt: skip
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    sink = s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return (weights @ value).transpose(1, 2), None


def test_gradients_come_from_keys_and_values(over_latents: list[Tensor | None]) -> None:
    module = AttentionOverLatents(None)
    call = call_of()
    call["latents"].requires_grad_()
    attend = ALL_ATTENTION_FUNCTIONS[latents.register(None)]
    attend(module, **call)[0].square().sum().backward()
    assert call["latents"].grad.any() and over_latents == [None]
