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
    turns   stages of a turn of the loop along K, at whose end all products end
    """

    tokens: int
    stages: int
    blocks: int = 1
    turns: int = 1
