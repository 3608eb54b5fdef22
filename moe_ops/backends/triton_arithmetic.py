"""How the paths of the Triton backends compute a row, by names: in which order and groups they sum,
what they round, by which instructions. Two paths of one name give a row the same bits, however many
rows there are (`moe_ops/registry/invariance.py`).

In an invariant call every path leaves weights of routing to the last sum, which is over choices in
their order, and takes h as it is stored. Of the products:

    tiny             adds up experts in one sum, in the order of their ids, not of a token's
                     choices; of one token of floats, or of codes of 8 bits on Hopper, as rows
    rows             one sum, columns in order, in tiles of any size: of codes of four and six bits
                     in the order of words; of int8 in int32; of float8 one for each 128 columns
                     where these have a scale, else one for all of them
    rows/stream, tiny/stream
                     one sum, columns in the order of words; scales are multiplied into values, as
                     Sizes.in_values says. Codes of 8 bits of inputs are multiplied as float16
    grouped/row_scales, /blocks
                     as rows, of int8 and float8
    grouped/float8   by the tile scales are multiplied into codes, or into sums
    grouped/registers
                     as rows/stream
    grouped/wgmma, /plain
                     one sum, columns in order, of float32 one product after the other. Codes are
                     decoded first, and then both scales are in what is rounded to 16 bits

`mma.sync` and `wgmma` of 16 bits add the same, in tiles of any size and with either operand first;
of float8 `wgmma` keeps fewer bits, so that rows have tiles for it on Hopper. So they have of
decoded values, which `mma.sync` is given in another order of columns. Where a number is
added to a product the compiler may round once for both, in one kernel and not in the other: such
layers are computed by one path, whatever the number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.triton_device import refuse_hopper
from moe_ops.backends.triton_hopper import scaled
from moe_ops.backends.triton_support import inputs_of, weight_of
from moe_ops.kernels.triton import brings_decoder, in_words
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.backend import is_aligned
from moe_ops.registry.invariance import Arithmetic, Refused

FLOAT32 = "float32, columns in order"
IN_ORDER = "16 bits, columns in order"
BYTES = "16 bits, columns in order, codes times scales of 16 bits"
AS_LOADED = "16 bits, columns as their codes are loaded"
IN_WORDS = "16 bits, columns in the order of words"
INT8 = "int32"
FLOAT8 = "float8 in one sum"
FLOAT8_STEPS = "float8, a sum for 128 columns"
APART = ", beside others"  # behind the name of a path that alone adds something to products so
DYNAMIC = "one scale is that of all tokens of a call; give it as static scales"


def refuse_dynamic(call: ExpertsCall) -> str | None:
    """Why inputs are rounded by what is known of other rows, or None."""
    inputs = inputs_of(call)
    of = scaled(call) if inputs is None else inputs.scale
    return DYNAMIC if of == "tensor" and not call.has_input_scales else None


def in_place(call: ExpertsCall) -> ExpertsCall:
    """A call whose tokens lie as those do that kernels of an invariant call are given."""
    x_TD = call.x_TD
    if lies(x_TD):
        return call
    return replace(call, x_TD=x_TD.new_empty(x_TD.shape))


def lies(x_TD: Tensor) -> bool:
    """Whether rows lie one behind the other, and begin at a multiple of 16 bytes."""
    return x_TD.stride(1) == 1 and x_TD.stride(0) == x_TD.shape[1] and is_aligned(x_TD)


def placed(x_TD: Tensor) -> Tensor:
    """Tokens as kernels of an invariant call are given them: what runs a row may not depend on
    where it lies."""
    if lies(x_TD):
        return x_TD
    return x_TD.clone(memory_format=torch.contiguous_format)


def of_tiny(call: ExpertsCall) -> str:
    """How one token of floats is multiplied, or of codes of 8 bits; others are those of
    tiny/stream."""
    weight = weight_of(call)
    codes = weight is not None and weight.inputs_8 and not _adds_biases(call)
    if codes and _in_order(call.x_TD):
        return of_eight_bits(call)
    if call.w_format or call.dtype == torch.float32:
        return Refused("adds up the experts of all tokens of a call in one sum")
    return IN_ORDER


def of_stream(call: ExpertsCall) -> str:
    weight = weight_of(call)
    if weight is None or weight.inputs_8:
        return Refused("multiplies codes of inputs as float16, for few rows alone")
    return IN_WORDS + _scaled_apart(call)


def of_rows(call: ExpertsCall) -> str:
    weight = weight_of(call)
    if weight is None:
        return IN_ORDER
    if weight.inputs_8:
        return of_eight_bits(call) + (APART if _adds_biases(call) else "")
    apart = _scaled_apart(call)
    if in_words(weight):
        return IN_WORDS + apart
    if brings_decoder(weight) or weight.element == "float8_e5m2":
        name = IN_ORDER if _in_order(call.x_TD) else AS_LOADED
        return name + (APART if call.global_scale13_E is not None else "")
    return BYTES


def _in_order(x_TD: Tensor) -> bool:
    """Whether decoded values are summed in their order: by `wgmma`, which Triton takes for tiles of
    64 rows of weights. For `mma.sync` it puts columns into the order in which bytes were loaded."""
    return x_TD.device.type != "cuda" or refuse_hopper(x_TD) is None


def of_eight_bits(call: ExpertsCall) -> str:
    """How codes of 8 bits are added, by what has a scale."""
    if scaled(call) == "group":
        return FLOAT8_STEPS
    weight = weight_of(call)
    return INT8 if weight is not None and weight.element == "int8" else FLOAT8


def of_float8_tokens(call: ExpertsCall) -> str:
    return Refused("multiplies scales into codes or into sums, by the number of rows")


def of_registers(call: ExpertsCall) -> str:
    return IN_WORDS


def of_floats(call: ExpertsCall) -> str:
    """How products of floats are added, of a layer's dtype."""
    return of_products(call.dtype)


def of_products(dtype: torch.dtype) -> str:
    """How the grouped products of this dtype are added."""
    return FLOAT32 if dtype == torch.float32 else IN_ORDER


def of_training(call: Any) -> str:
    """How the products of a forward that trains are rounded and their rows summed."""
    return Refused("rounds or sums otherwise than `experts`, whose bits it is to give")


def _adds_biases(call: ExpertsCall) -> bool:
    """Whether biases are added right behind a product with scales that leave the sum."""
    biases = call.b13_EF is not None or call.b2_ED is not None
    return biases and scaled(call) in ("row", "tensor")


def _scaled_apart(call: ExpertsCall) -> str:
    """Whether biases are added right behind a product with a global scale."""
    biases = call.b13_EF is not None or call.b2_ED is not None
    return APART if biases and call.global_scale13_E is not None else ""


# By the name of a path.
ARITHMETIC: dict[str, Arithmetic] = {
    "tiny/stream": of_stream, "tiny": of_tiny, "rows/stream": of_stream, "rows": of_rows,
    "grouped/row_scales": of_eight_bits, "grouped/blocks": of_eight_bits,
    "grouped/float8": of_float8_tokens, "grouped/registers": of_registers,
    "grouped/wgmma": of_floats, "grouped/plain": of_floats,
}  # fmt: skip
