"""Why kernels that are written for Hopper alone do not run a layer of experts; None where they do.

What the widths and formats of a layer do not decide, its tensors do: copies by TMA, and loads of 16
bytes a thread, begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.backends import triton_formats
from moe_ops.backends.triton_device import HALF, either, refuse_hopper
from moe_ops.backends.triton_support import inputs_of, weight_of
from moe_ops.kernels import gpus
from moe_ops.kernels.triton import STEP, Weight, brings_decoder
from moe_ops.ops.expert_wgrad import ExpertWgradCall
from moe_ops.ops.experts import ExpertsCall
from moe_ops.registry.backend import is_aligned

# Columns of a group, by the elements that stream through registers.
STREAMED = {
    **dict.fromkeys(("float8_e4m3fn", "int8"), (-1, STEP)),
    **dict.fromkeys(("int4", "uint4"), (-1, 32, 64, STEP)),
    "float4_e2m1": (-1, 16, 32, 64, STEP),
    **dict.fromkeys(("float6_e3m2", "float6_e2m3"), (32, 64)),
}
STEP_BY_COLUMNS = 64  # inputs of a step of wgmma
LEAST_COLUMNS = 192  # of wgmma: the stores of a tile are hidden by four steps of 64


def refuse_stream(call: ExpertsCall) -> str | None:
    """Why the codes of a layer do not stream through registers, or None."""
    weight = weight_of(call)
    if weight is None:
        return "streams quantised weights, got floats"
    decodes = scaled(call) not in ("row", "tensor")
    stride, x_TD = _tokens(call)
    return refuse_hopper(call.x_TD) or refuse_streamed(
        call.w_format if decodes else "", weight, call.widths, stride,
        (x_TD, call.w13_EFD, call.w2_EDI),
    )  # fmt: skip


def refuse_streamed(
    w_format: str, weight: Any, widths: tuple[int, ...], stride: int,
    tensors: tuple[Tensor | None, ...],
) -> str | None:  # fmt: skip
    """Why codes do not stream through registers past rows of inputs on Hopper, or None.

    w_format: what decodes them, empty where they are multiplied as they are; widths: of all inputs;
    stride: from one row of inputs to the next; tensors: of inputs and of codes, None for one that
    will lie in memory of its own.
    """
    if w_format and weight.across not in STREAMED.get(weight.element, ()):
        return f"has no decoder of {w_format}"
    whole = copied(weight)
    if any(width % whole for width in widths):
        return f"needs widths that {whole} divides, got {' and '.join(map(str, widths))}"
    if stride % 8:
        return f"needs rows of inputs that begin at a multiple of 8 elements, got every {stride}"
    return refuse_misaligned(*tensors)


def refuse_row_scales(call: ExpertsCall) -> str | None:
    """Why codes of 8 bits with a scale a row or tensor are not multiplied as they are, or None."""
    if scaled(call) not in ("row", "tensor"):
        return f"multiplies codes of 8 bits with a scale a row or tensor, got {_formats(call)}"
    return refuse_eight_bits(call) or refuse_hopper(call.x_TD)


def refuse_blocks(call: ExpertsCall) -> str | None:
    """Why codes of float8 with a scale for some columns are not multiplied as they are, or None."""
    if scaled(call) != "group":
        return f"multiplies codes of float8 with a scale for 128 columns, got {_formats(call)}"
    return refuse_eight_bits(call) or refuse_hopper(call.x_TD)


def refuse_eight_bits(call: ExpertsCall) -> str | None:
    """Why many rows an expert of weights and inputs of 8 bits are not multiplied, or None; where
    there is no GPU nothing is said of it."""
    c = call
    if c.global_scale13_E is not None or c.global_scale2_E is not None:
        return "has no kernel for quantised inputs and weights under a global scale"
    refusal = triton_formats.refusal_of_many(weight_of(c), c.widths, c.gated, c.interleaved)
    if refusal is None and c.x_TD.device.type == "cuda" and refuse_hopper(c.x_TD) is not None:
        got = gpus.described(c.x_TD.device)
        refusal = f"has a kernel for quantised inputs on compute capability 9.0 alone, got {got}"
    if refusal is None and refuse_misaligned(c.w13_EFD, c.w2_EDI) is not None:
        refusal = "needs quantised weights that begin at a multiple of 16 bytes"
    return refusal


def refuse_many(call: ExpertsCall) -> str | None:
    """Why no kernel for many rows an expert takes the quantised inputs of a call that those for few
    rows take, or None."""
    if inputs_of(call) is None:
        return refuse_eight_bits(call)
    return None if refuse_registers(call) is None else refuse_decoded(call)


def refuse_decoded(call: ExpertsCall) -> str | None:
    """Why the weights of a layer are not decoded first, to be multiplied with inputs of 16 bits, or
    None."""
    weight = weight_of(call)
    if weight is not None and weight.inputs_8:
        return f"multiplies floats, got {_formats(call)}"
    if call.x_scale is not None and call.dtype == torch.float16:
        return "has no room in float16 for weights times a static scale of inputs"
    return None


def refuse_registers(call: ExpertsCall) -> str | None:
    """Why weights of codes are not decoded in registers, where they are multiplied with inputs of
    16 bits, or None. Groups have at least the columns that a thread loads at once, or of nvfp4 half
    as many; copies take 32 rows, of eight bits 16; and in one tile there are so many steps that the
    next one is found."""
    weight = weight_of(call)
    if weight is None or weight.inputs_8:
        return f"multiplies quantised weights with inputs of 16 bits, got {_formats(call)}"
    if weight.element == "float8_e5m2" or brings_decoder(weight):
        return f"has no decoder of {weight.element}"
    each, least = copied(weight), 3 * STEP // 2 if weight.bits == 8 else 2 * STEP
    if any(width % each or width <= least for width in call.widths):
        return f"needs widths above {least} that {each} divides, got {_both(call)}"
    refusal = refuse_groups(weight) or refuse_hopper(call.x_TD)
    return refusal or refuse_misaligned(call.w13_EFD, call.w2_EDI)


def copied(weight: Weight) -> int:
    """The rows, and the columns, that whole copies of codes take."""
    return 16 if weight.bits == 8 else 32


def refuse_groups(weight: Weight) -> str | None:
    """Why codes are not decoded in registers as a thread loads them, by the columns that share a
    scale, or None."""
    least = 16 if weight.element == "float4_e2m1" else copied(weight)
    if weight.across != -1 and weight.across < least:
        return f"needs groups of {least} columns or more, got {weight.across}"
    return None


def refuse_float8(call: ExpertsCall) -> str | None:
    """Why weights of four bits are not decoded to float8 in registers, where they are multiplied
    with inputs of float8, or None."""
    if not call.w_format:
        return "multiplies quantised weights with inputs of float8, got floats"
    refusal = triton_formats.refusal_of_float8(call.w_format, call.x_format)
    if refusal is None and call.x_scale is not None and call.x_scale.numel() > 1:
        refusal = "quantises inputs by one static scale for all experts, got one for each"
    least = 4 * STEP  # a tile has three steps of columns or more
    if refusal is None and any(width % 32 or width <= least for width in call.widths):
        refusal = f"needs widths above {least} that 32 divides, got {_both(call)}"
    if refusal is not None:
        return refusal
    return refuse_hopper(call.x_TD) or refuse_misaligned(call.w13_EFD, call.w2_EDI)


def refuse_wgmma(call: ExpertsCall) -> str | None:
    """Why the two products of floats are not both run by the kernel for Hopper, or None."""
    up, down = refused_products(call)
    if up is not None and down is not None and up != down:
        return f"{up} (first product), {down} (second product)"
    if up is None and down is not None:
        return f"{down} (second product)"
    return f"{up} (first product)" if up is not None and down is None else up


def refused_products(call: ExpertsCall, *, activates: bool = True) -> tuple[str | None, str | None]:
    """Why the kernel for Hopper does not run the first and the second product of a layer; None for
    one that it runs. Weights of codes are decoded first, into memory of their own. `activates`:
    whether the first product has the activation behind it."""
    weight, widths = weight_of(call), call.widths
    w13, w2 = (None, None) if weight is not None else (call.w13_EFD, call.w2_EDI)
    if call.transposed and w13 is not None and w2 is not None:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    refusal = refuse_decoded(call) or refuse_hopper(call.x_TD)
    if refusal is None and call.dtype not in HALF:
        refusal = f"needs {either(HALF)}, got {call.dtype}"
    if refusal is not None:
        return refusal, refusal
    stride, x_TD = _tokens(call)
    up = refuse_product(widths, stride, x_TD, w13, activates and call.interleaved)
    return up, refuse_product(widths[::-1], widths[1], None, w2)


def refuse_product(
    widths: tuple[int, int], stride: int, a: Tensor | None, w_ENK: Tensor | None,
    interleaved: bool = False,
) -> str | None:  # fmt: skip
    """Why the kernel for Hopper does not run one product of floats of 16 bits there, or None.

    widths: of inputs and of outputs; stride: from one row of inputs to the next; None for tensors
    that will lie in memory of their own, in order; interleaved: whether results are made of an even
    and an odd row of W each.
    """
    if widths[0] <= LEAST_COLUMNS:
        return f"needs more than {LEAST_COLUMNS} columns, got {widths[0]}"
    if any(width % 8 for width in widths):
        return f"needs widths that 8 divides, got {widths[0]} and {widths[1]}"
    if stride % 16:
        return f"needs rows of inputs that begin at a multiple of 16 elements, got every {stride}"
    if w_ENK is not None and not w_ENK.is_contiguous():
        if interleaved or not w_ENK.transpose(1, 2).is_contiguous():
            return "needs contiguous weights"
        # The last step would read what lies behind an expert, and may be NaN.
        if widths[0] % STEP_BY_COLUMNS:
            return (
                f"needs as many inputs as {STEP_BY_COLUMNS} divides of weights whose columns lie, "
                f"got {widths[0]}"
            )
    return refuse_misaligned(a, w_ENK)


def refuse_gemm(x_RD: Tensor, w_EFD: Tensor) -> str | None:
    """Why the kernel for Hopper does not run one product of `expert_gemm`, or None."""
    refusal = refuse_hopper(x_RD)
    if refusal is not None:
        return refusal
    if x_RD.dtype not in HALF or w_EFD.dtype != x_RD.dtype:
        return f"needs {either(HALF)}, got {x_RD.dtype} and {w_EFD.dtype}"
    return refuse_product((w_EFD.shape[2], w_EFD.shape[1]), x_RD.stride(0), x_RD, w_EFD)


def refuse_wgrad(call: ExpertWgradCall) -> str | None:
    """Why the kernel for Hopper does not run an `expert_wgrad`, or None. One operand it copies by
    TMA, and of the other the rows that are named."""
    a_RM, b_RN = call.a_RM, call.b_RN
    if (call.a_rows_R is None) == (call.b_rows_R is None):
        return "needs the rows of one operand named"
    if a_RM.dtype not in HALF or call.dtype != a_RM.dtype:
        return f"needs {either(HALF)}, got {a_RM.dtype} and {call.dtype}"
    widths = a_RM.shape[1], b_RN.shape[1]
    if min(widths) <= STEP_BY_COLUMNS or any(width % 8 for width in widths):
        return (
            f"needs more than {STEP_BY_COLUMNS} columns that 8 divides, got {widths[0]} and "
            f"{widths[1]}"
        )
    strides = [t.stride(0) if t.stride(1) == 1 else t.shape[1] for t in (a_RM, b_RN)]
    if any(stride % 16 or stride == 0 for stride in strides):  # TMA takes no rows that are one
        return (
            "needs rows that begin at a multiple of 16 elements, got every "
            f"{strides[0]} and {strides[1]}"
        )
    return refuse_hopper(a_RM) or refuse_misaligned(a_RM, b_RN)


def refuse_misaligned(*tensors: Tensor | None) -> str | None:
    if all(t is None or is_aligned(t) for t in tensors):
        return None
    return "needs tensors that begin at a multiple of 16 bytes"


def _tokens(call: ExpertsCall) -> tuple[int, Tensor | None]:
    """From one row of tokens to the next as kernels read them, and the tensor; None for one that
    is written anew, in order."""
    x_TD = call.x_TD
    if inputs_of(call) is not None or x_TD.stride(-1) != 1:
        return x_TD.shape[1], None
    return x_TD.stride(0), x_TD


def scaled(call: ExpertsCall) -> str:
    """What of inputs of 8 bits that are multiplied as such has a scale; empty for others."""
    weight = weight_of(call)
    if weight is None or not weight.inputs_8:
        return ""
    return triton_formats.scaled_of(call.x_format)


def _both(call: ExpertsCall) -> str:
    return " and ".join(map(str, call.widths))


def _formats(call: ExpertsCall) -> str:
    names = [name for name in (call.w_format, call.x_format) if name]
    return " and ".join(names) if names else "floats"
