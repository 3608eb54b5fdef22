"""Which tiles a call takes on the paths for a few tokens and for few rows an expert: tables that
`python -m moe_ops.bench tiles` measured, imported where Triton is."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from torch import Tensor

from moe_ops.backends.triton_limits import HUGE, MOST_ROWS_OF_SMALL_FLOAT8_TILE
from moe_ops.kernels.triton import (
    LARGE,
    MOST_OF_SUMS,
    STEP,
    TINY_TOKENS,
    in_blocks,
    most_streamed,
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
from moe_ops.kernels.triton.experts.products.register_stream import Stream, Streams
from moe_ops.kernels.triton.experts.products.rows import RowsTiles, Tile
from moe_ops.kernels.triton.experts.products.tiny import TinyTiles
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.kernels.triton.launch import processors, shared_memory, stages_within

HOPPER_MEMORY = 200 * 1024  # bytes of shared memory; GPUs before Hopper have less
DECODED = 16 * 1024  # bytes of it through which these move decoded values to their matrix units
MOST_OF_TILE = {16: 10, 32: 40, 64: 160}  # rows an expert on average, by the rows of a tile
LONG = 8192  # columns of W2, from which on few programs have much to read
# Of float4, those that one tile of 8 tokens serves better than two, where columns fill all steps
# and where they do not: then loads have masks.
MOST_OF_8, MOST_OF_8_MASKED = 7, 8
BLOCK_ROWS = 32  # of blocks with scales of their own that are decoded at once
SHORT = 1024  # columns, of which rows of W2 are soon read if they have fewer
MANY_STEPS = 2**22  # elements of W2, from which on programs have many steps to round a token in
FEW_PROGRAMS = 512  # of 128 rows, of a GPU with 132 processors
WGMMA_ROWS = 64  # of weights of a tile, from which on Triton multiplies by wgmma
OF_VALUES = 64  # tokens of a tile, from which on scales of steps are multiplied into values
WARPS_WANTED = 8  # of a processor, in programs of streams that multiply scales into values
AHEAD_ALONE = 6  # steps that one of few such programs loads ahead


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
    rows = _rows_per_expert(ids_TK, layer, expert_map)
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
    per_expert, weight = _rows_per_expert(ids_TK, layer, expert_map), _codes(layer).weight
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
    rows = _rows_per_expert(ids_TK, layer, expert_map)
    return float8_tile(*next(tile for tile, most in MOST_OF_FLOAT8_TILE.items() if rows <= most))


def of_one(x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> Streams:
    """The tiles of a call of one token by the tables."""
    return one_streams(ids_TK.shape[1], layer)


def of_few(x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> Streams:
    """The tiles of a call of few rows an expert by the tables."""
    streams = few_streams(_rows_per_expert(ids_TK, layer, expert_map), layer)
    assert streams is not None, "more rows are those of another path"
    return streams


def of_one_in_values(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> Streams:
    """The tiles of an invariant call of one token: of eight the fastest, or within 1 % of it, for
    four layers on an H200. Warps share choices, not the columns of a row. Of small experts a warp
    waits for its token; of huge ones it multiplies step by step for as long as its row takes."""
    codes, (_, D, width) = _codes(layer), layer.sizes
    shares = min(8, power_of_two(ids_TK.shape[1]))
    if D * width >= HUGE:
        return _one_of_huge(codes, shares)
    up = Stream(ahead=4, tokens_ahead=3 if D * width < LARGE else 1, in_values=True)
    return Streams(up=up, down=replace(up, S=shares))


def _one_of_huge(codes: Codes, shares: int) -> Streams:
    """The fastest of about thirty pairs of tiles for Mixtral's layer on an H200."""
    up, down = Stream(MW=4, in_values=True), Stream(S=shares, in_values=True)
    if codes.bits == 4 and codes.one_a_step and codes.weight.element != "uint4":
        return Streams(up=up, down=replace(down, ahead=6))
    tokens = 2 if codes.weight.across == 16 else 3  # nvfp4 took 96 µs, and 105 as mxfp4
    ahead = 6 if codes.weight.element == "uint4" or tokens == 2 else 8  # more of uint4 would spill
    return Streams(up=up, down=replace(down, ahead=ahead, tokens_ahead=tokens, late=True))


def of_few_in_values(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> Streams:
    """The tiles of an invariant call, which multiply scales into values. Warps do not share the
    columns of a row, so that of few pairs each warp is a program, which loads more steps ahead; not
    measured."""
    streams = few_streams(_rows_per_expert(ids_TK, layer, expert_map), layer)
    stream = Stream(MW=4, MT=2, NT=2) if streams is None else streams.up
    units, wanted = min(ids_TK.numel(), layer.sizes[0]), WARPS_WANTED * processors(x_TD)
    # With as many of uint4 registers would spill.
    alone = Stream(ahead=4 if _codes(layer).weight.element == "uint4" else AHEAD_ALONE)

    def of(rows: int) -> Stream:
        many = units * math.ceil(rows / stream.rows) * stream.warps >= wanted
        return replace(stream if many else alone, in_values=True)

    return Streams(up=of(_rows13(layer)), down=of(layer.sizes[1]))


def one_streams(K: int, layer: Experts) -> Streams:
    """The launches for one token: the fastest of about fifteen that were tried on an H200 for
    Qwen3-30B's and Mixtral's layers, or within 3 % of it."""
    codes, (_, D, width) = _codes(layer), layer.sizes
    C = max(1, 8 // power_of_two(K))
    up, down = Stream(S=4, C=4), Stream(S=8, C=C)
    if codes.bits == 4 and codes.one_a_step:
        if D * width >= LARGE:
            return Streams(up=replace(up, MT=2), down=replace(down, MT=2, ahead=3))
        return Streams(up=up, down=replace(down, ahead=8))
    if codes.bits == 6:  # as four bits without sums by step; no other was tried
        return Streams(up=replace(up, MT=2), down=replace(down, ahead=3))
    if codes.weight.element == "float4_e2m1":
        return _one_of_float4(K, layer, up, down)
    if codes.quantizes:
        return _one_of_8(layer, up, down)
    ahead = 2 if D * width < LARGE else 1  # of qwen3_30b 16.6 for 18.3 µs in float8
    return Streams(up=replace(up, tokens_ahead=ahead), down=replace(down, tokens_ahead=ahead))


def _one_of_8(layer: Experts, up: Stream, down: Stream) -> Streams:
    """The launches for one token that is rounded to codes of 8 bits: of eight on an H200 for eleven
    layers the fastest, or within 0.2 % of it (`benchmarks/results/rounded_tokens_h200.json`). To
    round groups costs programs of a large first product more than the launch that does so once."""
    codes, (_, D, width) = _codes(layer), layer.sizes
    if codes.by_row:
        return Streams(up=replace(up, rounds=True), down=replace(down, rounds=True))
    if D * width >= MANY_STEPS:
        return Streams(up=up, down=replace(down, rounds=True, registers=128))  # two on a processor
    up, down = (replace(stream, rounds=True, ahead=4) for stream in (up, down))
    return Streams(up=up, down=down)


def _one_of_float4(K: int, layer: Experts, up: Stream, down: Stream) -> Streams:
    """The launches for one token and weights of float4: the fastest of 5 to 9 on an H200, or within
    5 % of it, for six layers in groups of 32 and two in groups of 16
    (`benchmarks/results/float4_tiles_h200.json`)."""
    codes, (_, D, width) = _codes(layer), layer.sizes
    large, in_16 = D * width >= LARGE, codes.weight.across == 16
    few = K * math.ceil(_rows13(layer) / 32) < FEW_PROGRAMS
    return Streams(
        up=replace(up, MT=1 if few and not large and not in_16 else 2, ahead=2 if large else 4),
        down=replace(down, ahead=3 if large or in_16 else 4),
    )


def few_streams(rows_per_expert: float, layer: Experts) -> Streams | None:
    """The launches for few rows an expert on average; None for so many that shared memory serves
    them better. They were tried from 4 to 256 tokens, on the GPU and the layers of
    `one_streams`."""
    codes, (E, D, width) = _codes(layer), layer.sizes
    large, sums = D * width >= LARGE, codes.one_a_step
    if rows_per_expert > most_streamed(codes.weight):
        return None
    stream = Stream(MW=4, MT=2)
    if codes.weight.element == "float4_e2m1" and not sums:
        stream = _few_of_float4(rows_per_expert, layer)
    elif codes.weight.element == "uint4" and not sums:
        stream = Stream(MW=4)  # more would spill
    elif codes.bits == 8:
        # Of qwen3_30b in float8 64 rows took 154.9 µs, and 158.1 with tokens a step ahead.
        ahead = 1 if large or codes.quantizes else 2
        stream = Stream(MW=4, MT=2 if large and codes.quantizes else 1, tokens_ahead=ahead)
    elif large and not sums and rows_per_expert <= MOST_OF_SUMS:
        stream = Stream(MW=4, ahead=4)
    elif large and sums and rows_per_expert * E * math.ceil(D / 128) < FEW_PROGRAMS:
        stream = Stream(MW=4, ahead=4)  # twice as many
    elif not sums and rows_per_expert > MOST_OF_SUMS:
        stream = Stream(MW=4, MT=2, NT=2)
    return Streams(up=stream, down=stream)


def _few_of_float4(rows_per_expert: float, layer: Experts) -> Stream:
    """The launch for few rows an expert and weights of float4. 3 or 4 were tried from 2 to 400
    tokens, on the GPU and the layers of `_one_of_float4`."""
    codes, (E, D, width) = _codes(layer), layer.sizes
    in_16 = codes.weight.across == 16
    many = MOST_OF_8_MASKED if D % STEP or width % STEP else MOST_OF_8
    if rows_per_expert > (MOST_OF_SUMS if in_16 else many):
        return Stream(MW=4, MT=2, NT=2)
    if D * width >= LARGE:
        few = not in_16 and E * math.ceil(D / 128) < FEW_PROGRAMS
        if rows_per_expert <= 1 or few:
            return Stream(MW=4, ahead=4)
    elif rows_per_expert <= 1 and width < SHORT and not in_16:
        return Stream(MW=4, MT=2, ahead=3)
    return Stream(MW=4, MT=2)


def _codes(layer: Experts) -> Codes:
    assert layer.codes is not None
    return layer.codes


def _rows_per_expert(ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> float:
    """On average, over the experts of all ranks."""
    return ids_TK.numel() / (layer.sizes[0] if expert_map is None else expert_map.shape[0])


def _rows13(layer: Experts) -> int:
    """The rows of an expert's first weight."""
    return layer.sizes[2] * (2 if layer.act.gated else 1)
