"""Values for samples, and equal values that are laid out or numbered otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def with_holes(ids_TK: Tensor, num_experts: int) -> Tensor:
    """The ids with some pairs sent nowhere: -1, the first id too large, and one far beyond."""
    ids = ids_TK.clone().reshape(-1)
    ids[::4], ids[1::5], ids[3::7] = -1, num_experts, 2**31 - 1
    return ids.reshape(ids_TK.shape)


def half_map(num_experts: int) -> Tensor:
    """A map to every second expert: local id e // 2 for an even e, -1 for the others."""
    ids = torch.arange(num_experts)
    return torch.where(ids % 2 == 0, ids // 2, -1).to(torch.int32)


def strided(t: Tensor) -> Tensor:
    """Equal values, with a stride other than 1 on the last axis."""
    return torch.stack((t, t), -1).flatten(-2)[..., ::2]


def padded(t: Tensor) -> Tensor:
    """Equal values in rows that are longer than they look, from an odd address on."""
    return torch.nn.functional.pad(t, (1, 2))[..., 1:-2]


def distinct_logits(T: int, E: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random logits whose rows hold no two equal values, in any float dtype."""
    steps = torch.rand(T, E).argsort(-1) - (E - 1) / 2
    return ((steps + (torch.rand(T, E) - 0.5) / 2) * (4 / E)).to(dtype)
