"""The CPU backend: weights streamed once by our kernels at few rows per expert, grouped GEMM above.

It never copies a weight into another layout. oneDNN's prepacked linears were measured and left out:
they need a second copy of every weight (docs/PERFORMANCE.md has the figures).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends import aten
from moe_ops.kernels import cpu as kernels
from moe_ops.ops.activate import activate
from moe_ops.ops.combine import combine
from moe_ops.ops.dispatch import dispatch, local_ids
from moe_ops.ops.expert_gemm import expert_gemm, row_experts
from moe_ops.ops.experts import experts
from moe_ops.spec import needs_grad

# Mean rows per expert from which PyTorch's grouped GEMM is faster than streaming: measured on two
# cores with the shapes of Qwen3-30B-A3B, see docs/PERFORMANCE.md.
STREAM_MAX_ROWS = {torch.bfloat16: 12, torch.float32: 12}


def _refuse(x: Tensor, *weights: Tensor | None, transposed: bool) -> str | None:
    if x.dtype not in STREAM_MAX_ROWS:
        return f"needs float32 or bfloat16, got {x.dtype}"
    if transposed:
        return "needs weights whose rows are outputs, got transposed ones"
    if needs_grad(x, *weights):
        return "is not differentiable, and an argument requires grad"
    if any(w is not None and w.dim() == 3 and w.stride(-1) != 1 for w in weights):
        return "needs weights contiguous along their last axis"
    return kernels.unavailable()


def supports_gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
) -> str | None:
    return _refuse(x_RD, w_EFD, bias_EF, transposed=transposed)


@expert_gemm.backend("cpu", supports=supports_gemm, devices=("cpu",))
def stream_gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """`expert_gemm` that reads each weight once."""
    R = x_RD.shape[0]
    if STREAM_MAX_ROWS[x_RD.dtype] * w_EFD.shape[0] < R:
        return aten.grouped_mm(x_RD, w_EFD, ends_E, bias_EF, transposed)
    y_RF = x_RD.new_empty(R, w_EFD.shape[1])
    kernels.gemm(_rows(x_RD), w_EFD, ends_E.contiguous(), y_RF)
    return y_RF if bias_EF is None else _add_bias(y_RF, bias_EF, row_experts(ends_E, R))


def supports_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    expert_map: Tensor | None = None,
    transposed: bool = False,
    kind: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> str | None:
    refusal = _refuse(x_TD, w13_EFD, w2_EDI, b13_EF, b2_ED, transposed=transposed)
    return refusal or (
        "is not differentiable, and the weights require grad" if needs_grad(weights_TK) else None
    )


@experts.backend("cpu", supports=supports_experts, devices=("cpu",))
def stream_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    expert_map: Tensor | None = None,
    transposed: bool = False,
    kind: str = "silu",
    gated: bool = True,
    interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_shift: float = 0.0,
) -> Tensor:
    """`experts` that reads each weight once and never copies a token."""
    T, K = experts_TK.shape
    R, E = T * K, w13_EFD.shape[0]
    if STREAM_MAX_ROWS[x_TD.dtype] * E < R:
        x_RD, rows_R, ends_E = dispatch.reference(x_TD, experts_TK, E, expert_map)
        y_RF = aten.grouped_mm(x_RD, w13_EFD, ends_E, b13_EF)
        h_RI = activate.reference(y_RF, kind, gated, interleaved, alpha, limit, up_shift)
        return combine.reference(aten.grouped_mm(h_RI, w2_EDI, ends_E, b2_ED), weights_TK, rows_R)
    ids = experts_TK.contiguous() if expert_map is None else local_ids(experts_TK, E, expert_map)
    order_R, ends_E = kernels.sort_pairs(ids, E)
    y_RF = x_TD.new_empty(R, w13_EFD.shape[1])
    kernels.gemm(_rows(x_TD), w13_EFD, ends_E, y_RF, source_R=order_R, source_div=K)
    if b13_EF is not None:
        y_RF = _add_bias(y_RF, b13_EF, row_experts(ends_E, R))
    h_RI = activate.reference(y_RF, kind, gated, interleaved, alpha, limit, up_shift)
    # Rows go back to the order of the pairs; those of experts that are not here stay zero.
    skips = R > 0 and int(ends_E[-1]) < R
    y_RD = x_TD.new_zeros(R, x_TD.shape[1]) if skips else x_TD.new_empty(R, x_TD.shape[1])
    kernels.gemm(h_RI, w2_EDI, ends_E, y_RD, target_R=order_R)
    if b2_ED is not None:
        here = (ids.reshape(-1) >= 0) & (ids.reshape(-1) < E)
        y_RD = torch.where(
            here[:, None], _add_bias(y_RD, b2_ED, ids.reshape(-1).long().clamp(0, E - 1)), 0
        )
    products = y_RD.view(T, K, x_TD.shape[1]) * weights_TK[..., None]
    return products.sum(1, dtype=torch.float32).to(x_TD.dtype)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _add_bias(y_RF: Tensor, bias_EF: Tensor, expert_R: Tensor) -> Tensor:
    return (y_RF.float() + bias_EF[expert_R].float()).to(y_RF.dtype)
