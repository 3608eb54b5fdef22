"""How the slots of a cache are shared out to programs, for attention of one query.

The constants are the best of a sweep on an H200: caches of 256 to 4096 slots, 4 to 256 pairs of
a sequence and a head of the cache, heads of 64 and 128.
"""

from __future__ import annotations

from typing import NamedTuple

UNSPLIT_SLOTS = 256  # up to here one launch: a program asks for all slots of a head at once
LEAST_SPAN = 64  # slots of a program, where several share a head
MOST_SPAN = 4096  # a program looks at the mask of all its slots at once
MOST_SPLITS = 64  # the merge holds what all programs of a head found
MOST_SLOTS = MOST_SPLITS * MOST_SPAN
MOST_HELD = 8192  # float32 numbers of an output, or of a merge, that 4 warps hold
MOST_PROGRAMS = 4  # a processor has at a time, where slots are split
MOST_TILE_SLOTS = 64
MOST_TILE_BYTES = 32 * 1024  # of keys and values
STAGES = 3
INVARIANT_SPAN = 512  # slots of a program of an invariant call
MERGED = 16  # programs whose sums the merge of such a call adds at once


class AttentionPlan(NamedTuple):
    """`splits` programs for a head of the cache, each with `span` slots in tiles of `tile`."""

    splits: int
    span: int
    tile: int
    warps: int
    stages: int


def plan_for(pairs: int, slots: int, row_bytes: int, held: int, processors: int) -> AttentionPlan:
    """The plan for so many pairs of a sequence and a head of the cache, with `row_bytes` of keys
    and values a slot and outputs of `held` numbers each."""
    splits = -(-slots // MOST_SPAN)
    # With a program for every processor the merge costs more than a split brings.
    if slots > UNSPLIT_SLOTS and 2 * pairs <= processors:
        most = min(MOST_PROGRAMS * processors // pairs, MOST_SPLITS)
        splits = max(splits, min(most, slots // LEAST_SPAN))
    span = -(-slots // splits)
    fitting = power_of_two(MOST_TILE_BYTES // row_bytes + 1) // 2
    tile = max(16, min(power_of_two(span), MOST_TILE_SLOTS, fitting))
    tiles = -(-span // tile)
    warps = 8 if tile * row_bytes > MOST_TILE_BYTES or held > MOST_HELD else 4
    return AttentionPlan(
        -(-slots // (tiles * tile)), tiles * tile, tile, warps, min(STAGES, tiles + 1)
    )


def invariant_plan_for(slots: int, row_bytes: int, held: int) -> AttentionPlan:
    """The plan of an invariant call: programs have as many slots whatever the number of sequences
    and of slots, and are two or more, so that a merge follows; not measured."""
    fitting = power_of_two(MOST_TILE_BYTES // row_bytes + 1) // 2
    tile = max(16, min(MOST_TILE_SLOTS, fitting))
    warps = 8 if tile * row_bytes > MOST_TILE_BYTES or held > MOST_HELD else 4
    return AttentionPlan(max(2, -(-slots // INVARIANT_SPAN)), INVARIANT_SPAN, tile, warps, STAGES)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n. Dynamo can trace this, but not triton's own."""
    return 1 << (n - 1).bit_length()
