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
    rows    of W, 128 or, of four or eight bits, 256; each consumer has half of every 128
    turns   stages of a turn of the loop along K, at whose end all products end
    """

    tokens: int
    stages: int
    blocks: int = 1
    rows: int = 128
    turns: int = 1
