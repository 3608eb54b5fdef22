"""Linear layers of one input whose weights are codes; `moe_ops.hf.quantized_linear` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops import fake_impls
from moe_ops.checks.shapes import FLOATS, check_devices, check_no_double, check_tensor
from moe_ops.quant import packing
from moe_ops.quant.arguments import check_scale, named_format
from moe_ops.quant.formats import Format
from moe_ops.registry.spec import DECODE_OPS, op


@dataclass(slots=True)
class QuantizedLinearsCall:
    """The arguments of `quantized_linears`."""

    x_TK: Tensor
    weights: Sequence[Tensor]
    scales: Sequence[Tensor]
    zeros: Sequence[Tensor | None]
    global_scales: Sequence[Tensor | None]
    biases: Sequence[Tensor | None]
    w_format: str


def check(call: QuantizedLinearsCall) -> None:
    """Raise ValueError or TypeError unless `quantized_linears` takes these arguments."""
    x_TK, weights = call.x_TK, call.weights
    check_no_double("x_TK", x_TK, "quantised weights")
    if x_TK.dim() != 2 or x_TK.dtype not in FLOATS:
        raise ValueError(
            f"quantized_linears: x_TK is {x_TK.dtype} {list(x_TK.shape)}, not floats [T, K]; "
            "reshape or convert it"
        )
    lists = (call.scales, call.zeros, call.global_scales, call.biases)
    if not weights or any(len(given) != len(weights) for given in lists):
        raise ValueError(
            f"quantized_linears: got {len(weights)} weights with "
            f"{', '.join(str(len(given)) for given in lists)} scales, zeros, global scales and "
            "biases; give as many of each, None for what a weight has not"
        )
    for g, w_NK in enumerate(weights):
        _check_weight(call, g, w_NK)


def _check_weight(call: QuantizedLinearsCall, g: int, w_NK: Tensor) -> None:
    """Raise unless the codes of a weight, and what belongs to them, fit the format and the
    input."""
    x_TK, format = call.x_TK, named_format("w_format", call.w_format)
    parsed, instead = format.parsed, f"give the codes of w_format={call.w_format!r}"
    check_tensor(f"weight {g}", w_NK, 2, (parsed.storage.dtype,), instead)
    if w_NK.shape[1] % parsed.storage.units or (parsed.unpacked(w_NK.shape[1]) != x_TK.shape[1]):
        raise ValueError(
            f"quantized_linears: weight {g} is {list(w_NK.shape)} of {call.w_format!r}, which are "
            f"no rows of the {x_TK.shape[1]} columns of x_TK; give weights of x_TK"
        )
    shape = parsed.scale_shape(w_NK.shape[0], x_TK.shape[1])
    scale, zero = call.scales[g], call.zeros[g]
    check_scale(f"scale {g}", scale, shape, parsed.scale_dtype, call.w_format)
    if format.has_zero:
        check_scale(f"zero {g}", zero, shape, torch.uint8, call.w_format)
    elif zero is not None:
        raise ValueError(
            f"quantized_linears: zero {g} was given, but {call.w_format!r} has no zero points; "
            "give None"
        )
    common, bias = call.global_scales[g], call.biases[g]
    if common is not None and (
        not format.has_global_scale or common.numel() != 1 or common.dtype != torch.float32
    ):
        raise ValueError(
            f"quantized_linears: global scale {g} is {common.dtype} {list(common.shape)} of "
            f"{call.w_format!r}; give one float32 to weights that have one, such as nvfp4"
        )
    if bias is not None and (bias.shape != w_NK.shape[:1] or bias.dtype not in FLOATS):
        raise ValueError(
            f"quantized_linears: bias {g} is {bias.dtype} {list(bias.shape)}, not floats "
            f"[{w_NK.shape[0]}]; give a number for each row"
        )
    own = {"weight": w_NK, "scale": scale, "zero": zero, "global scale": common, "bias": bias}
    check_devices(x_TK, **{f"{what} {g}": t for what, t in own.items()})


@op(check=check, table=DECODE_OPS)
def quantized_linears(call: QuantizedLinearsCall) -> list[Tensor]:
    """[y_g] with y_g = x W_gᵀ + b_g, for weights in codes of one format.

    W_g is what the codes stand for, (code - zero) * scale * global_scale. Sums are in float32,
    rounded once to the dtype of the input. (The backend `triton.decoded` multiplies values that are
    rounded to this dtype first, and so do the kernels of `triton` for more than one row. Of one
    row and codes of 8 bits, with a scale for each row of a weight or each 128 columns, they
    multiply in float16 on Hopper, which holds values and the row exactly, but numbers below 2**-29
    of its largest.) On a
    GPU codes, scales and biases may be read ahead of the end of the launch before: what writes them
    must have ended two launches ago, as for parameters it has.

    x_TK: float [T, K]; weights: packed codes [N_g, K packed]; scales and zeros (uint8, of formats
    that have them): [groups of N_g, groups of K]; global_scales: one float32, or None; biases:
    float [N_g], or None; w_format: as `quantize` takes it.
    Raises ValueError or TypeError for wrong shapes, dtypes, devices and formats.
    """
    x_TK = call.x_TK.float()
    return [
        linear_of(x_TK, decoded(call, g), call.biases[g]).to(call.x_TK.dtype)
        for g in range(len(call.weights))
    ]


def decoded(call: QuantizedLinearsCall, g: int) -> Tensor:
    """The float32 values of a weight."""
    format = Format.of(call.w_format)
    return packing.dequantize(
        call.weights[g], call.scales[g], format, call.zeros[g], call.global_scales[g]
    )


def linear_of(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """x Wᵀ + b in float32."""
    y_TN = x_TK @ w_NK.t()
    return y_TN if bias_N is None else y_TN + bias_N.float()


quantized_linears.fake(fake_impls.quantized_linears)
