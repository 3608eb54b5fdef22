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

from moe_ops.kernels.triton.experts.schedule.sort import count_of
from moe_ops.kernels.triton.replay import launch

GROUP = 16  # tiles of one expert that run side by side, sharing W from the L2 cache
ENTRY = tl.constexpr(8)  # int32s from one entry to the next: its five lie in one sector of memory


@dataclass(frozen=True, slots=True)
class TileMap:
    """The table of row tiles, int32 [1 + capacity, 8]. The first row: how many tiles there are, how
    many of these have rows in their lower half, and a counter, 0 between the products over these
    rows, which run one after the other. Each of the others is a tile: its expert, the first row of
    its group (at most GROUP tiles), one past the expert's last row, the group's first tile and how
    many tiles the group has."""

    table: Tensor
    block_m: int

    @property
    def capacity(self) -> int:
        return self.table.shape[0] - 1


def tile_map(ends_E: Tensor, rows: int, block_m: int, slots: int | None = None) -> TileMap:
    """Tiles of at most `block_m` rows, for every product over these rows of those `tile_rows`.
    With `slots` of each expert its rows are the first of them, as many as counts E say."""
    E = ends_E.numel()
    capacity = rows // block_m + min(E, rows)
    table = torch.empty(1 + capacity, ENTRY.value, dtype=torch.int32, device=ends_E.device)
    block, block_e = 128, max(triton.next_power_of_2(E), 16)
    launch(
        _tile_map, (E,), ends_E, table, E, rows, capacity, slots, block_m, GROUP, block_e, block,
        num_warps=4,
    )  # fmt: skip
    return TileMap(table, block_m)


@triton.jit(do_not_specialize=["R", "CAPACITY", "M"])
def _tile_map(
    ends_ptr, tiles_ptr, E, R, CAPACITY, M,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program e writes the tiles of expert e.

    Ends that do not ascend within R rows make tiles of some rows, and none outside these or the
    table.
    """
    e = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    if M is None:
        ends = tl.load(ends_ptr + experts, mask=experts < E, other=0)
        starts = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    else:
        starts = experts * M
        ends = starts + count_of(ends_ptr, experts, experts < E, M)
    ends = tl.minimum(tl.maximum(ends, 0), R)
    starts = tl.minimum(tl.maximum(starts, 0), R)
    rows = tl.where(experts < E, tl.maximum(ends - starts, 0), 0)
    tiles = (rows + (BLOCK_M - 1)) // BLOCK_M
    first = tl.sum(tl.where(experts < e, tiles, 0))
    my_tiles = tl.sum(tl.where(experts == e, tiles, 0))
    start = tl.sum(tl.where(experts == e, starts, 0))
    end = tl.sum(tl.where(experts == e, ends, 0))

    for at in range(0, my_tiles, BLOCK):
        tile = at + tl.arange(0, BLOCK)
        group = tile // GROUP * GROUP
        entry = tiles_ptr + ENTRY * (1 + first + tile)
        mask = (tile < my_tiles) & (first + tile < CAPACITY)
        tl.store(entry, tl.zeros([BLOCK], tl.int32) + e, mask=mask)
        tl.store(entry + 1, start + group * BLOCK_M, mask=mask)
        tl.store(entry + 2, tl.zeros([BLOCK], tl.int32) + end, mask=mask)
        tl.store(entry + 3, first + group, mask=mask)
        tl.store(entry + 4, tl.minimum(my_tiles - group, GROUP), mask=mask)
    if e == 0:
        long_tiles = (rows + (BLOCK_M // 2 - 1)) // BLOCK_M
        tl.store(tiles_ptr, tl.minimum(tl.sum(tiles), CAPACITY))
        tl.store(tiles_ptr + 1, tl.minimum(tl.sum(long_tiles), CAPACITY))
        tl.store(tiles_ptr + 2, 0)
