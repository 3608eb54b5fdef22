"""Which caches of transformers layers can run on views of, and which views these are."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moe_ops.forward.kept import Arriving, Continuing, add_tokens, kept_of, put_states
from moe_ops.forward.kinds import DYNAMIC, refusal_of
from moe_ops.forward.layer_cache import (
    Filled,
    Incoming,
    Put,
    Unviewable,
    alone,
    later,
    layer_of,
    put_later,
    put_more,
)

KEYS = {DynamicLayer, DynamicSlidingWindowLayer}  # parts of keys and values alone


def seen_by(cache: Any, index: int) -> tuple[Any, Put]:
    """What the layer of this number gets for a cache, and what is to be done after it ran. Caches
    of ours say so themselves, by a method of this name. Raises Unviewable for those of transformers
    that `refusal` refuses: a model may make another than `own_refusal` looks at."""
    own = getattr(cache, "seen_by", None)
    if own is not None:
        return own(index)
    layer = layer_of(cache, index)
    if type(cache) is not DynamicCache or type(layer) not in KEYS:
        reason = refusal(cache)
        if reason is not None:
            raise Unviewable(reason)
    if layer is not None and type(layer) not in KEYS:
        return _of_more(layer)
    if layer is None or not layer.is_initialized:
        incoming = Incoming()
        return incoming, lambda: put_later(cache, index, incoming, alone)
    filled = Filled(layer.keys, layer.values)
    return filled, lambda: later(lambda: put_more(cache, index, filled))


def _of_more(layer: Any) -> tuple[Any, Put]:
    """A view of a part that keeps more than keys and values, or nothing."""
    past = kept_of(layer)
    view = Continuing(past) if past else Arriving()

    def put() -> None:
        kept = view.new if isinstance(view, Continuing) else view.kept
        put_states(layer, kept)
        add_tokens(layer, kept)

    return view, lambda: later(put)


def refusal(cache: Any) -> str | None:
    """Why layers cannot run on views of a cache, or None."""
    if cache is None:
        return None
    if type(cache) is not DynamicCache:
        return f"the cache is a {type(cache).__name__}"
    if getattr(cache, "offloading", False):
        return "the cache is offloaded"
    for kind in sorted(_kinds(cache) - KEYS, key=lambda kind: kind.__name__):
        reason = refusal_of(kind, DYNAMIC)
        if reason is not None:
            return f"a layer {reason}"
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        return "the cache keeps tokens beyond its windows"
    return None


def own_refusal(config: Any) -> str | None:
    """Why layers cannot run on views of the cache that a model of this configuration makes for
    itself, or None."""
    return refusal(DynamicCache(config=config))


def keys_refusal(config: Any) -> str | None:
    """Why a model of this configuration does not keep keys and values alone, or None."""
    cache = DynamicCache(config=config)
    others = sorted(kind.__name__ for kind in _kinds(cache) - KEYS)
    return f"its cache has layers of {', '.join(others)}" if others else refusal(cache)


def _kinds(cache: DynamicCache) -> set[type]:
    kinds = {type(layer) for layer in cache.layers}
    growing = getattr(cache, "layer_class_to_replicate", None)
    return kinds if growing is None else kinds | {growing}
