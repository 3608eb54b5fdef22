"""How the rows of weights are shared out to programs, for linear layers of few rows of input.

The constants are from sweeps on an H200, over projections of three models and 1 to 32 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import triton


class LinearsPlan(NamedTuple):
    """A program has `rows` rows of weights and takes them `step` columns at a time."""

    rows: int
    step: int
    warps: int
    stages: int


def plan_for(T: int, N: int, K: int, processors: int, memory: int) -> LinearsPlan:
    """The plan for T rows of input and N rows of weights in all, of two bytes a number, with so
    much shared memory for a program."""
    if T == 1:
        # Four or more programs a processor, each with two tiles of 8 KiB in flight.
        rows = power_below(min(16, max(1, N // (3 * processors))))
        if rows == 4 and K >= 4096:
            rows = 2  # of 4096 columns two tiles are all
        step = min(4096 // rows, 2048, triton.next_power_of_2(K))
        return LinearsPlan(rows, step, 4, 1)
    columns = max(16, triton.next_power_of_2(T))
    many = 8 * processors <= N
    rows = 64 if many else 16
    step = max(16, min(128 if many else 256, triton.next_power_of_2(K)))
    most = memory // (2 * step * (rows + columns))
    return LinearsPlan(rows, step, 4, min(6 if many else 4, most))


def power_below(n: int) -> int:
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)
