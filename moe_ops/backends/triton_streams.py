"""Which launches a call of one token, or of few rows an expert, takes where codes stream through
registers: tables that `python -m moe_ops.bench tiles` measured, imported where Triton is."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from moe_ops.backends.triton_limits import HUGE
from moe_ops.backends.triton_tiles import codes_of, mean_rows
from moe_ops.kernels.triton import LARGE, MOST_OF_SUMS, STEP, most_streamed
from moe_ops.kernels.triton.decode.one_query_plan import power_of_two
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.products.register_stream import Stream, Streams
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.kernels.triton.launch import processors

# Of float4, those that one tile of 8 tokens serves better than two, where columns fill all steps
# and where they do not: then loads have masks.
MOST_OF_8, MOST_OF_8_MASKED = 7, 8
SHORT = 1024  # columns, of which rows of W2 are soon read if they have fewer
MANY_STEPS = 2**22  # elements of W2, from which on programs have many steps to round a token in
FEW_PROGRAMS = 512  # of 128 rows, of a GPU with 132 processors
WARPS_WANTED = 8  # of a processor, in programs of several warps
AHEAD_ALONE = 6  # steps that a program of one warp loads ahead
LEAST_ALONE = 768  # columns of W2, of which it has enough steps to load ahead


def of_one(x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> Streams:
    """The tiles of a call of one token by the tables."""
    return one_streams(ids_TK.shape[1], layer)


def of_few(x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None) -> Streams:
    """The tiles of a call of few rows an expert by the tables. Of float4, where large programs
    would be few, each warp is one, which loads more steps ahead: of the six layers of
    `benchmarks/results/invariant_h200.json` the three of such sizes then took 0.84, 0.96 and 0.97
    of the time for two tokens, and the others 1.01 to 1.05."""
    streams, (_, D, width) = few_streams(mean_rows(ids_TK, layer, expert_map), layer), layer.sizes
    assert streams is not None, "more rows are those of another path"
    codes = codes_of(layer)
    of_float4 = codes.weight.element == "float4_e2m1" and codes.weight.across == 32
    if not of_float4 or codes.quantizes or D * width >= LARGE or width < LEAST_ALONE:
        return streams
    parts = ((streams.up, _rows13(layer)), (streams.down, D))
    up, down = (
        stream if _fill(stream, rows, x_TD, ids_TK, layer) else Stream(ahead=AHEAD_ALONE)
        for stream, rows in parts
    )
    return Streams(up=up, down=down)


def of_one_in_values(
    x_TD: Tensor, ids_TK: Tensor, layer: Experts, expert_map: Tensor | None
) -> Streams:
    """The tiles of an invariant call of one token: of eight the fastest, or within 1 % of it, for
    four layers on an H200. Warps share choices, not the columns of a row. Of small experts a warp
    waits for its token; of huge ones it multiplies step by step for as long as its row takes."""
    codes, (_, D, width) = codes_of(layer), layer.sizes
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
    streams = few_streams(mean_rows(ids_TK, layer, expert_map), layer)
    stream = Stream(MW=4, MT=2, NT=2) if streams is None else streams.up
    # With as many of uint4 registers would spill.
    alone = Stream(ahead=4 if codes_of(layer).weight.element == "uint4" else AHEAD_ALONE)

    def of(rows: int) -> Stream:
        fills = _fill(stream, rows, x_TD, ids_TK, layer)
        return replace(stream if fills else alone, in_values=True)

    return Streams(up=of(_rows13(layer)), down=of(layer.sizes[1]))


def _fill(stream: Stream, rows: int, x_TD: Tensor, ids_TK: Tensor, layer: Experts) -> bool:
    """Whether programs for so many rows of a weight are enough warps for all processors, if each
    pair of a token and a choice is of another expert."""
    units = min(ids_TK.numel(), layer.sizes[0])
    warps = units * math.ceil(rows / stream.rows) * stream.warps
    return warps >= WARPS_WANTED * processors(x_TD)


def one_streams(K: int, layer: Experts) -> Streams:
    """The launches for one token: the fastest of about fifteen that were tried on an H200 for
    Qwen3-30B's and Mixtral's layers, or within 3 % of it."""
    codes, (_, D, width) = codes_of(layer), layer.sizes
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
    codes, (_, D, width) = codes_of(layer), layer.sizes
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
    codes, (_, D, width) = codes_of(layer), layer.sizes
    large, in_16 = D * width >= LARGE, codes.weight.across == 16
    few = K * math.ceil(_rows13(layer) / 32) < FEW_PROGRAMS
    # Masks of columns take registers. With a step less, 6 programs of gpt_oss_20b, which took as
    # long, share a processor, also where they add biases.
    ahead = 2 if large else 3 if D % STEP and not in_16 else 4
    return Streams(
        up=replace(up, MT=1 if few and not large and not in_16 else 2, ahead=ahead),
        down=replace(down, ahead=3 if large or in_16 else 4),
    )


def few_streams(rows_per_expert: float, layer: Experts) -> Streams | None:
    """The launches for few rows an expert on average; None for so many that shared memory serves
    them better. They were tried from 4 to 256 tokens, on the GPU and the layers of
    `one_streams`."""
    codes, (E, D, width) = codes_of(layer), layer.sizes
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
    codes, (E, D, width) = codes_of(layer), layer.sizes
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


def _rows13(layer: Experts) -> int:
    """The rows of an expert's first weight."""
    return layer.sizes[2] * (2 if layer.act.gated else 1)
