"""Tiles: other ones for either product, and none for rows that fill no tile."""

from __future__ import annotations

from typing import Any

import torch

from humming.layer import LayerConfig


def get_heuristics_config(
    layer_config: LayerConfig, shape_m: int, gemm_type: str, device: torch.device
) -> dict[str, Any]:
    assert gemm_type == "indexed" and layer_config.shape_n % 128 == 0
    return {"block_shape": (8 if layer_config.shape_k % 256 else 16, 128, 64)}
