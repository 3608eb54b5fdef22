"""How the slots of a cache are shared out to programs, for attention of one query.

The constants follow from what a processor holds and from what is waited for, not from timings.
"""

from __future__ import annotations

from typing import NamedTuple

UNSPLIT_SLOTS = 256  # up to here one launch: a program asks for all slots of a head at once
LEAST_SPAN = 64  # slots of a program, where several share a head
MOST_SPAN = 4096  # a program looks at the mask of all its slots at once
MOST_SPLITS = 64  # the merge holds what all programs of a head found
MOST_SLOTS = MOST_SPLITS * MOST_SPAN
MOST_HELD = 8192  # float32 numbers of an output, or of a merge, that 4 warps hold


class Tile(NamedTuple):
    """The most slots of a tile, and the most bytes of its keys and values."""

    slots: int  # fewer than threads: each then loads the mask where it needs it
    bytes: int
    warps: int
    stages: int


ALONE = Tile(128, 64 * 1024, 8, 3)  # where no two programs share a processor
SHARED = Tile(64, 32 * 1024, 4, 3)


class Plan(NamedTuple):
    """`splits` programs for a head of the cache, each with `span` slots in tiles of `tile`."""

    splits: int
    span: int
    tile: int
    warps: int
    stages: int


def plan_for(
    pairs: int, slots: int, row_bytes: int, held: int, processors: int, memory: int
) -> Plan:
    """The plan for so many pairs of a sequence and a head of the cache, with `row_bytes` of keys
    and values a slot, outputs of `held` numbers each, and so much shared memory for a program."""
    splits = -(-slots // MOST_SPAN)
    if slots > UNSPLIT_SLOTS:
        splits = max(splits, min(processors // pairs, slots // LEAST_SPAN, MOST_SPLITS))
    roomy = ALONE.bytes * ALONE.stages <= memory  # a stage of it is for all but keys and values
    most = ALONE if roomy and pairs * splits <= processors else SHARED
    span = -(-slots // splits)
    tile = max(
        16, min(power_of_two(span), most.slots, power_of_two(most.bytes // row_bytes + 1) // 2)
    )
    tiles = -(-span // tile)
    large = tile > SHARED.slots or tile * row_bytes > SHARED.bytes or held > MOST_HELD
    warps = ALONE.warps if large else SHARED.warps
    return Plan(-(-slots // (tiles * tile)), tiles * tile, tile, warps, min(most.stages, tiles + 1))


def power_of_two(n: int) -> int:
    """The next one. Dynamo can trace it, other than triton's own."""
    return 1 << (n - 1).bit_length()
