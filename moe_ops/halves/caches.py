"""A transformers cache of keys and values as halves of its sequences see it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

OF_TRANSFORMERS = "transformers.cache_utils"
SPLIT = ("DynamicLayer", "DynamicSlidingWindowLayer")  # layers that are split


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers, which need not be installed."""
    return any(
        c.__module__ == OF_TRANSFORMERS and c.__name__ == "Cache" for c in type(value).__mro__
    )


class CacheHalves:
    """Views of a cache for both halves, and what they leave, which `put` puts into the cache."""

    def __init__(self, name: str, cache: Any, first: int) -> None:
        others = [type(layer).__name__ for layer in cache.layers if not _is_split(layer)]
        if others or type(cache).__name__ != "DynamicCache":
            raise ValueError(
                f"{name} is a {type(cache).__name__}"
                + (f" with a {others[0]}" if others else "")
                + f", and halves take a DynamicCache of {' and '.join(SPLIT)}; call the block "
                "itself, or give such a cache"
            )
        self._cache = cache
        self.views = _View(cache, slice(0, first)), _View(cache, slice(first, None))

    def left_by_second(self) -> Iterator[Tensor]:
        """The keys and values of the second half."""
        for pair in self.views[1].new.values():
            yield from pair

    def put(self) -> None:
        """Update the cache with the keys and values of both halves."""
        first, second = (view.new for view in self.views)
        for index, pair in first.items():
            both = (pair, second[index]) if index in second else (pair,)
            keys, values = (torch.cat(t) for t in zip(*both, strict=True))
            self._cache.update(keys, values, index)


def _is_split(layer: Any) -> bool:
    return type(layer).__name__ in SPLIT and not getattr(layer, "record_past", False)


class _View:
    """What a block gets for a cache: of its methods those that a layer asks."""

    def __init__(self, cache: Any, rows: slice) -> None:
        self._cache, self._rows = cache, rows
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self.new:
            raise ValueError("the block updates its cache twice; call it without two_halves")
        self.new[layer_idx] = keys, values
        layers = self._cache.layers
        layer = layers[layer_idx] if layer_idx < len(layers) else None
        if layer is None or not layer.is_initialized or not layer.keys.numel():
            return keys, values
        past = (layer.keys[self._rows], layer.values[self._rows])
        return torch.cat((past[0], keys), -2), torch.cat((past[1], values), -2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        length: int = self._cache.get_seq_length(layer_idx)
        return length

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a block in halves asks its cache for {name}, which half a cache has not; call it "
            "without two_halves"
        )
