"""The cache that `generate` hands out is what transformers' own would be, and the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from moe_ops.forward.layer_cache import CACHE
from tests.chosen import in_turn
from tests.hf import families
from tests.hf.twins import PLAIN, twin_of

DICT = {**PLAIN, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("qwen3_moe").model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(16, 90, (3, 7))


def of_layer(layer: Any) -> dict[str, Any]:
    """All that a layer of a cache knows, its tensors included."""
    known = {"class": type(layer)}
    if hasattr(layer, "get_seq_length"):
        known["length"] = int(layer.get_seq_length())
    for name, value in vars(layer).items():
        several = value if isinstance(value, dict) else {"": value}
        known |= {f"{name}{number}": x for number, x in several.items()}
    return known


def check_alike(got: Any, want: Any) -> None:
    assert type(got) is type(want) and len(got.layers) == len(want.layers)
    assert (got.offloading, got.is_compileable) == (want.offloading, want.is_compileable)
    for ours, theirs in zip(got.layers, want.layers, strict=True):
        knows, known = of_layer(ours), of_layer(theirs)
        assert knows.keys() == known.keys()
        for name, value in known.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(knows[name], value, msg=lambda m, n=name: f"{n}: {m}")
            else:
                assert knows[name] == value, name


NAMED = {
    "none": ({}, DynamicCache),
    "dynamic": ({"cache_implementation": "dynamic"}, DynamicCache),
    "static": ({"cache_implementation": "static"}, StaticCache),
    "a longer static one": ({"cache_implementation": "static", "max_cache_len": 50}, StaticCache),
    "static, of beams": ({"cache_implementation": "static", "num_beams": 2}, StaticCache),
    "hybrid": ({"cache_implementation": "hybrid"}, Cache),  # whatever transformers makes of it
    "one token": ({"cache_implementation": "static", "max_new_tokens": 1}, StaticCache),
}


@pytest.mark.parametrize("named", NAMED)
def test_it_has_the_class_that_the_caller_named(model: Any, ids: Tensor, named: str) -> None:
    twin, (kwargs, kind) = twin_of(model), NAMED[named]
    want, got = (m.generate(ids, **{**DICT, **kwargs}) for m in (model, twin))
    assert torch.equal(got.sequences, want.sequences)
    assert isinstance(got[CACHE], kind)
    check_alike(got[CACHE], want[CACHE])
    assert named == "hybrid" or not twin._moe_ops_generation.told


def test_a_name_in_the_models_own_settings_counts(ids: Tensor) -> None:
    model = families.build("qwen3_moe").model
    model.generation_config.cache_implementation = "static"
    twin = twin_of(model)
    want, got = (m.generate(ids, **DICT) for m in (model, twin))
    check_alike(got[CACHE], want[CACHE])
    assert type(got[CACHE]) is StaticCache and not twin._moe_ops_generation.told


def test_a_later_static_cache_is_as_long_as_the_longest_before(model: Any, ids: Tensor) -> None:
    twins = [twin_of(model) for _ in range(2)]
    for tokens in (9, 3, 12):
        want = model.generate(
            ids, cache_implementation="static", **{**DICT, "max_new_tokens": tokens}
        )
        outs = [
            twin.generate(ids, cache_implementation="static", **{**DICT, "max_new_tokens": tokens})
            for twin in twins
        ]
        for out in outs:
            check_alike(out[CACHE], want[CACHE])


# The window is 16: the text ends within it, on its border, passes it, starts on it and past it.
@in_turn(
    pytest.mark.parametrize(
        "prompt, tokens", [(5, 4), (5, 12), (5, 13), (9, 20), (15, 2), (16, 4), (21, 1), (21, 6)]
    ),
    pytest.mark.parametrize("named", ["dynamic", "static"]),
)
def test_windows_hold_what_transformers_own_do(named: str, prompt: int, tokens: int) -> None:
    model, ids = families.build("gpt_oss").model, torch.randint(16, 90, (2, prompt))
    kwargs = {**DICT, "max_new_tokens": tokens, "cache_implementation": named}
    want, got = (m.generate(ids, **kwargs) for m in (model, twin_of(model)))
    assert model.config.sliding_window == 16
    check_alike(got[CACHE], want[CACHE])


@in_turn(
    pytest.mark.parametrize("kwargs", [{"cache_implementation": "dynamic"}, {"max_cache_len": 40}]),
    pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode]),
)
def test_the_caller_goes_on_with_it_and_nobody_writes_into_it(
    model: Any, ids: Tensor, kwargs: dict[str, Any], mode: Any
) -> None:
    """Also in another mode than the one in which it was made."""
    kwargs = {"cache_implementation": "static", **DICT, **kwargs}
    twin = twin_of(model)
    with mode():
        want, got = (m.generate(ids, **kwargs) for m in (model, twin))
        held = [t.clone() for layer in got[CACHE].layers for t in (layer.keys, layer.values)]
        twin.generate(ids + 1, **kwargs)
        twin.generate(ids.flip(1), **PLAIN)
    now = [t for layer in got[CACHE].layers for t in (layer.keys, layer.values)]
    assert all(map(torch.equal, now, held)) and not any(t.is_inference() for t in now)
    with mode():
        on = {**PLAIN, "max_new_tokens": 6}
        theirs = model.generate(want.sequences, **{CACHE: want[CACHE]}, **on)
    with torch.no_grad():
        assert torch.equal(twin.generate(got.sequences, **{CACHE: got[CACHE]}, **on), theirs)


@pytest.mark.parametrize("named", ["offloaded", "offloaded_static"])
def test_what_is_not_served_is_transformers_own_with_a_reason(
    model: Any, ids: Tensor, named: str
) -> None:
    twin = twin_of(model)
    caches: dict[Any, Any] = {}
    for m in (model, twin):
        try:
            caches[m] = m.generate(ids, cache_implementation=named, **DICT)[CACHE]
        except Exception as error:  # streams of a GPU, of which there may be none
            caches[m] = type(error)
    if isinstance(caches[model], type):
        assert caches[twin] is caches[model]
    else:
        check_alike(caches[twin], caches[model])
    assert twin._moe_ops_generation.told == {f"cache_implementation is {named}"}
