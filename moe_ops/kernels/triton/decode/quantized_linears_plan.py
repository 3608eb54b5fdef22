"""How the rows of weights in codes are shared out to programs, for few rows of input.

Steps are of 128 columns, as decoders want them. The number of programs follows `linears_plan.py`,
stages and warps the tiles of experts; other sizes were not tried on a GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from moe_ops.kernels.triton import STEP
from moe_ops.kernels.triton.launch import stages_within


class QuantizedLinearsPlan(NamedTuple):
    """A program has `rows` rows of weights and takes them `step` columns at a time."""

    rows: int
    step: int
    warps: int
    stages: int


@functools.cache
def plan_for(T: int, N: int, bits: int, processors: int, memory: int) -> QuantizedLinearsPlan:
    """The plan for T rows of input and N rows of weights in all, of so many bits a code, with so
    much shared memory for a program."""
    rows = 64 if N >= 64 * 8 * processors else 32 if N >= 32 * 4 * processors else 16
    columns = max(16, triton.next_power_of_2(T))
    if columns == 64 and rows == 32:
        rows = 64  # which spills nothing where 32 do
    stage = STEP * (rows * bits // 8 + 2 * columns)
    return QuantizedLinearsPlan(rows, STEP, 2 if rows == 16 else 4, stages_within(memory, stage, 4))
