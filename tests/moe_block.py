"""A part of a model on our ops, for tests that compile one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import moe_ops


class Block(nn.Module):
    """A router and its experts on our ops."""

    def __init__(self, D: int = 16, E: int = 4, I: int = 8) -> None:  # noqa: E741
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w13_EFD = nn.Parameter(torch.randn(E, 2 * I, D) / 4)
        self.w2_EDI = nn.Parameter(torch.randn(E, D, I) / 4)

    def forward(self, x_TD: Tensor) -> Tensor:
        logits_TE = self.gate(x_TD)
        return x_TD + moe_ops.moe(x_TD, logits_TE, self.w13_EFD, self.w2_EDI, 2, renormalize=True)
