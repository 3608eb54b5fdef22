"""The Triton backend of one product for NVIDIA GPUs; operands of codes are decoded first."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends import reads, triton_formats
from moe_ops.backends.aten import refuse_out_dtype
from moe_ops.backends.strides import contiguous, with_rows
from moe_ops.backends.triton_arithmetic import of_products
from moe_ops.backends.triton_device import (
    FLOATS,
    HALF,
    LEAST_CAPABILITY,
    LEAST_FLOAT8,
    either,
    refuse_device,
)
from moe_ops.backends.triton_hopper import refuse_gemm
from moe_ops.checks.shapes import DTYPES
from moe_ops.decode_ops.linears import MOST_ROWS
from moe_ops.kernels.triton import in_words
from moe_ops.ops.expert_gemm import ExpertGemmCall, expert_gemm
from moe_ops.quant.formats import Format
from moe_ops.registry.gradients import needs_grad
from moe_ops.registry.invariance import INVARIANT


def supports_gemm(call: ExpertGemmCall) -> str | None:
    x_RD = call.x_RD
    refusal = None if call.x_format else refuse_out_dtype(call)
    if refusal is not None:
        return refusal
    if _gemm_dtype(call) not in FLOATS:
        return f"needs {either(FLOATS)}, got {_gemm_dtype(call)}"
    scales = (call.x_scale_RG, call.w_scale_EFG, call.global_scale_E, call.x_global_scale_R)
    if needs_grad(x_RD, call.w_EFD, call.bias_EF, *scales):
        return "is not differentiable, and an argument requires grad"
    if call.w_format:
        return _refuse_gemm_codes(call)
    if call.global_scale_E is not None:
        return "has global scales for quantised weights alone"
    return refuse_device(x_RD)


def _gemm_dtype(call: ExpertGemmCall) -> torch.dtype:
    """The dtype of the result, in which the operands are multiplied too."""
    return DTYPES[call.out_dtype] if call.out_dtype else call.x_RD.dtype


def _refuse_gemm_codes(call: ExpertGemmCall) -> str | None:
    """Why codes of a call of `expert_gemm` are not decoded, or None."""
    c, operands = call, [(call.w_EFD, call.w_scale_EFG, call.w_format)]
    if c.x_format:
        operands.append((c.x_RD, c.x_scale_RG, c.x_format))
        if _gemm_dtype(c) == torch.float16:
            return "has no room in float16 for what codes of inputs may stand for; use bfloat16"
    for codes, scale, name in operands:
        refusal = refuse_codes(codes, scale, name)
        if refusal is not None:
            return refusal
    if c.w_zero_EFG is not None and not c.w_zero_EFG.is_contiguous():
        return "needs contiguous zero points"
    return None


def refuse_codes(codes: Tensor, scale: Tensor | None, format: str) -> str | None:
    """Why codes of a format and their scales are not decoded, or None."""
    width = Format.of(format).parsed.unpacked(codes.shape[-1])
    refusal = triton_formats.refusal(format, "", (width,))
    if refusal is None and not all(t is None or t.is_contiguous() for t in (codes, scale)):
        refusal = "needs contiguous codes and scales"
    words = refusal is None and in_words(triton_formats.weight_of(format, ""))
    if words and codes.storage_offset() % 4:
        refusal = "needs codes of four and six bits that begin at a multiple of 4 bytes"
    least = LEAST_FLOAT8 if codes.dtype == torch.float8_e4m3fn else LEAST_CAPABILITY
    return refusal or refuse_device(codes, least)


@expert_gemm.backend(
    "triton",
    reads=reads.SCALED_GEMM,
    supports=supports_gemm,
    devices=("cuda",),
    priority=1,
    arithmetic=lambda call: of_products(_gemm_dtype(call)),
)
def grouped_gemm(call: ExpertGemmCall) -> Tensor:
    """`expert_gemm` by the kernels of triton.grouped, codes decoded first; unused rows stay
    unwritten."""
    from moe_ops.kernels.triton.experts.products import grouped

    c, x_RD, w_EFD = call, call.x_RD, call.w_EFD
    if c.w_format and x_RD.shape[0] > 0:
        of_w = (c.w_scale_EFG, c.w_zero_EFG, contiguous(c.global_scale_E))
        w_EFD = values_of(w_EFD, of_w, c.w_format, _gemm_dtype(c))
        if c.x_format:
            assert c.x_scale_RG is not None
            x_global_scale_R = contiguous(c.x_global_scale_R)
            of_x = (c.x_scale_RG[None], None, x_global_scale_R)
            x_RD = values_of(x_RD[None], of_x, c.x_format, _gemm_dtype(c))[0]
    elif c.w_format:
        return x_RD.new_empty(0, w_EFD.shape[1], dtype=_gemm_dtype(c))
    if c.transposed:
        w_EFD = w_EFD.transpose(1, 2)
    ends_E, bias_EF = c.ends_E.contiguous(), with_rows(c.bias_EF)
    x_RD = with_rows(x_RD)
    if INVARIANT.get() and is_linear(x_RD, w_EFD):
        from moe_ops.kernels.triton.decode import linears

        bias_F = None if bias_EF is None else bias_EF[0]
        return linears.run(x_RD, [w_EFD[0]], [bias_F], invariant=True)[0]
    wgmma = refuse_gemm(x_RD, w_EFD) is None
    return grouped.grouped_rows(x_RD, ends_E, w_EFD, bias_EF, wgmma=wgmma)


def is_linear(x_RD: Tensor, w_EFD: Tensor) -> bool:
    """Whether the product is that of one expert with few rows, which the kernels for linear layers
    compute in the same order, by more programs."""
    few = 0 < x_RD.shape[0] <= MOST_ROWS and w_EFD.shape[0] == 1
    return few and x_RD.dtype in HALF and w_EFD.is_contiguous()


def values_of(
    codes: Tensor, scales: tuple[Tensor | None, ...], format: str, dtype: torch.dtype
) -> Tensor:
    """Values [experts, rows, columns] of codes and their scales: of groups, zero points and of
    experts, or of as many as all of these have rows."""
    from moe_ops.kernels.triton.experts.formats.codes import as_stored, scales_as_stored
    from moe_ops.kernels.triton.experts.operands.dequantized_weights import decode

    weight = triton_formats.weight_of(format, "")
    columns = Format.of(format).parsed.unpacked(codes.shape[2])
    of_groups, zero, of_experts = scales
    assert of_groups is not None
    stored = (scales_as_stored(of_groups, weight), zero, of_experts)
    of_rows = of_experts is not None and of_experts.numel() == codes.shape[0] * codes.shape[1]
    shared = "rows" if of_rows else ""
    return decode(as_stored(codes, weight), stored, weight, columns, dtype, shared)


expert_gemm.emulates("triton", lambda call: bool(call.x_format))
