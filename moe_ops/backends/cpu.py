"""The CPU backend: our kernels read each weight once, which is fastest at few rows per expert.

It never copies a weight into another layout: oneDNN's prepacked linears are left out because
they need a second copy of every weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ops.backends import aten
from moe_ops.gradients import needs_grad
from moe_ops.kernels import cpu as kernels
from moe_ops.ops.dispatch import local_ids
from moe_ops.ops.expert_gemm import checked_ends, expert_gemm
from moe_ops.ops.experts import experts
from moe_ops.ops.route import route
from moe_ops.shapes import DTYPES

# Mean rows per expert up to which reading is faster than PyTorch's grouped GEMM (None: with any
# number): measured on two cores with the shapes of Qwen3-30B-A3B, see docs/PERFORMANCE.md.
GEMM_MAX_ROWS: dict[torch.dtype, int | None] = {torch.bfloat16: 4, torch.float32: 32}
EXPERTS_MAX_ROWS: dict[torch.dtype, int | None] = {torch.bfloat16: 10, torch.float32: 32}
if torch.backends.cpu.get_cpu_capability() == "AVX2":
    # PyTorch's products of bfloat16 are slow there: ours take a third of their time or less.
    GEMM_MAX_ROWS[torch.bfloat16] = EXPERTS_MAX_ROWS[torch.bfloat16] = None


def _refuse(x: Tensor, w: Tensor, *others: Tensor | None, transposed: bool) -> str | None:
    if x.dtype not in EXPERTS_MAX_ROWS:
        return f"needs float32 or bfloat16, got {x.dtype}"
    if transposed:
        return "needs weights whose rows are outputs, got transposed ones"
    if needs_grad(x, w, *others):
        return "is not differentiable, and an argument requires grad"
    if w.stride(2) != 1:
        return "needs weights contiguous along their last axis"
    return kernels.unavailable()


def _refuse_bias(x: Tensor, bias: Tensor | None) -> str | None:
    if bias is None or (bias.dtype == x.dtype and bias.is_contiguous()):
        return None
    return f"needs contiguous biases of x's dtype, got {bias.dtype} with strides {bias.stride()}"


def supports_gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
    x_scale_RG: Tensor | None = None,
    w_scale_EFG: Tensor | None = None,
    w_zero_EFG: Tensor | None = None,
    alpha_E: Tensor | None = None,
    x_format: str = "",
    w_format: str = "",
    out_dtype: str = "",
) -> str | None:
    return (
        aten.refuse_formats(x_RD, alpha_E, w_format, out_dtype)
        or _refuse(x_RD, w_EFD, bias_EF, transposed=transposed)
        or _refuse_bias(x_RD, bias_EF)
    )


def most_gemm_rows(x_RD: Tensor, w_EFD: Tensor, *args: Any, **kwargs: Any) -> int | None:
    rows = GEMM_MAX_ROWS[x_RD.dtype]
    return None if rows is None else rows * w_EFD.shape[0]


@expert_gemm.backend(
    "cpu", supports=supports_gemm, most_rows=most_gemm_rows, devices=("cpu",), priority=1
)
def stream_gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None = None,
    transposed: bool = False,
    x_scale_RG: Tensor | None = None,
    w_scale_EFG: Tensor | None = None,
    w_zero_EFG: Tensor | None = None,
    alpha_E: Tensor | None = None,
    x_format: str = "",
    w_format: str = "",
    out_dtype: str = "",
) -> Tensor:
    """`expert_gemm` that reads each weight once."""
    y_RF = x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])
    if not kernels.gemm(_rows(x_RD), w_EFD, ends_E.contiguous(), bias_EF, y_RF):
        checked_ends(ends_E, x_RD.shape[0])
    return y_RF


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
    w13_scale_EFG: Tensor | None = None,
    w2_scale_EDG: Tensor | None = None,
    w13_zero_EFG: Tensor | None = None,
    w2_zero_EDG: Tensor | None = None,
    alpha13_E: Tensor | None = None,
    alpha2_E: Tensor | None = None,
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
    w_format: str = "",
    x_format: str = "",
) -> str | None:
    if weights_TK.dtype is not torch.float32 and weights_TK.dtype is not x_TD.dtype:
        return f"needs routing weights in float32 or x's dtype, got {weights_TK.dtype}"
    if w_format or alpha13_E is not None or alpha2_E is not None:
        return aten.refuse_experts(x_TD, alpha13_E, alpha2_E, w_format)
    if w2_EDI.stride(2) != 1:
        return "needs weights contiguous along their last axis"
    refusal = _refuse(x_TD, w13_EFD, w2_EDI, b13_EF, b2_ED, weights_TK, transposed=transposed)
    if refusal is not None or b13_EF is b2_ED is None:
        return refusal
    return _refuse_bias(x_TD, b13_EF) or _refuse_bias(x_TD, b2_ED)


def most_tokens(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    *args: Any,
    **kwargs: Any,
) -> int | None:
    rows = EXPERTS_MAX_ROWS[x_TD.dtype]
    return None if rows is None else rows * w13_EFD.shape[0] // experts_TK.shape[1]


@experts.backend(
    "cpu", supports=supports_experts, most_rows=most_tokens, devices=("cpu",), priority=1
)
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
    w13_scale_EFG: Tensor | None = None,
    w2_scale_EDG: Tensor | None = None,
    w13_zero_EFG: Tensor | None = None,
    w2_zero_EDG: Tensor | None = None,
    alpha13_E: Tensor | None = None,
    alpha2_E: Tensor | None = None,
    x_scale: Tensor | None = None,
    h_scale: Tensor | None = None,
    w_format: str = "",
    x_format: str = "",
) -> Tensor:
    """`experts` that reads each weight once, in one call, and never copies a token."""
    ids_TK = experts_TK
    if expert_map is not None:
        ids_TK = local_ids(experts_TK, w13_EFD.shape[0], expert_map).view(experts_TK.shape)
    return kernels.experts(
        _rows(x_TD), weights_TK.contiguous(), ids_TK.contiguous(), w13_EFD, w2_EDI, b13_EF, b2_ED,
        kind, gated, interleaved, alpha, limit, up_shift,
    )  # fmt: skip


def supports_route(
    logits_TE: Tensor,
    top_k: int,
    bias_E: Tensor | None = None,
    per_expert_scale_E: Tensor | None = None,
    *scoring: Any,
    **more: Any,
) -> str | None:
    if needs_grad(logits_TE, bias_E, per_expert_scale_E):
        return "is not differentiable, and an argument requires grad"
    return kernels.unavailable()


@route.backend("cpu", supports=supports_route, devices=("cpu",), priority=1)
def route_tokens(
    logits_TE: Tensor,
    top_k: int,
    bias_E: Tensor | None = None,
    per_expert_scale_E: Tensor | None = None,
    score: str = "softmax",
    select_on: str = "score",
    n_group: int = 1,
    topk_group: int = 1,
    group_reduce: str = "top2sum",
    group_fill: str = "-inf",
    softmax_selected: bool = False,
    renormalize: bool = False,
    eps: float = 0.0,
    min_sum: float = 0.0,
    scale: float = 1.0,
    out_dtype: str = "float32",
) -> tuple[Tensor, Tensor]:
    """`route` in one pass over each token's logits."""
    weights_TK, experts_TK = kernels.route(
        logits_TE.float().contiguous(), top_k, _float32(bias_E), _float32(per_expert_scale_E),
        score, select_on, n_group, topk_group, group_reduce, group_fill,
        softmax_selected, renormalize, eps, min_sum, scale,
    )  # fmt: skip
    dtype = DTYPES[out_dtype]
    return (weights_TK if dtype == torch.float32 else weights_TK.to(dtype)), experts_TK


def _float32(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float().contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
