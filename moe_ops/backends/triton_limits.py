"""How many tokens a Triton kernel of experts takes, and up to how many it is the fastest."""

from __future__ import annotations

import math

from moe_ops.backends.triton_hopper import refuse_many, refuse_registers
from moe_ops.backends.triton_support import inputs_of, weight_of
from moe_ops.kernels.triton import (
    LARGE,
    TINY_PAIRS,
    TINY_TOKENS,
    most_streamed,
    one_a_step,
)
from moe_ops.ops.experts import ExpertsCall
from moe_ops.quant.formats import Format
from moe_ops.registry.invariance import INVARIANT

# Measured on an H200 over six layers (moe_ops/tuned/h200.json): up to how many tokens triton.tiny
# is the fastest, and up to how many rows an expert triton.rows is, if an expert's second weight has
# fewer elements than LARGE and if it has not.
MOST_TINY_TOKENS, MOST_ROWS_PER_EXPERT, MOST_ROWS_PER_LARGE_EXPERT = 4, 32, 16
# The same for quantised weights: rows where triton.grouped decodes them first, by the bits of a
# code; with inputs of 8 bits, on an H100; and where it multiplies codes as they are stored, by the
# bits and whether rows have one scale for a step of columns, and of large experts by the bits.
MOST_TINY_TOKENS_OF_CODES = 1
MOST_DECODED = 4 * 2**30  # bytes of a layer that is decoded
# Codes of four and eight bits have tiles of few tokens
# (benchmarks/results/codes_tiles_h200.json). With 8 rows an expert qwen3_30b took 124 µs
# by triton.rows and 125 by tiles in int4, 138 and 132 in mxfp4, 208 and 181 in float8; with 4 rows
# 107 and 130 in mxfp4, 170 and 174 in float8. Large experts (64 of 4096 x 3072) took 349 and 398
# with 4 rows in int4, 474 and 407 with 8, and 705 and 614 in float8. Those of six bits were
# measured as four were before they had such tiles.
MOST_ROWS_OF_CODES, MOST_ROWS_OF_QUANTIZED_INPUTS = {4: 400, 8: 200}, 16
MOST_ROWS_AS_STORED = {
    (4, True): 8, (4, False): 6, (6, True): 32, (6, False): 28, (8, True): 5, (8, False): 5,
}  # fmt: skip
MOST_ROWS_OF_LARGE_AS_STORED = {4: 6, 6: 24, 8: 5}
# With HUGE elements of W2 4 rows of mixtral_8x7b took 262 µs by triton.rows and 251 by tiles in
# int4, 299 and 261 in mxfp4, 386 and 373 in float8; 2 rows 229 and 250 in mxfp4.
HUGE, MOST_ROWS_OF_HUGE = 2**25, 3
# Of large experts from so many rows an expert on average on codes of four bits are multiplied with
# those of float8 as such, where fewer are multiplied as 16 bits
# (benchmarks/results/float8_tiles_h200.json). With a scale for 32 columns of a token each of these
# makes a sum of its own: 64 experts of 4096 x 3072 took 400 µs with 8 rows an expert, 455 in 16
# bits; with 32 rows, in tiles of 128, 871 and 576. So these have small tiles alone.
LEAST_ROWS_OF_FLOAT8, MOST_ROWS_OF_SMALL_FLOAT8_TILE = 8, 24


def max_tiny_tokens(call: ExpertsCall) -> int:
    return min(TINY_TOKENS, TINY_PAIRS // call.ids_TK.shape[1])


def most_tiny_tokens(call: ExpertsCall) -> int:
    return MOST_TINY_TOKENS_OF_CODES if call.w_format else MOST_TINY_TOKENS


def most_rows_tokens(call: ExpertsCall, *, adapted: bool = False) -> int | None:
    """`adapted`: with adapters, which the kernels for many rows of codes do not add, but those of
    codes that are decoded first."""
    if call.w_format:
        most = _most_rows_of_codes(call, as_stored=not adapted)
    else:
        most = MOST_ROWS_PER_LARGE_EXPERT if _is_large(call) else MOST_ROWS_PER_EXPERT
    return None if most is None else tokens_of(most, call)


def tokens_of(rows: int, call: ExpertsCall) -> int:
    """The most tokens of which experts have at most so many rows on average."""
    experts = call.w2_EDI.shape[0] if call.expert_map is None else call.expert_map.shape[0]
    return rows * experts // call.ids_TK.shape[1]


def least_of_float8(call: ExpertsCall) -> float:
    """The fewest tokens for which weights of four bits are multiplied with inputs of float8 as
    codes: infinity where experts are small, of which no time was better."""
    if not _is_large(call):
        return math.inf
    return -tokens_of(-LEAST_ROWS_OF_FLOAT8, call)  # the fewest


def most_of_float8(call: ExpertsCall) -> int | None:
    """The most tokens whose codes meet weights of four bits as such: of those with a scale for 32
    columns as many as one small tile for each expert has."""
    if not call.x_format or Format.of(call.x_format).name != "mxfp8":
        return None
    return tokens_of(MOST_ROWS_OF_SMALL_FLOAT8_TILE, call)


def _is_large(call: ExpertsCall) -> bool:
    """Whether an expert is large: its second weight has at least LARGE values."""
    return math.prod(call.widths) >= LARGE


def _most_rows_of_codes(call: ExpertsCall, *, as_stored: bool) -> int | None:
    """The most rows an expert for which codes run here; None if there is no other kernel, or no
    memory for what that one decodes."""
    if call.x_format and refuse_many(call) is not None:
        return None
    if call.x_format and inputs_of(call) is None:
        return MOST_ROWS_OF_QUANTIZED_INPUTS
    weight = weight_of(call)
    bits = weight.bits
    if as_stored and refuse_registers(call) is None:
        if INVARIANT.get() and bits == 4 and one_a_step(weight):
            return min(most_streamed(weight), MOST_ROWS_AS_STORED[bits, True])
        if bits != 6 and math.prod(call.widths) >= HUGE:
            return MOST_ROWS_OF_HUGE
        if _is_large(call):
            return MOST_ROWS_OF_LARGE_AS_STORED[bits]
        return MOST_ROWS_AS_STORED[bits, one_a_step(weight)]
    decoded = (call.w13_EFD.nbytes + call.w2_EDI.nbytes) * 16 // weight.bits
    return None if decoded > MOST_DECODED else MOST_ROWS_OF_CODES[8 if bits == 8 else 4]
