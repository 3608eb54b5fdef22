"""Indexers that choose blocks of keys: compiled code sees whole blocks alone.

transformers fills up the scores of the last block if that is not whole. By this branch prompts of
whole blocks would have code of their own. Keys of 0 fill the last block up whether it is whole or
not; as they stand behind all tokens, none sees them.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import pad

from moe_ops.forward.kept import Every
from moe_ops.generation.linear_samples import Noise
from moe_ops.interop.interrupts import let_through

METHOD = "build_block_mask"  # by which such a class is known


class WholeBlocks:
    """A layer's cache, or None, as its indexer gets it: keys that it adds come back, behind those
    there were, filled up with 0 to whole blocks of this size."""

    def __init__(self, cache: Any, size: int) -> None:
        self._cache = cache
        self._size = size

    @property
    def layers(self) -> Every:
        return Every(self)

    def update_index(self, keys: Tensor) -> Tensor:
        if self._cache is not None:
            keys = self._cache.layers[0].update_index(keys)
        tokens, size = keys.shape[2], self._size
        return pad(keys, (0, 0, 0, (tokens + size - 1) // size * size - tokens))


@functools.cache
def fills_blocks(kind: Any) -> bool:
    """Whether a class chooses the same of whole blocks as of what there is, on a few numbers."""
    D, heads, size, noise = 8, 2, 4, Noise()
    q_DD, k_DD = noise(D, heads * D), noise(D, D)
    module = SimpleNamespace(
        head_dim=D, num_heads=heads, block_size=size, topk_blocks=3, local_blocks=1, layer_idx=0,
        q_proj=lambda x: x @ q_DD, k_proj=lambda x: x @ k_DD, q_norm=lambda x: x,
        k_norm=lambda x: x,
    )  # fmt: skip
    with torch.no_grad(), unset_fake_temporarily():
        for tokens in (3, 21, 24):
            positions = torch.arange(tokens).expand(2, -1)
            given = noise(2, tokens, D), (noise(2, tokens, D), noise(2, tokens, D))
            try:
                got, want = (
                    kind.forward(module, *given, cache, positions)
                    for cache in (WholeBlocks(None, size), None)
                )
            except Exception as error:  # whatever somebody's method misses or raises
                let_through(error)
                return False
            if not isinstance(want, Tensor) or not torch.equal(got, want):
                return False
    return True
