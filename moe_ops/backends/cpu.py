"""The CPU backend: our kernels, which read each weight once. With AMX, PyTorch's grouped GEMM is
faster from some number of rows per expert on.

It never copies a weight into another layout: oneDNN's prepacked linears are left out because
they need a second copy of every weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ops.backends import aten, cpu_codes, reads
from moe_ops.backends.cpu_panels import least_panel_rows
from moe_ops.checks.shapes import DTYPES
from moe_ops.kernels import cpu as kernels
from moe_ops.ops.dispatch import local_ids
from moe_ops.ops.expert_gemm import ExpertGemmCall, checked_ends, expert_gemm
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.route import RouteCall, route
from moe_ops.ops.route_recording import RouteRecordingCall, route_recording, write_rows
from moe_ops.ops.route_replaying import RouteReplayingCall, route_replaying
from moe_ops.registry.backend import Rows
from moe_ops.registry.gradients import needs_grad

# Mean rows per expert up to which our kernels are faster than PyTorch's grouped GEMM (None: with
# any number). Without AMX, whose tiles they do not use, they take a third of its time in bfloat16
# and half in float32 on two cores of an EPYC; with it these limits were measured on a Xeon with the
# shapes of Qwen3-30B-A3B.
GEMM_MAX_ROWS: dict[torch.dtype, int | None] = {torch.bfloat16: None, torch.float32: None}
EXPERTS_MAX_ROWS: dict[torch.dtype, int | None] = {torch.bfloat16: None, torch.float32: None}
if torch.cpu._is_amx_tile_supported():
    GEMM_MAX_ROWS |= {torch.bfloat16: 4, torch.float32: 32}
    EXPERTS_MAX_ROWS |= {torch.bfloat16: 10, torch.float32: 32}


def _refuse(dtype: torch.dtype, w: Tensor, *others: Tensor | None, transposed: bool) -> str | None:
    if dtype not in EXPERTS_MAX_ROWS:
        return f"needs float32 or bfloat16, got {dtype}"
    if transposed:
        return "needs weights whose rows are outputs, got transposed ones"
    if needs_grad(w, *others):
        return "is not differentiable, and an argument requires grad"
    if w.stride(2) != 1:
        return "needs weights contiguous along their last axis"
    return None


def _refuse_bias(dtype: torch.dtype, bias: Tensor | None) -> str | None:
    if bias is None or (bias.dtype == dtype and bias.is_contiguous()):
        return None
    return f"needs contiguous biases of x's dtype, got {bias.dtype} with strides {bias.stride()}"


def supports_gemm(call: ExpertGemmCall) -> str | None:
    return (
        aten.refuse_out_dtype(call)
        or _refuse(call.x_RD.dtype, call.w_EFD, call.x_RD, call.bias_EF, transposed=call.transposed)
        or _refuse_bias(call.x_RD.dtype, call.bias_EF)
        or kernels.unavailable()
    )


def most_gemm_rows(call: ExpertGemmCall) -> int | None:
    rows = GEMM_MAX_ROWS[call.x_RD.dtype]
    return None if rows is None else rows * call.w_EFD.shape[0]


@expert_gemm.backend(
    "cpu",
    reads=reads.FLOAT_GEMM,
    supports=supports_gemm,
    rows=Rows(preferred=most_gemm_rows),
    devices=("cpu",),
    priority=1,
    arithmetic=lambda call: "cpu",
)
def stream_gemm(call: ExpertGemmCall) -> Tensor:
    """`expert_gemm` that reads each weight once."""
    x_RD, w_EFD, ends_E = call.x_RD, call.w_EFD, call.ends_E
    y_RF = x_RD.new_empty(x_RD.shape[0], w_EFD.shape[1])
    ends_E, least = ends_E.contiguous(), least_panel_rows(codes=False)
    if not kernels.gemm(_rows(x_RD), w_EFD, ends_E, call.bias_EF, y_RF, least):
        checked_ends(ends_E, x_RD.shape[0])
    return y_RF


def supports_experts(call: ExpertsCall) -> str | None:
    weights_TK, b13_EF, b2_ED, dtype = call.weights_TK, call.b13_EF, call.b2_ED, call.dtype
    if weights_TK.dtype is not torch.float32 and weights_TK.dtype is not dtype:
        return f"needs routing weights in float32 or x's dtype, got {weights_TK.dtype}"
    w13_EFD, w2_EDI, transposed = call.w13_EFD, call.w2_EDI, call.transposed
    if w2_EDI.stride(2) != 1:
        return "needs weights contiguous along their last axis"
    others = (w2_EDI, call.x_TD, b13_EF, b2_ED, weights_TK)
    refusal = _refuse(dtype, w13_EFD, *others, transposed=transposed)
    if refusal is None and not b13_EF is b2_ED is None:
        refusal = _refuse_bias(dtype, b13_EF) or _refuse_bias(dtype, b2_ED)
    if refusal is not None:
        return refusal
    return cpu_codes.refusal(call) if call.w_format else kernels.unavailable()


def most_tokens(call: ExpertsCall) -> int | None:
    if call.w_format:
        return None
    rows = EXPERTS_MAX_ROWS[call.x_TD.dtype]
    return None if rows is None else rows * call.w13_EFD.shape[0] // call.ids_TK.shape[1]


def arithmetic(call: ExpertsCall) -> str:
    """How the kernels compute a token's row in a batch invariant call: each product of a row by
    itself, of floats by panels and of codes by streams, then its experts in the order of its
    choices."""
    return cpu_codes.arithmetic(call) if call.w_format else "cpu"


@experts.backend(
    "cpu",
    reads=(*reads.EXPERTS, *reads.STATIC_SCALES, *reads.CODES),
    supports=supports_experts,
    rows=Rows(preferred=most_tokens),
    devices=("cpu",),
    priority=1,
    arithmetic=arithmetic,
)
def stream_experts(call: ExpertsCall) -> Tensor:
    """`experts` that reads each weight once, in one call, and never copies a token."""
    ids_TK = call.ids_TK
    if call.expert_map is not None:
        ids_TK = local_ids(ids_TK, call.w13_EFD.shape[0], call.expert_map).view(ids_TK.shape)
    if call.w_format:
        return cpu_codes.run(call, _rows(call.x_TD), ids_TK.contiguous())
    return kernels.experts(
        _rows(call.x_TD), call.weights_TK.contiguous(), ids_TK.contiguous(),
        call.w13_EFD, call.w2_EDI, call.b13_EF, call.b2_ED,
        call.kind, call.gated, call.interleaved, call.alpha, call.limit, call.up_shift,
        least_panel_rows(codes=False),
    )  # fmt: skip


experts.remembers("cpu")


def supports_route(call: RouteCall) -> str | None:
    if needs_grad(call.logits_TE, call.bias_E, call.per_expert_scale_E):
        return "is not differentiable, and an argument requires grad"
    return kernels.unavailable()


@route.backend(
    "cpu",
    reads=reads.ROUTE,
    supports=supports_route,
    devices=("cpu",),
    priority=1,
    arithmetic=lambda call: "cpu",
)
def route_tokens(call: RouteCall) -> tuple[Tensor, Tensor]:
    """`route` in one pass over each token's logits."""
    routed = _routed(call, None)
    assert routed is not None, "only given experts are refused"
    return routed


def _routed(call: RouteCall, given_TK: Tensor | None) -> tuple[Tensor, Tensor] | None:
    c = call
    routed = kernels.route(
        c.logits_TE.float().contiguous(), c.top_k, _float32(c.bias_E),
        _float32(c.per_expert_scale_E), c.score, c.select_on, c.n_group, c.topk_group,
        c.group_reduce, c.group_fill, c.softmax_selected, c.renormalize, c.eps, c.min_sum, c.scale,
        given_TK,
    )  # fmt: skip
    if routed is None:
        return None
    weights_TK, ids_TK = routed
    dtype = DTYPES[c.out_dtype]
    return (weights_TK if dtype == torch.float32 else weights_TK.to(dtype)), ids_TK


@route_recording.backend(
    "cpu",
    reads=reads.RECORDING,
    supports=lambda call: supports_route(call.routing),
    devices=("cpu",),
    priority=1,
    arithmetic=lambda call: "cpu",
)
def route_and_record(call: RouteRecordingCall) -> tuple[Tensor, Tensor]:
    """`route_recording` by the kernel of `route`, whose results are then copied."""
    weights_TK, ids_TK = route_tokens(call.routing)
    write_rows(call.ring_ids_SK, call.at, ids_TK)
    if call.ring_weights_SK is not None:
        write_rows(call.ring_weights_SK, call.at, weights_TK)
    return weights_TK, ids_TK


@route_replaying.backend(
    "cpu",
    reads=reads.ROUTE,
    supports=lambda call: supports_route(call.routing),
    devices=("cpu",),
    priority=1,
    arithmetic=lambda call: "cpu",
)
def route_as_recorded(call: RouteReplayingCall) -> tuple[Tensor, Tensor]:
    """`route_replaying` in one pass over each token's logits."""
    T, E = call.routing.logits_TE.shape
    routed = _routed(call.routing, call.given_ids_SK[:T])
    if routed is None:
        raise ValueError(
            f"given_ids_SK has ids that none of the {E} experts of logits_TE has, which a router "
            "of more may have chosen; give ids from 0 on below that, or rows that begin with -1"
        )
    return routed


def _float32(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float().contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
