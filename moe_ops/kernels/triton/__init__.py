"""Triton device code, from router logits to the sum of expert outputs.

This file is free of Triton, which its modules import.
"""

from typing import NamedTuple

# What `tiny` can run: every program compares all pairs of token and choice with each other, and
# all tokens are the columns of one tile.
TINY_PAIRS, TINY_TOKENS = 64, 16

WORD = 8  # codes of four bits in the words that kernels load
STEP = 128  # columns of codes that are multiplied at once
LARGE = 2**23  # elements of W2, from which on an expert is large
# The format of a weight: element, rows and columns of a group (-1: all), kind of scale, whether
# inputs have 8 bits, and the bits of a code.
Weight = tuple[str, int, int, str, bool, int]


class Inputs(NamedTuple):
    """A format of inputs that are emulated: rounded to its codes, which stay floats of 16 bits.

    Values have `mantissa` bits behind the first one, those below 2**`lowest` as many fewer, up to
    `largest`, below 2**(`top` + 1). Scales are "e8m0" or "float8_e4m3fn" ones of `group` columns,
    or "row" or "tensor": float32 ones.
    """

    lowest: int
    mantissa: int
    largest: float
    top: int
    has_nan: bool
    scale: str
    group: int


def one_a_step(weight: Weight) -> bool:
    """Whether a row has one scale for all columns of a step, which its sum can be scaled by."""
    return weight[2] in (-1, STEP)


def multiplies_codes(weight: Weight, widths: tuple[int, int]) -> bool:
    """Whether many rows an expert are multiplied with codes as they are stored, inputs having 16
    bits (`grouped_codes.py`, on Hopper), for a model and experts of these widths: in groups of at
    least the columns that a thread loads at once, or of nvfp4 half as many, in widths of which
    copies take 32 rows (of eight bits 16) and 16 bytes, and with so many steps that in one tile the
    next one is found. Codes of float8_e5m2 have no decoder there."""
    element, _, group, _, quantises, bits = weight
    if quantises or element == "float8_e5m2":
        return False
    each, least = (16, 3 * STEP // 2) if bits == 8 else (32, 2 * STEP)
    wide = all(width % each == 0 and width > least for width in widths)
    return wide and (group == -1 or group >= (16 if element == "float4_e2m1" else each))
