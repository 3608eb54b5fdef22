"""The Triton backends of linear layers in codes, for NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from moe_ops.backends.strides import contiguous, with_rows
from moe_ops.backends.triton_ahead import begins_alone
from moe_ops.backends.triton_arithmetic import placed
from moe_ops.backends.triton_decode import with_rows_placed
from moe_ops.backends.triton_device import HALF, either, refuse_hopper
from moe_ops.backends.triton_formats import weight_of
from moe_ops.backends.triton_gemm import refuse_codes, values_of
from moe_ops.backends.triton_hopper import (
    copied,
    refuse_groups,
    refuse_misaligned,
    refuse_streamed,
)
from moe_ops.decode_ops.linears import MOST_ROWS, MOST_TILED
from moe_ops.decode_ops.normed_quantized_linears import (
    NormedQuantizedLinearsCall,
    normed_quantized_linears,
)
from moe_ops.decode_ops.quantized_linears import QuantizedLinearsCall, quantized_linears
from moe_ops.kernels.triton import brings_decoder
from moe_ops.registry.backend import Rows
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import INVARIANT
from moe_ops.registry.registration import ANY_ROWS

DECODED = "triton.decoded"


def supports(call: QuantizedLinearsCall) -> str | None:
    """Why codes of the weights are not decoded, or None."""
    if needs_grad(call.x_TK, *call.scales, *call.biases):
        return "is not differentiable, and an argument requires grad"
    for w_NK, scale, zero in zip(call.weights, call.scales, call.zeros, strict=True):
        refusal = refuse_codes(w_NK, scale, call.w_format)
        if refusal is None and zero is not None and not zero.is_contiguous():
            refusal = "needs contiguous zero points"
        if refusal is not None:
            return refusal
    return None


@quantized_linears.backend(DECODED, supports=supports, devices=("cuda",), priority=1)
def multiply_decoded(call: QuantizedLinearsCall) -> list[Tensor]:
    """`quantized_linears` by PyTorch's products of weights that are decoded first, one at a time,
    to the dtype of the input."""
    x_TK, outs = call.x_TK, []
    for g, w_NK in enumerate(call.weights):
        zero, common, bias = call.zeros[g], call.global_scales[g], call.biases[g]
        scales = (call.scales[g][None], zero, None if common is None else common.reshape(1))
        (values_NK,) = values_of(w_NK[None], scales, call.w_format, x_TK.dtype)
        outs.append(linear(x_TK, values_NK, None if bias is None else bias.to(x_TK.dtype)))
    return outs


def supports_few(call: QuantizedLinearsCall) -> str | None:
    """Why codes of the weights are not decoded in registers, or None."""
    if call.x_TK.dtype not in HALF:
        return f"needs {either(HALF)}, got {call.x_TK.dtype}"
    for what, given in (("zero points", call.zeros), ("global scales", call.global_scales)):
        if len({t is None for t in given}) > 1:
            return f"needs {what} of all weights, or of none"
    return supports(call)


def of_codes(call: Any) -> str:
    """One sum in tiles of one size, or those of shares of columns, whose number K decides."""
    return "codes of few rows, as many times as there are"


def most_rows(call: QuantizedLinearsCall) -> int:
    """The most rows whose codes are decoded where they are multiplied."""
    if INVARIANT.get():
        return ANY_ROWS
    return MOST_TILED if refuse_tiles(call) is None else MOST_ROWS


@quantized_linears.backend(
    "triton",
    supports=supports_few,
    rows=Rows(possible=most_rows),
    devices=("cuda",),
    priority=2,
    arithmetic=of_codes,
)
def multiply_few(call: QuantizedLinearsCall) -> list[Tensor]:
    """`quantized_linears` of few rows by one launch for four weights, which decodes them in
    registers; of more on Hopper in tiles."""
    from moe_ops.kernels.triton.decode.quantized_linears import run

    if call.x_TK.shape[0] == 0:
        return [call.x_TK.new_empty(0, w_NK.shape[0]) for w_NK in call.weights]
    invariant = INVARIANT.get()
    if invariant:
        call = replace(call, x_TK=placed(call.x_TK))
    streams, tiles = ways_of(call)
    return run(
        with_rows(call.x_TK), layers_of(call), streams=streams, tiles=tiles, invariant=invariant
    )


def ways_of(call: QuantizedLinearsCall) -> tuple[bool, bool]:
    """Whether codes stream through registers, and whether more rows than do so have tiles."""
    from moe_ops.kernels.triton.decode.quantized_stream import MOST_STREAMED

    many = call.x_TK.shape[0] > MOST_STREAMED
    return refuse_stream(call) is None, many and refuse_tiles(call) is None


def refuse_stream(call: QuantizedLinearsCall) -> str | None:
    """Why codes do not stream through registers, or None."""
    x_TK, weight = call.x_TK, weight_of(call.w_format, "")
    return refuse_hopper(x_TK) or refuse_streamed(
        call.w_format, weight, x_TK.shape[1:], x_TK.stride(0), (x_TK, *call.weights)
    )


def refuse_tiles(call: QuantizedLinearsCall) -> str | None:
    """Why codes are not decoded in tiles of many rows, or None."""
    weight = weight_of(call.w_format, "")
    if weight.bits == 6 or weight.element == "float8_e5m2" or brings_decoder(weight):
        return f"has no decoder of {call.w_format}"
    each, K = copied(weight), call.x_TK.shape[1]
    if K % each or any(w_NK.shape[0] % each for w_NK in call.weights):
        rows = ", ".join(str(w_NK.shape[0]) for w_NK in call.weights)
        return f"needs rows and columns of weights that {each} divides, got {rows} and {K}"
    if len({None if bias is None else bias.dtype for bias in call.biases}) > 1:
        return "needs biases of all weights, of one dtype, or of none"
    return refuse_hopper(call.x_TK) or refuse_groups(weight) or refuse_misaligned(*call.weights)


def layers_of(call: QuantizedLinearsCall) -> Any:
    """What kernels take beside the input, a `Coded`."""
    from moe_ops.kernels.triton.decode.coded import Coded

    biases = [contiguous(bias) for bias in call.biases]
    lists = (call.weights, call.scales, call.zeros, call.global_scales, biases)
    return Coded(*lists, weight_of(call.w_format, ""))


def supports_normed(call: NormedQuantizedLinearsCall) -> str | None:
    """Why a norm is no part of the launch of the codes that read it, or None."""
    if needs_grad(call.gain_K, call.residual_TK):
        return "is not differentiable, and an argument requires grad"
    return supports_few(call.of(call.x_TK))


@normed_quantized_linears.backend(
    "triton",
    reads=normed_quantized_linears.optional,
    supports=supports_normed,
    devices=("cuda",),
    priority=1,
    arithmetic=of_codes,
)
def multiply_normed(call: NormedQuantizedLinearsCall) -> list[Tensor]:
    """`normed_quantized_linears` of one row in one launch for the first four weights, of others in
    one more."""
    from moe_ops.kernels.triton.decode.quantized_linears import run_normed

    invariant = INVARIANT.get()
    if invariant:
        call = with_rows_placed(call)
    linears = call.of(call.x_TK)
    streams, tiles = ways_of(linears)
    return run_normed(
        with_rows(call.x_TK), call.residual_TK, call.gain_K, call.eps, layers_of(linears),
        call.gain_shift, streams=streams, tiles=tiles, invariant=invariant,
    )  # fmt: skip


begins_alone(normed_quantized_linears, "triton", multiply_normed)
