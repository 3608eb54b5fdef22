"""Tiles of codes of four bits that meet tokens of float8 fit a processor."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops.backends.triton_tiles import FLOAT8_TILES, MOST_OF_FLOAT8_TILE, float8_tile
from moe_ops.kernels.triton.experts.products import skeleton

each_tile = pytest.mark.parametrize("tile", FLOAT8_TILES, ids=str)


@each_tile
def test_stages_fit_shared_memory(tile: tuple[int, int]) -> None:
    found = float8_tile(*tile)
    codes, outputs = 128 * 256 // 2, 9 * 1024
    bytes_ = found.stages * (codes + 256 * found.tokens) + outputs
    # Each block has a KiB of its own besides.
    assert found.blocks * (bytes_ + 1024) <= 228 * 1024
    assert found.stages >= 3


@each_tile
def test_threads_fit_the_registers_of_a_processor(tile: tuple[int, int]) -> None:
    blocks = float8_tile(*tile).blocks
    assert blocks * 12 * 32 * skeleton.REGISTERS[blocks] <= 65536


@each_tile
def test_a_tile_is_told_where_none_is_read(tile: tuple[int, int]) -> None:
    """Places for the tiles of two slots, or of eight where there are more stages, of three steps at
    least: `tell`."""
    stages = float8_tile(*tile).stages
    assert stages <= (2 if stages <= 4 else 8) * 3 - 2


def test_the_tile_grows_with_the_rows_of_an_expert() -> None:
    assert list(MOST_OF_FLOAT8_TILE.values()) == sorted(MOST_OF_FLOAT8_TILE.values())
    assert [tokens for tokens, *_ in FLOAT8_TILES] == sorted(t for t, *_ in FLOAT8_TILES)
