"""Which tiles a call takes on the paths for a few tokens and for few rows an expert: tables that
`python -m moe_ops.bench tiles` measured, imported where Triton is."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from torch import Tensor

from moe_ops.backends.triton_limits import MOST_ROWS_OF_SMALL_FLOAT8_TILE
from moe_ops.kernels.triton import (
    LARGE,
    STEP,
    TINY_TOKENS,
    in_blocks,
)
from moe_ops.kernels.triton.decode.one_query_plan import power_of_two
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.products.float8_tile import SCALES, Float8Tile
from moe_ops.kernels.triton.experts.products.grouped_tile import (
    BLOCK_MEMORY,
    OF_A_PAIR,
    STORED,
    CodesTile,
    codes_tile,
)
from moe_ops.kernels.triton.experts.products.rows import RowsTiles, Tile
from moe_ops.kernels.triton.experts.products.tiny import TinyTiles
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.kernels.triton.launch import processors, shared_memory, stages_within

HOPPER_MEMORY = 200 * 1024  # bytes of shared memory; GPUs before Hopper have less
DECODED = 16 * 1024  # bytes of it through which these move decoded values to their matrix units
MOST_OF_TILE = {16: 10, 32: 40, 64: 160}  # rows an expert on average, by the rows of a tile
LONG = 8192  # columns of W2, from which on few programs have much to read
BLOCK_ROWS = 32  # of blocks with scales of their own that are decoded at once
WGMMA_ROWS = 64  # of weights of a tile, from which on Triton multiplies by wgmma
OF_VALUES = 64  # tokens of a tile, from which on scales of steps are multiplied into values


def tiny_of_floats(T: int, K: int, D: int, width: int, processors: int) -> TinyTiles:
    """The fastest on an H200 over six layers at 1, 2 and 4 tokens, or within 2 % of it."""
    if T > 1:
        tiles = TinyTiles(BD=64, up_stages=6)  # so that all blocks of small experts run at once
        if D * width <= 2**20:
            tiles = replace(tiles, up_stages=4)
        elif D * width >= LARGE:
            tiles = TinyTiles()
        # A step of 128 columns that are half outside costs as much as one that is full.
        return tiles if width % 128 == 0 else replace(tiles, BH=64, down_stages=6)

    # As many experts a tile as one token chooses, or twice as many (half of the tile is empty then)
    # if that spreads the blocks more evenly over the processors.
    def evenness(BG: int) -> float:
        return D * BG / 64 / processors / math.ceil(D * BG / (64 * processors))

    if power_of_two(K) != K:
        # Four at a time: such a K would leave much of a larger tile empty.
        return TinyTiles(BG=4, BR=16, down_stages=6)
    chosen = min(16, max(2, K))
    BG = max(chosen, min(16, 2 * chosen), key=evenness)
    tiles = TinyTiles(BG=BG, BR=64 // BG)
    return tiles if 2 * 64 * processors >= D * BG else replace(tiles, BH=64, down_stages=6)


def tiny_of_codes(K: int, codes: Codes, gated: bool) -> TinyTiles:
    """Steps of 128 columns, the group of most formats; of one token in float8, measured."""
    BG, up = min(8, max(2, power_of_two(K))), WGMMA_ROWS // 2 if gated else WGMMA_ROWS
    if in_blocks(codes.weight):  # whose decoded values take more registers
        return TinyTiles(BD=128, BI=BLOCK_ROWS // 2, BG=BG, BR=BLOCK_ROWS // BG, BH=128)
    tiles = TinyTiles(BD=128, BI=up, BG=BG, BR=WGMMA_ROWS // BG, BH=128)
    return replace(tiles, up_stages=6, down_stages=6) if codes.quantizes else tiles


@functools.cache
def tiny_fitting(tiles: TinyTiles, T: int, gated: bool, bits: int, memory: int) -> TinyTiles:
    """The tiles with as many stages as fit into `memory` bytes, for weights of `bits` bits."""
    columns = max(16, tiles.BG * power_of_two(T))
    up = tiles.BD * ((2 if gated else 1) * tiles.BI * bits // 8 + 2 * TINY_TOKENS)
    down = tiles.BH * (tiles.BG * tiles.BR * bits // 8 + 2 * columns)
    return replace(
        tiles,
        up_stages=stages_within(memory, up, tiles.up_stages),
        down_stages=stages_within(memory, down, tiles.down_stages),
    )


def of_tiny(x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> TinyTiles:
    """The tiles of a call by the tables, with stages that fit."""
    (T, K), (_, D, width), codes = ids_TK.shape, layer.sizes, layer.codes
    if codes is None:
        tiles, bits = tiny_of_floats(T, K, D, width, processors(x_TD)), 16
    else:
        tiles, bits = tiny_of_codes(K, codes, layer.act.gated), codes.bits
    return tiny_fitting(tiles, T, layer.act.gated, bits, shared_memory(x_TD))


def _tiles(BN: int, up: tuple[int, ...], down: tuple[int, ...]) -> RowsTiles:
    return RowsTiles(
        up=Tile(rows=up[0], step=up[1], BN=BN, stages=up[2], warps=up[3]),
        down=Tile(rows=down[0], step=down[1], BN=BN, stages=down[2], warps=down[3]),
    )


# By the most rows an expert on average and the most columns of W2 (short rows of it are soon read,
# and finding its place weighs on a program): the fastest of about ten for each product on an H200,
# over six layers.
TILES: tuple[tuple[float, float, RowsTiles], ...] = (
    (8, 1024, _tiles(16, (64, 128, 3, 4), (128, 64, 3, 4))),
    (8, math.inf, _tiles(16, (32, 128, 4, 4), (64, 128, 4, 4))),
    (24, 1024, _tiles(32, (32, 128, 3, 4), (128, 64, 3, 4))),
    (24, math.inf, _tiles(32, (32, 128, 4, 4), (64, 128, 4, 4))),
    (48, math.inf, _tiles(64, (64, 64, 4, 8), (128, 64, 4, 4))),
    (math.inf, math.inf, _tiles(128, (64, 64, 3, 8), (128, 64, 3, 8))),
)


def rows_of_floats(rows_per_expert: float, width: int) -> RowsTiles:
    return next(
        tiles for rows, columns, tiles in TILES if rows_per_expert <= rows and width <= columns
    )


def rows_of_codes(rows_per_expert: float, width: int, codes: Codes, memory: int) -> RowsTiles:
    """Steps of 128 columns, the group of most formats. The fastest of about six on an H200 for the
    layers of Qwen3-30B and Mixtral, in MXFP4 of up to thirteen for four."""
    sums = codes.in_words and codes.one_a_step
    BN = next((n for n, most in MOST_OF_TILE.items() if rows_per_expert <= most), 128)
    if not codes.in_words or sums or memory < HOPPER_MEMORY:
        BN = min(BN, 64)
    if in_blocks(codes.weight):
        return _tiles(BN, (BLOCK_ROWS // 2, 128, 3, 4), (BLOCK_ROWS, 128, 3, 4))
    if codes.quantizes:
        return _tiles(BN, (64, 128, 4, 8), (128, 128, 4, 8))
    if sums:
        return _tiles(BN, (64, 128, 4, 4), (128, 128, 4, 4))
    if BN <= 32:
        mxfp4 = codes.weight.element == "float4_e2m1" and codes.weight.across == 32
        down = (128, 128, 3, 8) if mxfp4 and width >= LONG else (64, 128, 4, 4)
        return _tiles(BN, (32, 128, 4, 4), down)
    return _tiles(BN, (64, 128, 3, 8), (128, 128, 3, 8))


def of_rows_in_values(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> RowsTiles:
    """The tiles of an invariant call: of codes those with which scales are multiplied into values,
    also where there are few rows, and with enough rows of weights for `wgmma`; not measured."""
    tiles, codes = of_rows(x_TD, ids_TK, layer, expert_map), layer.codes
    if codes is None or codes.quantizes:
        return tiles
    of_up = WGMMA_ROWS // 2 if layer.act.gated else WGMMA_ROWS
    up = replace(tiles.up, rows=max(tiles.up.rows, of_up))
    down = replace(tiles.down, rows=max(tiles.down.rows, WGMMA_ROWS))
    if in_blocks(codes.weight):  # whose decoded values take more registers
        up, down = replace(up, warps=8), replace(down, warps=8)
    if codes.one_a_step:
        up, down = (replace(tile, BN=max(tile.BN, OF_VALUES)) for tile in (up, down))
    memory = shared_memory(x_TD) - (0 if shared_memory(x_TD) >= HOPPER_MEMORY else DECODED)
    return rows_fitting(RowsTiles(up=up, down=down), layer.act.gated, codes.bits, memory)


@functools.cache
def rows_fitting(tiles: RowsTiles, gated: bool, bits: int, memory: int) -> RowsTiles:
    """The tiles with as many stages as fit into `memory` bytes of shared memory, for weights of
    `bits` bits."""

    def fit(tile: Tile, weights: int) -> Tile:
        stage = tile.step * (weights * bits // 8 + 2 * tile.BN)
        return replace(tile, stages=stages_within(memory, stage, tile.stages))

    up, down = tiles.up, tiles.down
    return RowsTiles(up=fit(up, (2 if gated else 1) * up.rows), down=fit(down, down.rows))


def of_rows(x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> RowsTiles:
    """The tiles of a call by the tables, with stages that fit."""
    codes, memory, width = layer.codes, shared_memory(x_TD), layer.sizes[2]
    rows = mean_rows(ids_TK, layer, expert_map)
    if codes is None:
        return rows_fitting(rows_of_floats(rows, width), layer.act.gated, 16, memory)
    tiles = rows_of_codes(rows, width, codes, memory)
    if memory < HOPPER_MEMORY:
        memory -= DECODED
    return rows_fitting(tiles, layer.act.gated, codes.bits, memory)


# The tile of codes that are decoded in registers, but for its stages, by the most rows an expert on
# average: of uniform routing nearly every expert has one tile then.
CODES_TILES = (
    (9, CodesTile(16, 0, blocks=2)), (22, CodesTile(32, 0, blocks=2)),
    (48, CodesTile(64, 0, blocks=2)), (105, CodesTile(128, 0)), (math.inf, CodesTile(256, 0)),
)  # fmt: skip


def of_registers(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> CodesTile:
    """The tile of a call by the table; of codes of six bits, which would spill in smaller ones, the
    largest."""
    per_expert, weight = mean_rows(ids_TK, layer, expert_map), codes_of(layer).weight
    if weight.bits == 6:
        per_expert = math.inf
    return codes_tile(next(tile for most, tile in CODES_TILES if per_expert <= most), weight)


# Rows an expert on average, by the tokens of a tile of codes that are decoded to float8, and the
# blocks that share a processor.
MOST_OF_FLOAT8_TILE = {(32, 2): MOST_ROWS_OF_SMALL_FLOAT8_TILE, (128, 1): math.inf}
FLOAT8_TILES = tuple(MOST_OF_FLOAT8_TILE)
MOST_FLOAT8_STAGES = 20
LEAST_FOLDED = 64  # tokens of a tile for which scales become part of codes


def float8_tile(tokens: int, blocks: int) -> Float8Tile:
    """A tile with as many stages as fit."""
    memory = (BLOCK_MEMORY if blocks == 1 else OF_A_PAIR) - STORED
    stage = 2 * STEP * (tokens + 64) + 4 * SCALES * tokens
    stages = stages_within(memory, stage, MOST_FLOAT8_STAGES)
    return Float8Tile(tokens, stages, blocks, tokens >= LEAST_FOLDED)


def of_float8(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> Float8Tile:
    """The tile of a call by the table."""
    rows = mean_rows(ids_TK, layer, expert_map)
    return float8_tile(*next(tile for tile, most in MOST_OF_FLOAT8_TILE.items() if rows <= most))


def codes_of(layer: Experts) -> Codes:
    assert layer.codes is not None
    return layer.codes


def mean_rows(ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> float:
    """On average, over the experts of all ranks."""
    return ids_TK.numel() / (layer.sizes[0] if expert_map is None else expert_map.shape[0])
