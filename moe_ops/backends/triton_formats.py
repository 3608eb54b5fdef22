"""The formats of weights and inputs that the Triton kernels multiply; inputs that they emulate are
those of `triton_inputs.py`. Weights may also be of an element that another package registered with
a decoder of its own.
"""

from __future__ import annotations

from moe_ops.backends.triton_device import unavailable
from moe_ops.backends.triton_inputs import inputs_of
from moe_ops.kernels.triton import BlockWeight, RegisteredWeight, Weight
from moe_ops.quant.elements.kinds import Blocks, Element
from moe_ops.quant.formats import ALL, Format, keep_by_format

FOUR_BITS, SIX_BITS = ("float4_e2m1", "int4", "uint4"), ("float6_e3m2", "float6_e2m3")
FLOAT8, EIGHT_BITS = "float8_e4m3fn", ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
ELEMENTS = (*FOUR_BITS, *SIX_BITS, *EIGHT_BITS)
BLOCKS = ("q4_k", "q5_k", "q6_k")
LEAST_GROUP = 16
MOST_TOGETHER = 16, 8  # codes that share bytes, and the bytes, for a decoder
INPUTS = "float8_e4m3fn:1x128"
INPUT_COLUMNS = 128
WHOLE_SCALES = ("row", "tensor")
# Inputs whose scales leave the sum, as those of their weights do, which have the same elements.
BY_ROW = tuple(f"{e}:{group}" for e in ("float8_e4m3fn", "int8") for group in WHOLE_SCALES)
# Inputs that are multiplied with weights of four bits as codes, where others emulate them.
FLOAT8_INPUTS = (*(f"{FLOAT8}:{group}" for group in WHOLE_SCALES), INPUTS, "mxfp8")
MOST_COLUMNS_OF_INT8 = (2**31 - 1) // (127 * 128)  # whose products an int32 has room for
CHUNK = 64  # columns of a result that share the scales of a weight, for many rows an expert


@keep_by_format
def scaled_of(x_format: str) -> str:
    """What of inputs that are not emulated has a scale, as the kernels' `Codes` say it; empty for
    16 bits."""
    name = Format.of(x_format).name if x_format else ""
    return name.partition(":")[2] if name in BY_ROW else "group" if name else ""


@keep_by_format
def weight_of(w_format: str, x_format: str) -> Weight:
    """The format of a weight as the kernels take it, one that `refusal` does not refuse."""
    format = Format.of(w_format)
    as_codes = bool(x_format) and inputs_of(w_format, x_format) is None
    plain = (format.element, *format.group, format.scale, as_codes, format.bits)
    of, storage = format.element_type, format.parsed.storage
    if format.in_blocks:
        return BlockWeight(*plain, storage.values, storage.units)
    if not of.triton_decoder:
        return Weight(*plain)
    from moe_ops.kernels.triton.experts.formats.registered import decoder_at

    return RegisteredWeight(*plain, storage.values, storage.units, decoder_at(of.triton_decoder))


@keep_by_format
def refusal_of_float8(w_format: str, x_format: str) -> str | None:
    """Why weights of four bits are not multiplied with inputs of float8 as such, for many rows an
    expert on Hopper (`grouped_float8_tokens.py`), or None. Other kernels emulate these inputs."""
    format, inputs = Format.of(w_format), inputs_of(w_format, x_format)
    if inputs is None or Format.of(x_format).name not in FLOAT8_INPUTS:
        return f"multiplies inputs of {', '.join(FLOAT8_INPUTS)}, got {x_format or 'floats'}"
    integers = format.integer is not None and format.group[1] in (ALL, INPUT_COLUMNS)
    if format.name == "mxfp4" or (integers and format.element in FOUR_BITS):
        return None
    return f"decodes mxfp4, and integers of 4 bits by row or 1x128, to float8, got {w_format}"


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


@keep_by_format
def _of_formats(w_format: str, x_format: str) -> tuple[str | None, int]:
    """A reason that no width changes, or None; how many codes come together. Eager calls ask."""
    reason = _reason(w_format, x_format)
    return reason, 1 if reason is not None else weight_of(w_format, x_format).together[0]


def _reason(w_format: str, x_format: str) -> str | None:
    format = Format.of(w_format)
    element, across = format.element, format.group[1]
    refusal = _refuse_element(format.element_type)
    if refusal is not None:
        return refusal
    if x_format and Format.of(x_format).element not in ELEMENTS:
        return f"quantises inputs to {', '.join(ELEMENTS)}, got {x_format}"
    if format.in_blocks and across != ALL:
        return f"needs one scale above a row of {element} blocks, got groups of {across}"
    if across != ALL and (across < LEAST_GROUP or across & (across - 1)):
        return f"needs groups of {LEAST_GROUP}, 32, 64, 128 or more columns, got {across}"
    if inputs_of(w_format, x_format) is not None:
        return None
    if x_format and Format.of(x_format).name in BY_ROW:
        wanted = Format.of(x_format).element
        if wanted != element or across != ALL:
            needed = f"{wanted} weights with a scale a row or tensor"
            return f"needs {needed} for {x_format}, got {w_format}"
        return None
    if x_format and Format.of(x_format).name != INPUTS:
        return f"quantises inputs to {', '.join((INPUTS, *BY_ROW))}, got {x_format}"
    if x_format and (element != FLOAT8 or across != INPUT_COLUMNS):
        needed = f"float8 weights in groups of {INPUT_COLUMNS} columns"
        return f"needs {needed} for {INPUTS} inputs, got {w_format}"
    return None


def _refuse_element(of: Element) -> str | None:
    """Why the kernels do not decode an element, or None. One that was registered has to bring what
    decodes words of its bytes."""
    if isinstance(of, Blocks) and of.name in BLOCKS:
        return None
    if not of.triton_decoder:
        known = ", ".join((*ELEMENTS, *BLOCKS))
        return None if of.name in ELEMENTS else f"needs weights of {known}, got {of.name}"
    storage, (values, units) = of.storage, MOST_TOGETHER
    power = storage.values & (storage.values - 1) == 0
    if storage.dtype.itemsize > 1 or storage.values > values or storage.units > units or not power:
        return (
            f"decodes words of 1, 2, 4, 8 or {values} codes in {units} bytes at most, got "
            f"{storage.values} of {of.name} in {storage.units * storage.dtype.itemsize}"
        )
    return unavailable()


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
