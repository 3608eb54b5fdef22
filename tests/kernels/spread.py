"""How many tokens ranks have, and of what shape and dtypes: cases of the kernels over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.kernels.triton.ranks import Rows


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
    scales: int = 0  # of a token
    scale: torch.dtype = torch.float32

    def sent(self, T: int) -> Rows:
        """So many tokens, some of whose ids are of no expert."""
        x_TD = torch.randn(T, self.D).to(self.dtype)
        scale_TS = (torch.rand(T, self.scales) * 99).to(self.scale)
        weights_TK = torch.rand(T, self.K).to(self.weights)
        ids_TK = torch.randint(-1, self.P + 2, (T, self.K)).to(self.ids)
        return Rows(x_TD, scale_TS, weights_TK, ids_TK)


def raw(t: Tensor) -> Tensor:
    """The bytes of a tensor, of which torch compares any."""
    return t.contiguous().view(torch.uint8) if t.numel() else t.float()
