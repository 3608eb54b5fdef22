"""The formats of weights and inputs that the Triton kernels multiply."""

from __future__ import annotations

import functools

from moe_ops.kernels.triton import WORD, Weight
from moe_ops.quant.formats import ALL, Format

FOUR_BITS = ("float4_e2m1", "int4", "uint4")
FLOAT8, EIGHT_BITS = "float8_e4m3fn", ("float8_e4m3fn", "int8", "uint8")
LEAST_GROUP = 16
INPUTS = "float8_e4m3fn:1x128"
INPUT_COLUMNS = 128
CHUNK = 64  # columns of a result that share the scales of a weight, for many rows an expert


@functools.cache
def weight_of(w_format: str, x_format: str) -> Weight:
    """The format of a weight as the kernels take it, one that `refusal` does not refuse."""
    format = Format.of(w_format)
    bits = 4 if format.element in FOUR_BITS else 8
    return (format.element, *format.group, format.scale, bool(x_format), bits)


def refusal(w_format: str, x_format: str, widths: tuple[int, ...]) -> str | None:
    """Why the kernels cannot multiply weights and inputs of these formats, or None."""
    reason, in_words = _of_formats(w_format, x_format)
    if reason is None and in_words and any(width % WORD for width in widths):
        return f"needs widths that {WORD} divides, got {' and '.join(map(str, widths))}"
    return reason


@functools.cache
def _of_formats(w_format: str, x_format: str) -> tuple[str | None, bool]:
    """A reason that no width changes, or None; and whether codes come in words. Eager calls ask."""
    return _reason(w_format, x_format), Format.of(w_format).element in FOUR_BITS


def _reason(w_format: str, x_format: str) -> str | None:
    format = Format.of(w_format)
    element, across = format.element, format.group[1]
    if element not in (*FOUR_BITS, *EIGHT_BITS):
        known = ", ".join((*FOUR_BITS, *EIGHT_BITS))
        return f"needs weights of {known}, got {element}"
    if format.has_global_scale:
        return "has no kernel for scales under a global scale"
    if across != ALL and (across < LEAST_GROUP or across & (across - 1)):
        return f"needs groups of {LEAST_GROUP}, 32, 64, 128 or more columns, got {across}"
    if x_format and Format.of(x_format).name != INPUTS:
        return f"quantises inputs to {INPUTS} alone, got {x_format}"
    if x_format and (element != FLOAT8 or across != INPUT_COLUMNS):
        return f"needs float8 weights in groups of {INPUT_COLUMNS} columns for {INPUTS} inputs"
    return None


def refusal_of_many(
    weight: Weight, widths: tuple[int, int], gated: bool, interleaved: bool
) -> str | None:
    """Why the kernel for many rows an expert (`grouped_float8.py`) cannot multiply weights of this
    format with inputs of 8 bits, that `refusal` does not refuse, or a model and experts of these
    widths; or None."""
    down = weight[1]
    # A scale has to be that of all rows behind 64 columns of the result.
    rows = 2 * CHUNK if interleaved else CHUNK
    if down != ALL and down % rows:
        return f"needs a scale for each {rows} rows of weights or a multiple of them, got {down}"
    if gated and not interleaved and down != ALL and widths[1] % CHUNK:
        return f"needs a width of experts that {CHUNK} divides, got {widths[1]}"
    # Its copies are of 16 bytes or more, and a tile has to have four steps.
    if any(width % 16 or width <= 3 * INPUT_COLUMNS for width in widths):
        least, got = 3 * INPUT_COLUMNS, " and ".join(map(str, widths))
        return f"needs widths above {least} that 16 divides, got {got}"
    return None
