"""How many tokens ranks have, and of what shape and dtypes: cases of the kernels over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Tokens:
    name: str
    counts: tuple[int, ...]  # of each rank
    rows: int
    D: int = 64
    K: int = 3
    P: int = 8
    dtype: torch.dtype = torch.bfloat16
    weights: torch.dtype = torch.float32
    ids: torch.dtype = torch.int32
