"""Layers of ranks whose group changes: their sizes, what they are told, and their ranks."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig

SIZES: dict[str, Any] = {
    "num_experts": 10, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
    "dtype": torch.float32,
}  # fmt: skip
OWN, PARTS, SUMS = "own", "replicated", "reduced"


def options_of(kind: str, group: str) -> dict[str, Any]:
    """What a layer is told of tokens and groups."""
    if kind == OWN:
        return {"tokens": "own", "group": group, "max_num_tokens": 16}
    return {"tokens": "replicated", "reduce_results": group or None if kind == SUMS else None}


def config_of(kind: str, ranks: int, rank: int) -> ParallelConfig:
    name = "dp" if kind == OWN else "tp"
    return ParallelConfig.of(**{name: ranks, f"{name}_rank": rank}, expert_parallel=True)


def made(options: dict[str, Any], rank: int, ranks: int, group: str, kind: str = OWN) -> MoELayer:
    layer = MoELayer(
        **{**SIZES, **options}, parallel=config_of(kind, ranks, rank), **options_of(kind, group)
    )
    return layer


def emptied(layer: MoELayer) -> MoELayer:
    """What joins means nothing."""
    for t in (*layer.parameters(), *layer.buffers()):
        if t.is_floating_point() and t.dtype.itemsize > 1:
            t.fill_(float("nan"))
    return layer
