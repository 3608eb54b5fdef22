"""Loads of layers that activation checkpointing runs again: each token counts once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ops import MoELayer

TOKENS, TOP_K = 6, 2


def layers() -> tuple[MoELayer, MoELayer]:
    first, second = (
        MoELayer(hidden_size=16, intermediate_size=8, num_experts=4, top_k=TOP_K, balanced=True)
        for _ in range(2)
    )
    return first, second


def through(both: tuple[MoELayer, MoELayer], logits: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: both[1](both[0](x, logits), logits)


WAYS = {
    "plain": lambda run, x: run(x),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "not_reentrant": partial(checkpoint, use_reentrant=False),
    "all_of_it_again": partial(checkpoint, use_reentrant=False, early_stop=False),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_tokens_count_once(way: Callable[..., Tensor]) -> None:
    both, logits = layers(), torch.randn(TOKENS, 4)
    want = logits.topk(TOP_K)[1].flatten().bincount(minlength=4)
    x = torch.randn(TOKENS, 16, requires_grad=True)
    for steps in (1, 2):
        way(through(both, logits), x).sum().backward()
        for layer in both:
            assert layer.loads is not None and layer.physical_loads is not None
            assert torch.equal(layer.loads, want * steps)
            assert torch.equal(layer.physical_loads, want * steps)
