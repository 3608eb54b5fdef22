"""The sizes of a launch of `grouped_float8_tokens.py`, free of Gluon."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ops.kernels.triton import Constant

# Columns of a stage, and the places that each token has for the scales of those that share one, of
# which there are two or eight: TMA copies whole 16 bytes, from multiples of 16 on.
COLUMNS, SCALES = 256, 8


@dataclass(frozen=True, eq=False)
class Float8Tile(Constant):
    """Tokens of a tile, stages of the ring of shared memory, the blocks that share a processor
    (one, or two of few registers), and whether scales that are powers of two become part of codes
    where they are near each other."""

    tokens: int
    stages: int
    blocks: int = 1
    fold: bool = False
