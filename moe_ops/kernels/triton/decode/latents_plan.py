"""How latents are shared out to programs, for attention of one query over them."""

from __future__ import annotations

from typing import NamedTuple

from moe_ops.kernels.triton.decode.one_query_plan import power_of_two

MOST_HEADS = 64  # of a program, whose output is in registers
LEAST_HEADS = 16  # that a product takes; rows to spare are nothing
MOST_SPLITS = 64  # the merge holds what all programs of a head found
MOST_SPAN = 4096  # slots of a program, which looks at the mask of all of them at once
MOST_SLOTS = MOST_SPLITS * MOST_SPAN
LEAST_TILES = 2  # of a program, where several share the slots: what it finds is written and read
MOST_NARROW = 2048  # bytes of a slot; more are of float32, whose products take more registers
OTHER_BYTES = 10 * 1024  # of shared memory: weights on their way to the second product, sums
HOPPER_TILE, HOPPER_STAGES = 64, 2  # all that fits beside 64 queries
HOPPER_OTHER_BYTES = 9 * 1024  # of shared memory: powers on their way to the right half, barriers
HOPPER_FEW_SUMS = 1280  # of a head over a tile's slots: a program may have one tile alone
HOPPER_MANY_ROWS = 512  # sequences times heads, from which on a program has four tiles
HOPPER_LEAST_R = 128  # halves of latents are copied by rows of 128 bytes


class LatentsPlan(NamedTuple):
    """Programs take `heads` heads each; `splits` of them share the slots, in tiles of `tile`, of
    which each takes every `splits`-th, `tiles` at most."""

    heads: int
    splits: int
    tiles: int
    tile: int
    warps: int
    stages: int


class HopperPlan(NamedTuple):
    """Programs of the kernel for Hopper take 64 heads each; `splits` of them share the slots, in
    tiles of `tile`, of which each takes every `splits`-th, `tiles` at most."""

    splits: int
    tiles: int
    tile: int
    stages: int

    @property
    def heads(self) -> int:
        return MOST_HEADS


class Sizes(NamedTuple):
    """A call's sequences, heads, slots or how many are chosen, and the bytes of a slot's latent and
    rotated key."""

    batch: int
    heads: int
    slots: int
    row_bytes: int


def plan_for(sizes: Sizes, processors: int, memory: int) -> LatentsPlan:
    """The plan for a GPU of so many processors, each with so many bytes of shared memory. It knows
    no lengths of sequences, on which no bit of another's result may depend."""
    heads = max(LEAST_HEADS, min(MOST_HEADS, power_of_two(sizes.heads)))
    while heads > LEAST_HEADS and memory < needed(sizes, heads, 64, 2):
        heads //= 2
    warps, tile, stages, programs = 8, 64, 2, 1
    if heads == LEAST_HEADS:
        narrow = sizes.row_bytes <= MOST_NARROW
        warps, tile, stages, programs = (4, 32, 3, 2) if narrow else (8, 16, 2, 1)
    while memory < programs * needed(sizes, heads, tile, stages) and stages > 1:
        if programs > 1:
            programs -= 1
        elif stages > 2 or tile == 16:
            stages -= 1
        else:
            tile //= 2
    pairs = sizes.batch * -(-sizes.heads // heads)
    tiles = -(-sizes.slots // tile)
    most = max(1, min(programs * processors // pairs, MOST_SPLITS, tiles // LEAST_TILES))
    each = min(-(-tiles // most), MOST_SPAN // tile)
    return LatentsPlan(heads, -(-tiles // each), each, tile, warps, stages)


def needed(sizes: Sizes, heads: int, tile: int, stages: int) -> int:
    """Bytes of shared memory of a program: queries, tiles on their way, and what is small."""
    return (heads + tile * stages) * sizes.row_bytes + OTHER_BYTES


def fits_hopper(R: int, D: int, element_bytes: int, memory: int) -> bool:
    """Whether the kernel for Hopper takes latents and rotated keys of these widths."""
    row_bytes = (R + D) * element_bytes
    room = (MOST_HEADS + HOPPER_STAGES * HOPPER_TILE) * row_bytes + HOPPER_OTHER_BYTES
    return element_bytes == 2 and R >= HOPPER_LEAST_R and room <= memory


def hopper_plan_for(sizes: Sizes, processors: int) -> HopperPlan:
    """The plan of the kernel for Hopper, for a GPU of so many processors. It knows no lengths of
    sequences either.

    What a program finds is written and read, which costs more than to have all processors at work
    if there are few tiles. From how many on that is so are the best of 1, 2 and 4 tiles of a sweep
    on an H100, over 1, 8 and 32 sequences of 512, 4096 and 8192 slots and 20 and 128 heads.
    """
    rows, tiles = sizes.batch * sizes.heads, -(-sizes.slots // HOPPER_TILE)
    least = 2 if rows < HOPPER_MANY_ROWS else 4
    if rows * tiles <= HOPPER_FEW_SUMS:
        least = 1
    pairs = sizes.batch * -(-sizes.heads // MOST_HEADS)
    most = max(1, min(processors // pairs, MOST_SPLITS, tiles // least))
    each = min(-(-tiles // most), MOST_SPAN // HOPPER_TILE)
    return HopperPlan(-(-tiles // each), each, HOPPER_TILE, HOPPER_STAGES)
