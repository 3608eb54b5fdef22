"""Backends made of ATen calls: `aten` runs the expert products on PyTorch's own grouped GEMM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends.widths import whole_rows
from moe_ops.checks.shapes import DTYPES
from moe_ops.kernels import gpus
from moe_ops.ops.activate import activate
from moe_ops.ops.combine import combine
from moe_ops.ops.dispatch import dispatch
from moe_ops.ops.expert_gemm import (
    ExpertGemmCall,
    checked_ends,
    expert_gemm,
    row_experts,
    used_rows,
)
from moe_ops.ops.expert_wgrad import ExpertWgradCall, check_names, expert_wgrad
from moe_ops.ops.expert_wgrad_onto import ExpertWgradOntoCall, expert_wgrad_onto
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.registry.gradients import needs_grad

# PyTorch's grouped GEMM wants every stride but the last to be a multiple of 16 bytes.
ALIGNMENT = 16


def refuse_out_dtype(call: ExpertGemmCall) -> str | None:
    """Why a product that gives x's dtype cannot serve these arguments of `expert_gemm`, or None."""
    if call.out_dtype and DTYPES[call.out_dtype] is not call.x_RD.dtype:
        return f"gives x's dtype {call.x_RD.dtype}, asked for {call.out_dtype}"
    return None


def supports(call: ExpertGemmCall) -> str | None:
    x_RD, w_EFD = call.x_RD, call.w_EFD
    refusal = refuse_out_dtype(call)
    if refusal is not None or x_RD.device.type == "cpu":
        return refusal
    if x_RD.dtype != torch.bfloat16:
        return f"needs bfloat16 outside the CPU, got {x_RD.dtype}"
    on_nvidia = x_RD.device.type == "cuda" and not gpus.is_amd()
    if on_nvidia and gpus.capability(x_RD.device) < (8, 0):
        return f"needs compute capability 8.0, got {gpus.described(x_RD.device)}"
    if not (_rows_aligned(x_RD) and _rows_aligned(w_EFD)):
        strides = f"{x_RD.stride()} and {w_EFD.stride()}"
        return f"needs rows of a multiple of {ALIGNMENT} bytes, got strides {strides}"
    return None


@expert_gemm.backend("aten", reads=reads.FLOAT_GEMM, supports=supports)
def grouped_mm(call: ExpertGemmCall) -> Tensor:
    """`expert_gemm` on PyTorch's grouped GEMM, or a product per expert where strides do not fit."""
    if call.x_RD.is_cpu:
        checked_ends(call.ends_E, call.x_RD.shape[0])
    return _grouped_mm(call.x_RD, call.w_EFD, call.ends_E, call.bias_EF, call.transposed)


def _grouped_mm(
    x_RD: Tensor, w_EFD: Tensor, ends_E: Tensor, bias_EF: Tensor | None, transposed: bool
) -> Tensor:
    w_EDF = w_EFD if transposed else w_EFD.transpose(1, 2)
    used_R1 = None
    if needs_grad(x_RD, w_EFD, bias_EF):
        # The product leaves unused rows unwritten, in its result and in its gradients.
        used_R1 = used_rows(ends_E, x_RD.shape[0])[:, None]
        x_RD = torch.where(used_R1, x_RD, 0)
    # A backward multiplies by the gradient of the result, which has rows of that width.
    trains = used_R1 is None or w_EDF.shape[2] * w_EDF.element_size() % ALIGNMENT == 0
    if trains and _aligned(x_RD, w_EDF):
        y_RF = F.grouped_mm(x_RD, w_EDF, offs=ends_E.contiguous())
    else:
        y_RF = _mm_per_expert(x_RD, w_EDF, ends_E)
    if bias_EF is not None:
        bias_RF = bias_EF[row_experts(ends_E, x_RD.shape[0])]
        y_RF = (y_RF.float() + bias_RF.float()).to(x_RD.dtype)
    return y_RF if used_R1 is None else torch.where(used_R1, y_RF, 0)


@experts.backend("aten", reads=reads.FLOAT_EXPERTS, devices=("cpu",), composed=True)
def grouped_experts(call: ExpertsCall) -> Tensor:
    """`experts` stage by stage, both products on PyTorch's grouped GEMM."""
    E = call.w13_EFD.shape[0]
    x_RD, rows_R, ends_E = dispatch.reference(call.x_TD, call.ids_TK, E, call.expert_map)
    y_RF = _grouped_mm(x_RD, call.w13_EFD, ends_E, call.b13_EF, call.transposed)
    h_RI = activate.reference(y_RF, *call.activation)
    y_RD = _grouped_mm(h_RI, call.w2_EDI, ends_E, call.b2_ED, call.transposed)
    return combine.reference(y_RD, call.weights_TK, rows_R)


experts.remembers("aten")
experts.rounds("aten", whole_rows)


def supports_wgrad(call: ExpertWgradCall) -> str | None:
    a_RM, b_RN = call.a_RM, call.b_RN
    if needs_grad(a_RM, b_RN):
        return "is not differentiable, and an argument requires grad"
    if a_RM.device.type == "cpu":
        return None
    if a_RM.dtype != torch.bfloat16:
        return f"needs bfloat16 outside the CPU, got {a_RM.dtype}"
    if call.dtype is not torch.bfloat16:
        return f"gives bfloat16 outside the CPU, asked for {call.dtype}"
    on_nvidia = a_RM.device.type == "cuda" and not gpus.is_amd()
    if on_nvidia and gpus.capability(a_RM.device) < (8, 0):
        return f"needs compute capability 8.0, got {gpus.described(a_RM.device)}"
    widths = a_RM.shape[1], b_RN.shape[1]
    if any(width * a_RM.element_size() % ALIGNMENT for width in widths):
        return f"needs rows of a multiple of {ALIGNMENT} bytes, got widths of {widths}"
    return None


@expert_wgrad.backend("aten", reads=reads.WGRAD, supports=supports_wgrad)
def grouped_wgrad(call: ExpertWgradCall) -> Tensor:
    """`expert_wgrad` on PyTorch's grouped GEMM, on a CPU by a product for each expert. Named rows
    are copied."""
    if call.a_RM.is_cpu:
        return _wgrad_per_expert(call)
    a_RM, b_RN = (
        t if rows_R is None else t[rows_R.clamp(min=0)]
        for t, rows_R in ((call.a_RM, call.a_rows_R), (call.b_RN, call.b_rows_R))
    )
    ends_E = call.ends_E.contiguous()
    w_EMN = F.grouped_mm(a_RM.contiguous().t(), b_RN.contiguous(), offs=ends_E)
    # What it leaves for a group of no rows is not documented.
    has_rows_E = ends_E.diff(prepend=ends_E.new_zeros(1)) > 0
    return torch.where(has_rows_E[:, None, None], w_EMN, 0)


def _wgrad_per_expert(call: ExpertWgradCall) -> Tensor:
    """A product for each expert that has rows, each written where it belongs."""
    a_RM, b_RN = call.a_RM, call.b_RN
    # Of which neither the rows nor their sum lose anything: the sum is what is rounded.
    dtype = torch.promote_types(a_RM.dtype, call.dtype)
    ends = checked_ends(call.ends_E, call.rows)
    check_names(call, ends[-1])
    # Zeros for all would take a sixth of a backward.
    w_EMN = a_RM.new_empty(len(ends), a_RM.shape[1], b_RN.shape[1], dtype=call.dtype)
    start = 0
    for e, end in enumerate(ends):
        if end <= start:
            w_EMN[e].zero_()
        else:
            a, b = _rows_from(call, start, end)
            if call.dtype is a_RM.dtype:
                torch.mm(a.t(), b, out=w_EMN[e])
            else:
                w_EMN[e] = a.t().to(dtype) @ b.to(dtype)
        start = end
    return w_EMN


def _rows_from(call: ExpertWgradCall, start: int, end: int) -> tuple[Tensor, Tensor]:
    """The rows of a and of b from one to another, copied where they are named."""
    a, b = (
        t[start:end] if rows_R is None else t[rows_R[start:end]]
        for t, rows_R in ((call.a_RM, call.a_rows_R), (call.b_RN, call.b_rows_R))
    )
    return a, b


@expert_wgrad_onto.backend("aten", reads=reads.WGRAD_ONTO, devices=("cpu",))
def wgrad_onto_per_expert(call: ExpertWgradOntoCall) -> None:
    """`expert_wgrad_onto` by a product for each expert that has rows; named rows are copied."""
    start, sum_EMN = 0, call.sum_EMN
    ends = checked_ends(call.wgrad.ends_E, call.wgrad.rows)
    check_names(call.wgrad, ends[-1])
    for e, end in enumerate(ends):
        if end > start:
            a, b = _rows_from(call.wgrad, start, end)
            # A product that adds by itself would not round as a sum of results does.
            sum_EMN[e] += a.t().float() @ b.float()
        start = max(start, end)


def _aligned(x_RD: Tensor, w_EDF: Tensor) -> bool:
    """Whether PyTorch's grouped GEMM takes these strides."""
    return x_RD.numel() > 0 and all(_rows_aligned(t) for t in (x_RD, w_EDF))


def _rows_aligned(t: Tensor) -> bool:
    """Whether one of the last two axes is contiguous and the other strides over aligned rows."""
    for inner, outer in ((-1, -2), (-2, -1)):
        stride = t.stride(outer)
        if t.stride(inner) == 1 and stride >= t.shape[inner]:
            return stride * t.element_size() % ALIGNMENT == 0
    return False


def _mm_per_expert(x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
    pieces = []
    start = 0
    for e, end in enumerate(ends_E.tolist()):
        if end > start:
            pieces.append(x_RD[start:end] @ w_EDF[e])
        start = end
    tail = x_RD.new_empty(x_RD.shape[0] - start, w_EDF.shape[2])
    return torch.cat([*pieces, tail])
