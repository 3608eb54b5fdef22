"""Indexers that choose pools of tokens: compiled code keeps all pools there may be.

transformers drops those that are whole in no sequence, of which there are as many as the values of
a mask say. A compiler ends a graph there, and no graph that waits for a number can be captured. Of
pools that are not whole, none is chosen, so that they may as well stay.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from moe_ops.generation.linear_samples import Noise
from moe_ops.interop.interrupts import let_through

METHOD = "get_pooled_states"


def all_pools(self: Any, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys of all pools [B, P, D], the tokens in each [B, P, size], -1 for none, and whether it
    is whole [B, P]. Packed [B, S, 2 D + 1] are keys, what weighs them in a pool, and whether there
    is a token. A sequence's pools begin with its first token. There are two at least."""
    D, size = self.head_dim, self.index_kpool
    keys_BSD, gates_BSD, seen_BS1 = packed_states.split([D, D, 1], -1)
    seen_BS = seen_BS1[..., 0].bool()
    B, S = seen_BS.shape
    # One would be a size of 1, which a compiler tells from all others: prompts as short as a pool
    # would have code of their own.
    P = torch.sym_max((S + size - 1) // size, 2)
    offsets = torch.arange(P * size, device=seen_BS.device).view(P, size)
    first_B = torch.where(seen_BS.any(-1), seen_BS.long().argmax(-1), S)
    tokens = first_B[:, None, None] + offsets
    at = torch.arange(B, device=seen_BS.device)[:, None, None], tokens.clamp(max=S - 1)
    there = seen_BS[at] & (tokens < S)
    logits = gates_BSD[at].float() + self.index_kpool_compress_ape.float()
    weights = logits.masked_fill(~there[..., None], float("-inf")).softmax(2).nan_to_num()
    keys = (weights.to(keys_BSD.dtype) * keys_BSD[at]).sum(2)
    return keys, tokens.masked_fill(~there, -1), there.all(-1)


@functools.cache
def drops_pools(kind: Any) -> bool:
    """Whether a class's pools are ours, less those that are whole in no sequence, on a few
    numbers."""
    D, size, noise = 8, 4, Noise()
    module = SimpleNamespace(head_dim=D, index_kpool=size, index_kpool_compress_ape=noise(size, D))
    packed = noise(3, 21, 2 * D + 1)
    packed[..., -1] = 1
    packed[0, :9, -1] = packed[1, :2, -1] = packed[:2, 19:, -1] = 0
    packed[2, 14:, -1] = 0
    with torch.no_grad(), unset_fake_temporarily():
        *_, whole = want = all_pools(module, packed)
        try:
            got = getattr(kind, METHOD)(module, packed)
        except Exception as error:  # whatever somebody's method misses or raises
            let_through(error)
            return False
        kept = whole.any(0)
        return len(got) == 3 and all(
            a.shape == b[:, kept].shape and torch.allclose(a, b[:, kept], 1e-4, 1e-4)
            for a, b in zip(got, want, strict=True)
        )
