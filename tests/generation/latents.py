"""Expansions of latents, and weights that are not plain, as tests of steps need them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def wrapped(linear: nn.Linear) -> nn.Module:
    """As an adapter does it."""
    module = nn.Sequential(linear)
    module.weight = linear.weight
    return module


def expand(module: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    sizes = [module.qk_nope_head_dim, module.v_head_dim]
    B, _, S, _ = latents.shape
    made = module.kv_b_proj(latents).view(B, S, -1, sum(sizes)).transpose(1, 2)
    keys, values = made.split(sizes, -1)
    return torch.cat([keys, rotated.expand(-1, keys.shape[1], -1, -1)], -1), values
