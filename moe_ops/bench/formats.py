"""The formats of a measured layer: how they are named, which layers they fit, what they weigh."""

from __future__ import annotations

import math

from moe_ops.quant.arguments import check_divides, check_input_format, named_format, packed_inputs
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.formats import Format
from moe_ops.testing import Case

GROUPS = (32, 64, 128)  # what is proposed where a layer's widths do not fill the groups
GLOBAL_SCALE_BYTES = 4
STATIC = "static"


def parse(text: str) -> QuantConfig:
    """The formats in the text "WEIGHTS" or "WEIGHTS+INPUTS", two format strings, or
    "WEIGHTS+INPUTS+static" for inputs whose scales are known before. Raises ValueError for anything
    else, for formats that do not go together, and for inputs of other than 8 bits."""
    weights, plus, rest = text.partition("+")
    inputs, static, word = rest.partition("+")
    if static and word != STATIC:
        raise ValueError(f"format {text!r} ends in {word!r}; only {STATIC!r} may come after inputs")
    if plus and not inputs:
        raise ValueError(f"format {text!r} names no inputs after the +; name them or drop the +")
    # The shortest name, so that two runs of the same format have the same text.
    found = QuantConfig(
        weights=named_format("weights", weights).name,
        inputs=named_format("inputs", inputs).name if inputs else "",
        static_inputs=bool(static),
    )
    if inputs:
        packed_inputs("inputs", inputs)
        bits = Format.of(inputs).bits
        if bits != 8:
            raise ValueError(
                f"inputs {inputs!r} have {bits:g} bits, for which there is neither a rate nor a "
                "limit of errors; take inputs in 8 bits, or name weights alone"
            )
    return found


def spelled(quant: QuantConfig | None) -> str:
    """The text that `parse` reads; empty for a layer that is not quantised."""
    if quant is None:
        return ""
    words = [quant.weights, quant.inputs, STATIC if quant.static_inputs else ""]
    return "+".join(filter(None, words))


def in_words(format: str) -> str:
    """The words by which a heading names a layer's format."""
    weights, plus, inputs = format.partition("+")
    return f"weights in {weights}" + (f", inputs in {inputs.replace('+', ', ')}" if plus else "")


def eight_bit(quant: QuantConfig | None) -> bool:
    """Whether inputs are multiplied in 8 bits."""
    return quant is not None and bool(quant.inputs)


def matrices(case: Case) -> tuple[tuple[str, int, int], ...]:
    """Name, rows and columns of the two weights of an expert."""
    return ("w13", 2 * case.I, case.D), ("w2", case.D, case.I)


def check_layer(quant: QuantConfig, case: Case) -> None:
    """Raise ValueError, saying what to choose, unless a layer can be quantised so."""
    for name, rows, columns in matrices(case):
        try:
            check_divides(f"{name} of {case.name}", quant.format, rows, columns)
        except ValueError as error:
            what, _, _ = str(error).partition("; ")  # not its remedy: published layers stay so
            raise ValueError(f"{what}; {_remedy(case)}") from None
        if quant.inputs:
            check_input_format(f"the inputs of {name} of {case.name}", quant.inputs, columns)


def _remedy(case: Case) -> str:
    fitting = [str(n) for n in GROUPS if case.D % n == 0 and case.I % n == 0]
    if not fitting:
        return "measure other layers in this format"
    return f"choose groups of {' or '.join(fitting)}, or measure other layers"


def expert_bytes(case: Case, itemsize: int, quant: QuantConfig | None = None) -> int:
    """The bytes of one expert's weights: values of `itemsize` bytes, or codes with their scales and
    zeros."""
    total = 0
    for _, rows, columns in matrices(case):
        if quant is None:
            total += rows * columns * itemsize
            continue
        format, parsed = quant.format, quant.format.parsed
        groups = math.prod(parsed.scale_shape(rows, columns))
        total += rows * parsed.packed(columns) * parsed.storage.dtype.itemsize
        total += groups * (parsed.scale_dtype.itemsize + format.has_zero)  # a zero is a byte
        total += GLOBAL_SCALE_BYTES * format.has_global_scale
    return total
