"""A cache of keys and values as one decoder layer sees it, so that all layers run one code.

A layer gets a small view in place of the whole cache: of tensors that are inputs and outputs of its
code. The cache itself is changed behind the last layer, by its own methods, so that a forward that
fails leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

# What models call the cache, as an argument and in outputs; "cache" from transformers 5.24 on.
CACHE = next(
    field.name
    for field in fields(CausalLMOutputWithPast)
    if field.name in ("cache", "past_key_values")
)
Put = Callable[[], None]  # puts what a layer left in its view into the cache


class Unviewable(AttributeError):
    """A layer that cannot run on a view of its cache; the message says why."""


class View:
    """What a layer gets for a cache. Of a cache's methods there are few; `update` is to be called
    once."""

    def __getattr__(self, name: str) -> Any:
        raise Unviewable(f"a layer asks its cache for {name}")


class Incoming(View):
    """What a layer gets for an empty cache: it attends to the call's own tokens alone, and leaves
    their keys and values here."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.keys is not None:
            raise Unviewable("a layer updates its cache twice")
        self.keys, self.values = keys, values
        return keys, values

    def get_seq_length(self, layer_idx: Any = 0) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def twice(self) -> Incoming:
        """What a layer gets for two sequences in place of one."""
        return Incoming()


class Filled(View):
    """What a layer gets for a cache with tokens in it: it attends to these, too. Left here are the
    keys and values of all tokens, and those of the call's own."""

    def __init__(self, past_keys: Tensor, past_values: Tensor) -> None:
        # Tensors of one kind and layout, so that they have one graph.
        self.past = _plain(past_keys), _plain(past_values)
        self.all: tuple[Tensor, Tensor] | None = None
        self.new: tuple[Tensor, Tensor] | None = None
        for past in self.past:  # [B, heads, past tokens, head size]
            maybe_mark_dynamic(past, 0)
            maybe_mark_dynamic(past, 2)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.new is not None:
            raise Unviewable("a layer updates its cache twice")
        self.new = keys, values
        self.all = torch.cat([self.past[0], keys], -2), torch.cat([self.past[1], values], -2)
        return self.all

    def get_seq_length(self, layer_idx: Any = 0) -> int:
        keys, _ = self.past if self.all is None else self.all
        return keys.shape[-2]

    def twice(self) -> Filled:
        """What a layer gets for two sequences in place of one."""
        keys, values = (past.repeat_interleave(2, 0) for past in self.past)
        return Filled(keys, values)


def _plain(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.is_inference() else x.contiguous()


class LikeEmpty(Cache):
    """A cache that is to a model like an empty dynamic one, whatever its layers hold."""

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


# Of the forward that runs in this context: what is to be done after its last layer.
_waiting: ContextVar[list[Put] | None] = ContextVar("waiting", default=None)


@contextmanager
def kept_until_the_end() -> Iterator[None]:
    """A context around a forward: caches of transformers change when it ends, unless it fails."""
    waiting: list[Put] = []
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    for put in waiting:
        put()


def later(put: Put) -> None:
    """Do this when the forward ends."""
    waiting = _waiting.get()
    assert waiting is not None, "layers run within `kept_until_the_end`"
    waiting.append(put)


def layer_of(cache: Cache, index: int) -> Any:
    """The layer of a cache with this number, None if it has not grown so far."""
    return cache.layers[index] if index < len(cache.layers) else None


def put_later(
    cache: Cache, index: int, view: Incoming, own: Callable[[Tensor], Tensor] = lambda x: x
) -> None:
    """Put what the layer of this number left into an empty cache, when the forward ends. `own` is
    done to its keys and values, should the cache keep them as they are."""
    later(lambda: _put_first(cache, index, view, own))


def _put_first(cache: Cache, index: int, view: Incoming, own: Callable[[Tensor], Tensor]) -> None:
    if view.keys is None or view.values is None:
        return  # a layer that keeps nothing
    layer = layer_of(cache, index)
    if type(layer) is DynamicLayer:  # its own `update` would copy them behind those it has not
        layer.lazy_initialization(view.keys, view.values)
        layer.keys, layer.values = own(view.keys), own(view.values)
    else:
        cache.update(view.keys, view.values, index)


def alone(x: Tensor) -> Tensor:
    """A tensor that keeps no memory alive but its own."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def put_more(cache: Cache, index: int, view: Filled) -> None:
    """Put what the layer of this number added into a cache with tokens in it."""
    if view.all is None or view.new is None:
        return
    layer = layer_of(cache, index)
    if type(layer) is DynamicLayer:
        layer.keys, layer.values = view.all
    else:
        cache.update(*view.new, index)
