"""Views of a cache: what a layer sees of it, and when it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from moe_ops.forward import caches
from moe_ops.forward.caches import keys_refusal, own_refusal, seen_by
from moe_ops.forward.layer_cache import Filled, Incoming, Unviewable, kept_until_the_end
from tests.hf import families

WINDOW = 4


def states(tokens: int, seed: int = 0, B: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, 3, tokens, 5, generator=generator) for _ in range(2))  # type: ignore


def growing() -> DynamicCache:
    return DynamicCache()


def of_two_kinds() -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW)]
    return cache


@pytest.mark.parametrize("make", [growing, of_two_kinds])
def test_a_cache_becomes_what_its_own_update_makes_it(make: Any) -> None:
    got, want = make(), make()
    for step, tokens in enumerate((6, 1, 3, 1)):
        seen: list[Any] = []
        with kept_until_the_end():
            for index in range(2):
                view, put = seen_by(got, index)
                seen.append(view.update(*states(tokens, 10 * step + index), index))
                put()
            if step == 0:
                assert got.get_seq_length() == 0  # until the end
        for index in range(2):
            theirs = want.update(*states(tokens, 10 * step + index), index)
            for a, b in zip(seen[index], theirs, strict=True):
                assert torch.equal(a, b)
            for name in ("keys", "values"):
                a, b = (getattr(cache.layers[index], name) for cache in (got, want))
                assert torch.equal(a, b)
        assert got.get_seq_length() == want.get_seq_length()
    with kept_until_the_end():
        views = [seen_by(got, index)[0] for index in range(2)]
    assert [type(view) for view in views] == [Filled, Filled]


def test_a_forward_that_fails_changes_no_cache() -> None:
    cache = growing()
    for length in (0, 6):
        with pytest.raises(KeyError), kept_until_the_end():
            view, put = seen_by(cache, 0)
            view.update(*states(3))
            put()
            raise KeyError
        assert cache.get_seq_length() == length
        if length == 0:
            cache.update(*states(6), 0)


def test_a_layer_that_keeps_nothing_leaves_nothing() -> None:
    cache = growing()
    with kept_until_the_end():
        _, put = seen_by(cache, 0)
        put()
    assert cache.get_seq_length() == 0
    cache.update(*states(6), 0)
    keys = cache.layers[0].keys
    with kept_until_the_end():
        _, put = seen_by(cache, 0)
        put()
    assert cache.layers[0].keys is keys


def test_what_a_cache_keeps_keeps_no_other_memory() -> None:
    cache, (keys, values) = growing(), states(6)
    both = torch.cat([keys, values], 1)
    with kept_until_the_end():
        view, put = seen_by(cache, 0)
        view.update(both[:, :3], both[:, 3:])
        put()
    layer = cache.layers[0]
    for kept, want in ((layer.keys, keys), (layer.values, values)):
        assert torch.equal(kept, want)
        assert kept.untyped_storage().nbytes() == want.nbytes


def test_tensors_of_inference_mode_are_seen_as_others() -> None:
    with torch.inference_mode():
        cache = growing()
        cache.update(*states(6), 0)
    view, _ = seen_by(cache, 0)
    assert not any(past.is_inference() for past in view.past)
    assert all(past.is_contiguous() for past in view.past)


def test_views_of_two_sequences() -> None:
    assert type(Incoming().twice()) is Incoming
    keys, values = states(4, B=1)
    twice = Filled(keys, values).twice()
    assert twice.past[0].shape == (2, 3, 4, 5) and torch.equal(twice.past[1][1], values[0])


@pytest.mark.parametrize("view", [Incoming(), Filled(*states(2))])
def test_a_view_has_one_update_and_no_more(view: Any) -> None:
    with pytest.raises(Unviewable, match="a layer asks its cache for get_max_length"):
        view.get_max_length()
    assert not hasattr(view, "layers")  # as of any object
    before = view.get_seq_length()
    view.update(*states(2))
    assert view.get_seq_length() == before + 2
    with pytest.raises(Unviewable, match="a layer updates its cache twice"):
        view.update(*states(2))


class Own(DynamicCache):
    pass


def offloaded() -> DynamicCache:
    cache = DynamicCache()
    cache.offloading = True
    return cache


def recording() -> DynamicCache:
    cache = of_two_kinds()
    cache.layers[1].record_past = True
    return cache


class MoreOnes(DynamicLayer):
    def update_more(self) -> None: ...


class OtherUpdates(DynamicLayer):
    def update(self, *args: Any, **kwargs: Any) -> Any: ...


def of(layer: DynamicLayer) -> DynamicCache:
    cache = DynamicCache()
    cache.layers.append(layer)
    return cache


def test_refusals() -> None:
    config = families.build("qwen3_moe").model.config
    assert caches.refusal(None) is None
    for cache in (growing(), of_two_kinds(), DynamicCache(config=config)):
        assert caches.refusal(cache) is None
    for cache, reason in (
        (StaticCache(config=config, max_cache_len=8), "the cache is a StaticCache"),
        (Own(), "the cache is a Own"),
        (offloaded(), "the cache is offloaded"),
        (recording(), "the cache keeps tokens beyond its windows"),
        (of(MoreOnes()), "a layer keeps what MoreOnes.update_more takes"),
        (of(OtherUpdates()), "a layer has caches of OtherUpdates, whose update is its own"),
    ):
        assert caches.refusal(cache) == reason
    assert own_refusal(config) is None and keys_refusal(config) is None
    with_states = families.build("qwen3_next").model.config
    assert own_refusal(with_states) is None
    assert "its cache has layers of LinearAttention" in str(keys_refusal(with_states))


@pytest.mark.parametrize("make", [Own, lambda: of(OtherUpdates())])
def test_a_cache_that_is_refused_has_no_views(make: Any) -> None:
    with pytest.raises(Unviewable, match=r"the cache|its own"):
        seen_by(make(), 0)
