"""Which rows of which expert make a tile of the grouped products, found on the device.

Only the device knows how many rows an expert has, so a small kernel writes a table of tiles, in
which every block of a product looks its tiles up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 16  # tiles of one expert that run side by side, sharing W from the L2 cache


@dataclass(frozen=True, slots=True)
class Tiles:
    """The table of row tiles: five int32 arrays of `capacity`, then how many tiles there are, and
    how many of these are long: have more than `short` rows. The long ones come first."""

    table: Tensor
    capacity: int
    block_m: int
    short: int


def tile_map(ends_E: Tensor, rows: int, block_m: int, short: int = 0) -> Tiles:
    """Tiles of at most `block_m` rows, for every product over these rows of those `tile_rows`."""
    E = ends_E.numel()
    capacity = rows // block_m + min(E, rows)
    table = torch.empty(5 * capacity + 2, dtype=torch.int32, device=ends_E.device)
    block, block_e = 128, max(triton.next_power_of_2(E), 16)
    _tile_map[(E,)](ends_E, table, capacity, E, block_m, short, GROUP, block_e, block, num_warps=4)
    return Tiles(table, capacity, block_m, short)


@triton.jit
def _tile_map(
    ends_ptr,
    table_ptr,
    capacity,
    E,
    BLOCK_M: tl.constexpr,
    SHORT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program e writes the tiles of expert e: e, first row of the tile's group (at most GROUP
    tiles), one past the expert's last row, the group's first tile and its size. A short tile is a
    group of its own."""
    e = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    rows = tl.where(experts < E, ends - starts, 0)
    longs = (rows + (BLOCK_M - 1 - SHORT)) // BLOCK_M
    shorts = (rows + (BLOCK_M - 1)) // BLOCK_M - longs
    all_longs = tl.sum(longs)
    first = tl.sum(tl.where(experts < e, longs, 0))
    first_short = all_longs + tl.sum(tl.where(experts < e, shorts, 0))
    my_longs = tl.sum(tl.where(experts == e, longs, 0))
    my_shorts = tl.sum(tl.where(experts == e, shorts, 0))
    start = tl.sum(tl.where(experts == e, starts, 0))
    end = tl.sum(tl.where(experts == e, ends, 0))

    for at in range(0, my_longs + my_shorts, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        is_long = tile < my_longs
        group = tl.where(is_long, tile // GROUP * GROUP, tile)
        base = tl.where(is_long, first, first_short - my_longs)
        size = tl.where(is_long, tl.minimum(my_longs - group, GROUP), 1)
        entry = table_ptr + base + tile
        mask = tile < my_longs + my_shorts
        tl.store(entry, tl.zeros([BLOCK], tl.int32) + e, mask=mask)
        tl.store(entry + capacity, start + group * BLOCK_M, mask=mask)
        tl.store(entry + 2 * capacity, tl.zeros([BLOCK], tl.int32) + end, mask=mask)
        tl.store(entry + 3 * capacity, base + group, mask=mask)
        tl.store(entry + 4 * capacity, size, mask=mask)
    if e == 0:
        tl.store(table_ptr + 5 * capacity, all_longs + tl.sum(shorts))
        tl.store(table_ptr + 5 * capacity + 1, all_longs)
