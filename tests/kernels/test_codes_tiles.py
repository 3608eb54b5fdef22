"""Which tiles of codes many rows an expert take, and that they fit a processor of Hopper."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_tiles import CODES_TILES, codes_tile, of_registers
from moe_ops.kernels.triton.experts.products import skeleton
from moe_ops.kernels.triton.experts.products.grouped_tile import CodesTile
from tests.kernels.codes import unfilled

TILES = [tile for _, tile in CODES_TILES]
each_tile = pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.tokens}x{t.blocks}")
FORMATS = {4: "int4:1x128", 6: "mxfp6_e3m2", 8: "float8_e4m3fn:1x128"}
WEIGHTS = {bits: weight_of(name, "") for bits, name in FORMATS.items()}


def taken(rows_per_expert: float, bits: int = 4, experts: int = 8, more: int = 0) -> CodesTile:
    """The tile of a layer for so many rows an expert, of experts of which others hold some."""
    ids_TK = torch.empty(int(rows_per_expert * (experts + more)) // 2, 2, dtype=torch.int32)
    layer = unfilled((FORMATS[bits], ""), (experts, 4096, 4096))
    expert_map = torch.empty(experts + more, dtype=torch.int32) if more else None
    return of_registers(torch.empty(0), ids_TK, layer, expert_map)


@pytest.mark.parametrize("bits", FORMATS)
@each_tile
def test_stages_fit_shared_memory(tile: CodesTile, bits: int) -> None:
    found = codes_tile(tile, WEIGHTS[bits])
    columns = 64 if bits == 8 else 128
    codes = 0 if bits == 6 else 128 * columns * bits // 8
    outputs = 9 * 1024
    bytes_ = found.stages * (codes + 2 * columns * found.tokens) + outputs
    # Each block has a KiB of its own besides.
    assert found.blocks * (bytes_ + 1024) <= 228 * 1024
    assert found.stages >= 3


@each_tile
def test_threads_fit_the_registers_of_a_processor(tile: CodesTile) -> None:
    assert tile.blocks * 12 * 32 * skeleton.REGISTERS[tile.blocks] <= 65536


@pytest.mark.parametrize("bits", FORMATS)
@each_tile
def test_a_tile_is_told_where_none_is_read(tile: CodesTile, bits: int) -> None:
    """Places for the tiles of two slots, or of eight where there are more stages, of three steps at
    least: `tell`."""
    stages = codes_tile(tile, WEIGHTS[bits]).stages
    assert stages <= (2 if stages <= 4 else 8) * 3 - 2


def test_the_tile_grows_with_the_rows_of_an_expert() -> None:
    assert [most for most, _ in CODES_TILES] == sorted(most for most, _ in CODES_TILES)
    assert CODES_TILES[-1][0] == math.inf
    for most, tile in CODES_TILES[:-1]:
        assert taken(most).tokens == tile.tokens < taken(most + 1).tokens
        # Rows of uniform routing lie within two deviations of what is average.
        assert most + 2 * most**0.5 <= tile.tokens


def test_a_share_of_experts_has_the_rows_of_its_own() -> None:
    assert taken(16.0, experts=8, more=24) == taken(16.0)
    assert taken(300.0, experts=8, more=24) == codes_tile(CODES_TILES[-1][1], WEIGHTS[4])
