"""What x and h become before a product reads them, by the format of the weights.

    weights of floats        nothing
    codes, inputs of floats  the order of columns in which a path decodes codes, if it has one
    inputs of 8 bits         codes, and scales of groups of columns or of rows (`row_scales.py`)
    inputs of other formats  emulated: rounded to their values, as `fake_quantized.py` says; but of
                             float8 some paths multiply codes

Tokens may come as codes already. Of h some first products store codes at once, and some products
make codes of one token as they load it.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moe_ops.kernels.triton.experts.call import Call, Operand
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.formats.order import arranged
from moe_ops.kernels.triton.experts.operands import row_scales
from moe_ops.kernels.triton.experts.operands.beside_sort import Made
from moe_ops.kernels.triton.experts.operands.fake_quantized import emulate
from moe_ops.kernels.triton.experts.operands.float8_groups import quantize_in_order
from moe_ops.kernels.triton.experts.operands.group_scales import quantize_sorted, quantize_tokens
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from moe_ops.kernels.triton.experts.operands.prequantized import decode, in_rows


def rounded_tokens(x_TD: Tensor, codes: Codes | None) -> Tensor:
    """Tokens rounded to the format of inputs if inputs are emulated, else as they are."""
    if codes is None or codes.inputs is None:
        return x_TD
    if codes.x_scale_TG is not None:
        return decode(x_TD, codes)
    return emulate(x_TD, x_TD.shape[1], codes.inputs, codes.x_scale)


def tokens_operand(c: Call, x_TD: Tensor) -> Operand:
    """Tokens of `rounded_tokens` for the first product."""
    K, codes, scale = c.ids_TK.shape[1], c.codes, None
    inverse_R = c.inverse_R if c.reads.gathered else None
    if c.slots is not None and (c.reads.gathered or c.arranges):  # those that are used, in place
        inverse_R = c.order[1]
    choices = K if inverse_R is None else 1
    if codes is None:
        return Operand(x_TD, None, choices)
    given_TG = codes.x_scale_TG
    if c.rounds_x:
        return Operand(x_TD, None, choices)
    if codes.by_row:
        routed = c.ids_TK, c.expert_map, inverse_R
        x_TD, scale = row_scales.quantize_x(x_TD, codes, *routed, arranged=c.reads.float8)
        choices = 1 if row_scales.by_expert(codes.x_scale) else choices
    elif codes.quantizes and given_TG is not None:
        scale = given_TG
        if inverse_R is not None:
            group = codes.weight.across if c.reads.float8 else 0
            x_TD, scale = in_rows(
                x_TD, given_TG, inverse_R, K, c.slots, arranged=c.reads.float8, group=group
            )
    elif codes.quantizes and c.reads.float8:
        x_TD, scale = quantize_in_order(x_TD, codes, inverse_R, K)
    elif codes.quantizes and inverse_R is not None:
        x_TD, scale = quantize_sorted(x_TD, inverse_R, K, codes.weight.across, c.slots)
    elif codes.quantizes:
        x_TD, scale = quantize_tokens(x_TD, codes.weight, c.batches)
    elif c.arranges:
        x_TD = arrange(x_TD, codes.weight, inverse_R, 1 if inverse_R is None else K, c.slots)
    return Operand(_as_read(c, x_TD, scale), scale, choices)


def ready_tokens(c: Call, made: Made) -> Operand:
    """Tokens that were made in another launch, for the first product."""
    return Operand(_as_read(c, made.values, made.scale), made.scale, c.ids_TK.shape[1])


def room_for_hidden(c: Call) -> Operand:
    """Where the first product stores h: floats, or what codes it makes and their scales."""
    codes, columns, new = c.codes, c.sizes[2], c.x.values.new_empty
    # Of a few tokens every pair may have rows of all.
    rows, dtype, scale = c.ids_TK.numel() * (1 if c.order else len(c.ids_TK)), c.dtype, None
    if codes is not None and c.reads.stores == "group":
        assert c.x.scale is not None
        groups = triton.cdiv(columns, codes.weight.across)
        scale = new(groups, c.x.scale.shape[1], dtype=torch.float32)
        dtype = codes.dtype
    elif codes is not None and codes.by_row and c.reads.stores and codes.h_scale is not None:
        # Times weights of routing they are others for each row.
        scale = new(rows, dtype=torch.float32) if c.reads.weighs else codes.h_scale
        dtype = codes.dtype
    elif codes is not None and c.arranges:
        columns = arranged(columns, codes.weight)
    return Operand(new(rows, columns, dtype=dtype), scale)


def hidden_operand(c: Call) -> Operand:
    """h for the second product, unless the first one stored codes."""
    values, codes, scale = c.h.values, c.codes, None
    if codes is None or c.h.scale is not None or c.rounds_h:
        return c.h
    rows_R, ends_E = c.order or (None, None)
    if codes.by_row and ends_E is not None:
        routed = None if c.reads.stores else (c.ids_TK, c.expert_map)
        if c.weights is None and (routed is None or not row_scales.by_expert(codes.h_scale)):
            rows_R = None
        values, scale = row_scales.quantize_h(values, codes, ends_E, c.weights, rows_R, routed)
    elif codes.by_row:
        values, scale = row_scales.quantize_pairs(values, codes, c.ids_TK, c.expert_map, c.weights)
    elif codes.quantizes and c.reads.float8:
        values, scale = quantize_in_order(values, codes)
    elif codes.quantizes:
        # Other paths make these codes in the first product.
        values, scale = quantize_tokens(values, codes.weight, c.batches, inverse=c.invariant)
    elif codes.inputs is not None:
        columns, bits = c.sizes[2], codes.bits if c.arranges else 0
        values = emulate(values, columns, codes.inputs, codes.h_scale, ends_E, bits)
    return Operand(_as_read(c, values, scale), scale)


def _as_read(c: Call, values: Tensor, scale: Tensor | None) -> Tensor:
    return values.view(torch.int32) if c.reads.in_words and scale is not None else values
