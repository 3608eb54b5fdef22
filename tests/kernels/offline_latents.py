"""Calls that between them launch every plan of attention over latents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.kernels.triton.decode import latents


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sequences, heads, slots, how many are chosen, widths of latents and of rotated keys."""

    B: int
    H: int
    S: int = 4096
    chosen: int = 0
    R: int = 512
    D: int = 64
    added: bool = False  # the mask, and sinks
    shared: int = 1  # queries of one sequence; B counts all
    dtype: torch.dtype = torch.bfloat16


SIZES = (
    Sizes(B=1, H=128), Sizes(B=32, H=128), Sizes(B=32, H=20), Sizes(B=1, H=20, S=8192),
    Sizes(B=8, H=16), Sizes(B=1, H=64, added=True), Sizes(B=8, H=16, added=True),
    Sizes(B=1, H=128, chosen=2048), Sizes(B=32, H=64, chosen=2048, added=True),
    Sizes(B=1, H=32, chosen=2048), Sizes(B=1, H=16, chosen=2048), Sizes(B=8, H=32, R=256),
    Sizes(B=1, H=128, S=256), Sizes(B=1, H=128, S=1024), Sizes(B=32, H=128, S=131072),
    Sizes(B=8, H=64, D=0), Sizes(B=1, H=16, dtype=torch.float16), Sizes(B=8, H=32, R=128, D=16),
    Sizes(B=8, H=64, R=64), Sizes(B=8, H=16, R=64, chosen=2048), Sizes(B=1, H=20, D=128),
    Sizes(B=2, H=128, dtype=torch.float32),
    Sizes(B=8, H=128, shared=8), Sizes(B=8, H=64, chosen=2048, shared=8),
)  # fmt: skip


def calls_over_latents(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for sizes in SIZES:
        yield str(sizes), functools.partial(attended, sizes)


def attended(sizes: Sizes) -> None:
    def empty(*shape: int, dtype: torch.dtype = sizes.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    B, H, S, R, D = sizes.B, sizes.H, sizes.S, sizes.R, sizes.D
    q_BHR, q_rope_BHD = empty(H, B, R).transpose(0, 1), empty(B, H, 2 * D)[..., D:]
    caches = empty(B // sizes.shared, S, R), empty(B // sizes.shared, S, D)
    mask_BS = empty(B, S, dtype=sizes.dtype if sizes.added else torch.bool)
    indices_BC = empty(B, sizes.chosen, dtype=torch.int64) if sizes.chosen else None
    sinks_H = empty(H) if sizes.added else None
    latents.attend(q_BHR, q_rope_BHD, *caches, mask_BS, 0.1, sinks_H, indices_BC)
