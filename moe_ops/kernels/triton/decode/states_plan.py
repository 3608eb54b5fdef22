"""How states are shared out to programs, in a step of layers that keep one for each head."""

from __future__ import annotations

from moe_ops.kernels.triton.decode.one_query_plan import power_of_two

MOST_WIDTH = 256  # of what a program holds whole: a column of a state [D, V], a row of one [V, D]
TILE = 4096  # numbers of a state that a program holds
WARPS = 4


def part_of(width: int, others: int) -> int:
    """How many columns (or rows) of this width a program holds, of so many."""
    return min(power_of_two(others), max(8, TILE // power_of_two(width)))
