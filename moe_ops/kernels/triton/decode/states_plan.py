"""How states are shared out to programs, of layers that keep one for each head."""

from __future__ import annotations

from moe_ops.kernels.triton.decode.one_query_plan import power_of_two

MOST_WIDTH = 256  # of what a program holds whole: a column of a state [D, V], a row of one [V, D]
TILE = 4096  # numbers of a state that a program of a step holds
WARPS = 4
CHANNELS = 128  # of a convolution that a program of a step holds
SCAN_TILE = 1024  # and one that goes through a prompt
SCAN_WARPS = 1


def part_of(width: int, others: int, tile: int = TILE) -> int:
    """How many columns (or rows) of this width a program of a step holds, of so many."""
    return min(power_of_two(others), max(8, tile // power_of_two(width)))


def part_of_scan(width: int, others: int) -> int:
    """How many columns (or rows) of this width a program takes through a prompt."""
    return part_of(width, others, SCAN_TILE)
