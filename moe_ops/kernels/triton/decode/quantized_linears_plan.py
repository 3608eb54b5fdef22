"""How the rows of weights in codes are shared out to programs, for few rows of input.

Of what was tried on an H200 the fastest, or within 3 % of it: layers of Qwen3-30B's attention at
1, 8 and 32 rows, in float8 by row and int4 in groups of 128, among the other launches of a layer,
and its head at one row. Other sizes follow these.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton

from moe_ops.kernels.triton import STEP, Weight
from moe_ops.kernels.triton.decode.linears_plan import power_below
from moe_ops.kernels.triton.experts.products.grouped_tile import (
    ROWS,
    STORED,
    CodesTile,
    codes_tile,
)
from moe_ops.kernels.triton.experts.products.register_stream import Stream
from moe_ops.kernels.triton.launch import stages_within

LEAST_STEPS = 4  # of a part of the columns


class QuantizedLinearsPlan(NamedTuple):
    """A program has `rows` rows of weights and takes them `step` columns at a time."""

    rows: int
    step: int
    warps: int
    stages: int


class QuantizedRowPlan(NamedTuple):
    """A program has `rows` rows of weights and takes them `step` columns at a time, for one row of
    input."""

    rows: int
    step: int
    warps: int

    def together(self, weight: Weight) -> int:
        """The columns of a row whose products a thread sums: 16 bytes of codes, which it loads at
        once, or those that share a scale if these are fewer."""
        each = min(128 // weight.bits, self.step)
        return each if weight.across == -1 else min(each, weight.across)


@functools.cache
def row_plan_for(N: int, K: int, processors: int) -> QuantizedRowPlan:
    """The plan for one row of input and N rows of weights in all, of K columns: three or more
    programs a processor, each with up to 128 bytes for each thread on their way. Of steps it is
    that which leaves least of the last one empty."""
    step = min((2048, 1024), key=lambda step: triton.cdiv(K, step) * step)
    rows = power_below(min(8, max(1, N // (3 * processors))))
    return QuantizedRowPlan(rows, min(step, triton.next_power_of_2(K)), 4)


@functools.cache
def stream_plan_for(T: int, K: int, across: int) -> Stream:
    """The plan for T rows of input and weights of K columns, in groups of `across`, whose codes
    stream through registers: warps share columns until each has four steps, which it asks for at
    once. Many scales and the tokens of more than 16 rows take registers from these."""
    NT = triton.next_power_of_2(triton.cdiv(T, 8))
    S = power_below(max(1, min(8, triton.cdiv(K, STEP) // 4)))
    ahead = 1 if NT > 2 and S == 8 else 3 if across == 16 else 4
    return Stream(S=S, C=S, NT=NT, ahead=ahead)


@functools.cache
def row_stream_plan_for(K: int) -> Stream:
    """The plan for one row of input and weights of K columns, codes of 8 bits, through the matrix
    units: warps share columns until each has two steps, which it asks for at once."""
    steps = triton.cdiv(K, STEP)
    S = power_below(max(1, min(16, steps // 2)))
    return Stream(S=S, C=S, ahead=min(triton.cdiv(steps, S), 4))


@functools.cache
def plan_for(T: int, N: int, bits: int, processors: int, memory: int) -> QuantizedLinearsPlan:
    """The plan for T rows of input and N rows of weights in all, of so many bits a code, with so
    much shared memory for a program."""
    columns = max(16, triton.next_power_of_2(T))
    # From how many rows of weights a processor on tiles have 64, and 32.
    of_64, of_32 = (512, 32) if columns == 16 else (32, 16)
    rows = 64 if of_64 * processors <= N else 32 if of_32 * processors <= N else 16
    if columns == 64 and rows == 32:
        rows = 64  # which spills nothing where 32 do
    stage = STEP * (rows * bits // 8 + 2 * columns)
    return QuantizedLinearsPlan(rows, STEP, 2 if rows == 16 else 4, stages_within(memory, stage, 4))


class TiledPlan(NamedTuple):
    """A program has ROWS rows of weights, a tile of the input's rows and one of so many parts of
    the columns."""

    tile: CodesTile
    parts: int

    @staticmethod
    def of(tokens: int, parts: int, weight: Weight, blocks: int = 1) -> TiledPlan:
        """Tiles of so many rows of input, with as many stages as fit; parts are stored in
        float32."""
        stored = STORED if parts == 1 else 2 * STORED
        return TiledPlan(codes_tile(CodesTile(tokens, 0, blocks), weight, stored), parts)


@functools.cache
def tiled_plan_for(
    T: int, K: int, sizes: tuple[int, ...], weight: Weight, processors: int
) -> TiledPlan:
    """The plan for T rows of input and weights of so many rows: two tiles of the input, of 64 to
    256 rows, and as many parts as processors have no other program, of LEAST_STEPS or more."""
    tokens = min(256, max(64, triton.next_power_of_2(T) // 2))
    steps = triton.cdiv(K, 64 if weight.bits == 8 else STEP)
    programs = sum(triton.cdiv(n, ROWS) for n in sizes) * triton.cdiv(T, tokens)
    parts = 1
    while 2 * parts * programs <= processors and steps % (2 * parts * LEAST_STEPS) == 0:
        parts *= 2
    # Of float4 the registers of two blocks on a processor would spill.
    pairs = tokens == 64 and weight.element != "float4_e2m1"
    return TiledPlan.of(tokens, parts, weight, blocks=2 if pairs else 1)
