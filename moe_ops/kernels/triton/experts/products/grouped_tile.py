"""The sizes of a launch of `grouped_registers.py`, free of Gluon."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from moe_ops.kernels.triton import STEP, Constant, Weight
from moe_ops.kernels.triton.launch import stages_within

ROWS = 128  # of W, of such a tile
MOST_STAGES = 16
BLOCK_MEMORY = 227 * 1024  # bytes of shared memory of a block that has a processor of Hopper
OF_A_PAIR = 113 * 1024  # of each of two
STORED = 9 * 1024  # bytes of it through which outputs move


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


@functools.cache
def codes_tile(tile: CodesTile, weight: Weight, stored: int = STORED) -> CodesTile:
    """The tile with as many stages as fit; codes of six bits do not lie in shared memory."""
    bits = weight.bits
    columns = 64 if bits == 8 else STEP
    stage = columns * (2 * tile.tokens + (0 if bits == 6 else ROWS * bits // 8))
    memory = (BLOCK_MEMORY if tile.blocks == 1 else OF_A_PAIR) - stored
    return replace(tile, stages=stages_within(memory, stage, MOST_STAGES))
