"""The sizes of a launch of `grouped_registers.py`, free of Gluon."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ops.kernels.triton import Constant


@dataclass(frozen=True, eq=False)
class CodesTile(Constant):
    """A tile of codes, TILE of kernels.

    tokens  of a tile
    stages  of the ring of shared memory
    blocks  that share a processor: one, or two of few registers
    """

    tokens: int
    stages: int
    blocks: int = 1
