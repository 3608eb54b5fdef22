"""The Triton backends for NVIDIA GPUs: routing, one product, and the experts by their rows.

triton.tiny     up to 64 pairs of token and choice: two launches, nothing sorted
triton.rows     few rows an expert: weights stream past the rows
triton.grouped  many rows an expert: the rate of the matrix units decides; and all of float32
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_ops.backends.aten import refuse_experts, refuse_formats
from moe_ops.gradients import needs_grad
from moe_ops.kernels.triton import TINY_PAIRS, TINY_TOKENS
from moe_ops.ops.expert_gemm import expert_gemm
from moe_ops.ops.experts import experts
from moe_ops.ops.route import route
from moe_ops.shapes import DTYPES

LEAST_CAPABILITY = (8, 0)
HALF = (torch.bfloat16, torch.float16)
FLOATS = (*HALF, torch.float32)
T = TypeVar("T", Tensor, Tensor | None)

# Measured on an H200 over six layers (moe_ops/tuned/h200.json): up to how many tokens triton.tiny
# is the fastest, and up to how many rows an expert triton.rows is, if an expert's second weight has
# fewer elements than LARGE and if it has not.
MOST_TINY_TOKENS, MOST_ROWS_PER_EXPERT, MOST_ROWS_PER_LARGE_EXPERT = 4, 32, 16
LARGE = 2**23


@functools.cache
def unavailable() -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    return None


def _refuse_device(t: Tensor) -> str | None:
    if unavailable() is not None:
        return unavailable()
    if t.device.type == "cuda":
        capability = torch.cuda.get_device_capability(t.device)
        if capability < LEAST_CAPABILITY:
            return f"needs compute capability 8.0, got {capability[0]}.{capability[1]}"
    return None


def _either(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


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
    return _refuse_device(logits_TE)


@route.backend("triton", supports=supports_route, devices=("cuda",), priority=1)
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
    """`route` in one launch, a warp for each token."""
    from moe_ops.kernels.triton import routing
    from moe_ops.kernels.triton.replay import replay

    fill = 0.0 if group_fill == "zero" else float("-inf")
    router = (
        score, select_on == "logit", n_group, topk_group, group_reduce == "top2sum", fill,
        softmax_selected, renormalize, eps, min_sum, scale,
    )  # fmt: skip
    tensors = _rows(logits_TE), _contiguous(bias_E), _contiguous(per_expert_scale_E)
    return replay(routing.route, tensors, (top_k, router, DTYPES[out_dtype]))


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
    refusal = refuse_formats(x_RD, alpha_E, w_format, out_dtype)
    if refusal is not None:
        return refusal
    if x_RD.dtype not in FLOATS:
        return f"needs {_either(FLOATS)}, got {x_RD.dtype}"
    if needs_grad(x_RD, w_EFD, bias_EF):
        return "is not differentiable, and an argument requires grad"
    return _refuse_device(x_RD)


@expert_gemm.backend("triton", supports=supports_gemm, devices=("cuda",), priority=1)
def grouped_gemm(
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
    """`expert_gemm` by the kernels of triton.grouped; unused rows stay unwritten."""
    from moe_ops.kernels.triton import grouped

    w_EFD = w_EFD.transpose(1, 2) if transposed else w_EFD
    return grouped.grouped_rows(_rows(x_RD), ends_E.contiguous(), w_EFD, _rows(bias_EF))


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
    refusal = refuse_experts(x_TD, alpha13_E, alpha2_E, w_format)
    if refusal is not None:
        return refusal
    if x_TD.dtype not in FLOATS:
        return f"needs {_either(FLOATS)}, got {x_TD.dtype}"
    if needs_grad(x_TD, weights_TK, w13_EFD, w2_EDI, b13_EF, b2_ED):
        return "is not differentiable, and an argument requires grad"
    return _refuse_device(x_TD)


def supports_half(x_TD: Tensor, *call: Any, **more: Any) -> str | None:
    """The support of kernels that have no float32."""
    refusal = supports_experts(x_TD, *call, **more)
    if refusal is None and x_TD.dtype not in HALF:
        return f"needs {_either(HALF)}, got {x_TD.dtype}"
    return refusal


def max_tiny_tokens(
    x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *rest: Any, **more: Any
) -> int:
    return min(TINY_TOKENS, TINY_PAIRS // experts_TK.shape[1])


def most_tiny_tokens(*call: Any, **more: Any) -> int:
    return MOST_TINY_TOKENS


def most_rows_tokens(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None = None,
    b2_ED: Tensor | None = None,
    expert_map: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> int:
    experts = w13_EFD.shape[0] if expert_map is None else expert_map.shape[0]
    large = w2_EDI.shape[1] * w2_EDI.shape[2] >= LARGE
    most = MOST_ROWS_PER_LARGE_EXPERT if large else MOST_ROWS_PER_EXPERT
    return most * experts // experts_TK.shape[1]


def run_experts(
    kernel: str,
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None,
    b2_ED: Tensor | None,
    expert_map: Tensor | None,
    transposed: bool,
    act: tuple[str, bool, bool, float, float | None, float],
    residual_TD: Tensor | None = None,
) -> Tensor:
    """`experts` by the kernels of this module of `moe_ops.kernels.triton`, added to a residual if
    there is one."""
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    from moe_ops.kernels.triton.replay import replay

    tensors = (
        _rows(x_TD), _contiguous(weights_TK), _contiguous(experts_TK), w13_EFD, w2_EDI,
        _rows(b13_EF), _rows(b2_ED), _contiguous(expert_map), _contiguous(residual_TD),
    )  # fmt: skip
    out_TD: Tensor = replay(_launch_experts, tensors, (kernel, transposed, act))
    return out_TD


def _launch_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None,
    b2_ED: Tensor | None,
    expert_map: Tensor | None,
    residual_TD: Tensor | None,
    kernel: str,
    transposed: bool,
    act: tuple[str, bool, bool, float, float | None, float],
) -> Tensor:
    from moe_ops.kernels.triton.weights import Experts

    layer = Experts(
        w13_EFD=w13_EFD, w2_EDI=w2_EDI, b13_EF=b13_EF, b2_ED=b2_ED, transposed=transposed, act=act
    )
    module = importlib.import_module(f"moe_ops.kernels.triton.{kernel}")
    out_TD: Tensor = module.run(
        x_TD, weights_TK, experts_TK, layer, expert_map, residual_TD=residual_TD
    )
    return out_TD


def _experts_on(kernel: str) -> Callable[..., Tensor]:
    """The backend whose kernels are in this module of `moe_ops.kernels.triton`."""

    def run(
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
        act = (kind, gated, interleaved, alpha, limit, up_shift)
        tensors = (x_TD, weights_TK, experts_TK, w13_EFD, w2_EDI, b13_EF, b2_ED, expert_map)
        return run_experts(kernel, *tensors, transposed, act)

    return run


for name, supports, priority, most, maximum in (
    ("tiny", supports_half, 3, most_tiny_tokens, max_tiny_tokens),
    ("rows", supports_half, 2, most_rows_tokens, None),
    ("grouped", supports_experts, 1, None, None),
):
    experts.backend(
        f"triton.{name}",
        supports=supports,
        most_rows=most,
        max_rows=maximum,
        devices=("cuda",),
        priority=priority,
    )(_experts_on(name))


def _rows(t: T) -> T:
    """A tensor, if any, whose rows are contiguous."""
    return t if t is None or t.stride(-1) == 1 else t.contiguous()


def _contiguous(t: T) -> T:
    return t if t is None or t.is_contiguous() else t.contiguous()
