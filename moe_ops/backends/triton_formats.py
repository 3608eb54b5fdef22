"""The formats of weights and inputs that the Triton kernels multiply; inputs that they emulate are
those of `triton_inputs.py`.
"""

from __future__ import annotations

import functools

from moe_ops.backends.triton_inputs import inputs_of
from moe_ops.kernels.triton import WORD, Weight
from moe_ops.quant.formats import ALL, Format

FOUR_BITS, SIX_BITS = ("float4_e2m1", "int4", "uint4"), ("float6_e3m2", "float6_e2m3")
FLOAT8, EIGHT_BITS = "float8_e4m3fn", ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
ELEMENTS = (*FOUR_BITS, *SIX_BITS, *EIGHT_BITS)
LEAST_GROUP = 16
INPUTS = "float8_e4m3fn:1x128"
INPUT_COLUMNS = 128
# Inputs whose scales leave the sum, as those of their weights do, which have the same elements.
BY_ROW = tuple(f"{e}:{group}" for e in ("float8_e4m3fn", "int8") for group in ("row", "tensor"))
MOST_COLUMNS_OF_INT8 = (2**31 - 1) // (127 * 128)  # whose products an int32 has room for
CHUNK = 64  # columns of a result that share the scales of a weight, for many rows an expert


@functools.cache
def scaled_of(x_format: str) -> str:
    """What of inputs that are not emulated has a scale, as the kernels' `Codes` say it; empty for
    16 bits."""
    name = Format.of(x_format).name if x_format else ""
    return name.partition(":")[2] if name in BY_ROW else "group" if name else ""


@functools.cache
def weight_of(w_format: str, x_format: str) -> Weight:
    """The format of a weight as the kernels take it, one that `refusal` does not refuse."""
    format = Format.of(w_format)
    as_codes = bool(x_format) and inputs_of(w_format, x_format) is None
    return Weight(format.element, *format.group, format.scale, as_codes, round(format.bits))


def refusal(w_format: str, x_format: str, widths: tuple[int, ...]) -> str | None:
    """Why the kernels cannot multiply weights and inputs of these formats, or None."""
    reason, together = _of_formats(w_format, x_format)
    if reason is None and Format.of(w_format).element == "int8" and scaled_of(x_format):
        most = MOST_COLUMNS_OF_INT8
        if any(width > most for width in widths):
            return f"needs widths of {most} at most, got {' and '.join(map(str, widths))}"
    if reason is None and any(width % together for width in widths):
        return f"needs widths that {together} divides, got {' and '.join(map(str, widths))}"
    return reason


@functools.cache
def _of_formats(w_format: str, x_format: str) -> tuple[str | None, int]:
    """A reason that no width changes, or None; how many codes come together. Eager calls ask."""
    together = {**dict.fromkeys(FOUR_BITS, WORD), **dict.fromkeys(SIX_BITS, 2 * WORD)}
    return _reason(w_format, x_format), together.get(Format.of(w_format).element, 1)


def _reason(w_format: str, x_format: str) -> str | None:
    format = Format.of(w_format)
    element, across = format.element, format.group[1]
    if element not in ELEMENTS:
        return f"needs weights of {', '.join(ELEMENTS)}, got {element}"
    if x_format and Format.of(x_format).element not in ELEMENTS:
        return f"quantises inputs to {', '.join(ELEMENTS)}, got {x_format}"
    if across != ALL and (across < LEAST_GROUP or across & (across - 1)):
        return f"needs groups of {LEAST_GROUP}, 32, 64, 128 or more columns, got {across}"
    if inputs_of(w_format, x_format) is not None:
        return None
    if x_format and Format.of(x_format).name in BY_ROW:
        wanted = Format.of(x_format).element
        if wanted != element or across != ALL:
            return f"needs {wanted} weights with a scale a row or tensor for {x_format}"
        return None
    if x_format and Format.of(x_format).name != INPUTS:
        return f"quantises inputs to {', '.join((INPUTS, *BY_ROW))}, got {x_format}"
    if x_format and (element != FLOAT8 or across != INPUT_COLUMNS):
        return f"needs float8 weights in groups of {INPUT_COLUMNS} columns for {INPUTS} inputs"
    return None


def refusal_of_many(
    weight: Weight, widths: tuple[int, int], gated: bool, interleaved: bool
) -> str | None:
    """Why the kernel for many rows an expert (`grouped_blocks.py`) cannot multiply weights of this
    format with inputs of 8 bits, that `refusal` does not refuse, or a model and experts of these
    widths; or None."""
    down, across = weight.down, weight.across
    # A scale has to be that of all rows behind 64 columns of the result.
    rows = 2 * CHUNK if interleaved else CHUNK
    if across != ALL and down != ALL and down % rows:
        return f"needs a scale for each {rows} rows of weights or a multiple of them, got {down}"
    if gated and not interleaved and ALL not in (down, across) and widths[1] % CHUNK:
        return f"needs a width of experts that {CHUNK} divides, got {widths[1]}"
    # Its copies are of 16 bytes or more, and a tile has to have four steps.
    if any(width % 16 or width <= 3 * INPUT_COLUMNS for width in widths):
        least, got = 3 * INPUT_COLUMNS, " and ".join(map(str, widths))
        return f"needs widths above {least} that 16 divides, got {got}"
    return None
