"""The Triton backends of the ops that training adds, for NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends.strides import contiguous, with_rows
from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.backends.triton_arithmetic import of_training
from moe_ops.backends.triton_device import FLOATS, either, refuse_device
from moe_ops.backends.triton_hopper import refuse_gemm, refuse_wgrad, refused_products
from moe_ops.backends.triton_support import supports_experts
from moe_ops.kernels.triton import Act
from moe_ops.ops.activate import Options, options_of
from moe_ops.ops.activate_backward import ActivateBackwardCall, activate_backward
from moe_ops.ops.expert_wgrad import ExpertWgradCall, expert_wgrad
from moe_ops.ops.expert_wgrad_onto import ExpertWgradOntoCall, expert_wgrad_onto
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.experts_backward import ExpertsBackwardCall, experts_backward
from moe_ops.ops.experts_saving import ExpertsSavingCall, experts_saving
from moe_ops.registry.gradients import needs_grad


def supports_wgrad(call: ExpertWgradCall) -> str | None:
    for dtype in (call.a_RM.dtype, call.dtype):
        if dtype not in FLOATS:
            return f"needs {either(FLOATS)}, got {dtype}"
    if needs_grad(call.a_RM, call.b_RN):
        return "is not differentiable, and an argument requires grad"
    return refuse_device(call.a_RM)


@expert_wgrad.backend(
    "triton", reads=reads.WGRAD, supports=supports_wgrad, devices=("cuda",), priority=1
)
def launch_wgrad(call: ExpertWgradCall) -> Tensor:
    """`expert_wgrad` in one launch; rows that are named are read where they are."""
    return _wgrad(call)


def _wgrad(call: ExpertWgradCall, before: Before = None) -> Tensor:
    from moe_ops.kernels.triton.replay import replay

    return replay(_launch_wgrad, _operands(call), (call.out_dtype,), before)


def _launch_wgrad(
    a_RM: Tensor, b_RN: Tensor, ends_E: Tensor, a_rows_R: Tensor | None, b_rows_R: Tensor | None,
    out_dtype: str,
) -> Tensor:  # fmt: skip
    from moe_ops.kernels.triton.wgrad import wgrad

    call = ExpertWgradCall(a_RM, b_RN, ends_E, a_rows_R, b_rows_R, out_dtype)
    wgmma = refuse_wgrad(call) is None
    return wgrad(a_RM, b_RN, ends_E, a_rows_R, b_rows_R, call.dtype, wgmma)


def _operands(call: ExpertWgradCall) -> tuple[Tensor | None, ...]:
    c = call
    rows = contiguous(c.a_rows_R), contiguous(c.b_rows_R)
    return with_rows(c.a_RM), with_rows(c.b_RN), contiguous(c.ends_E), *rows


compiles_ahead(expert_wgrad, "triton", _wgrad)


@expert_wgrad_onto.backend(
    "triton",
    reads=reads.WGRAD_ONTO,
    supports=lambda call: supports_wgrad(call.wgrad),
    devices=("cuda",),
    priority=1,
)
def launch_wgrad_onto(call: ExpertWgradOntoCall) -> None:
    """`expert_wgrad_onto` in one launch, whose programs add their tiles where these lie."""
    _wgrad_onto(call)


def _wgrad_onto(call: ExpertWgradOntoCall, before: Before = None) -> None:
    from moe_ops.kernels.triton.replay import replay
    from moe_ops.kernels.triton.wgrad import wgrad_onto

    replay(wgrad_onto, (*_operands(call.wgrad), call.sum_EMN), (), before)


compiles_ahead(expert_wgrad_onto, "triton", _wgrad_onto)


def supports_activate_backward(call: ActivateBackwardCall) -> str | None:
    for dtype in (call.y_RF.dtype, call.weights_TK.dtype):
        if dtype not in FLOATS:
            return f"needs {either(FLOATS)}, got {dtype}"
    if needs_grad(call.dh_RI, call.y_RF, call.weights_TK):
        return "is not differentiable, and an argument requires grad"
    return refuse_device(call.y_RF)


@activate_backward.backend(
    "triton",
    reads=(*reads.ACTIVATION, "for_weights"),
    supports=supports_activate_backward,
    devices=("cuda",),
    priority=1,
)
def launch_activate_backward(call: ActivateBackwardCall) -> tuple[Tensor, Tensor, Tensor]:
    """`activate_backward` in one launch behind one that clears the gradients of weights."""
    return _activate_backward(call)


def _activate_backward(
    call: ActivateBackwardCall, before: Before = None
) -> tuple[Tensor, Tensor, Tensor]:
    from moe_ops.kernels.triton.replay import replay

    c = call
    tensors = with_rows(c.dh_RI), with_rows(c.y_RF), contiguous(c.weights_TK), contiguous(c.rows_R)
    return replay(_launch_activate_backward, tensors, (options_of(c), c.for_weights), before)


def _launch_activate_backward(
    dh_RI: Tensor, y_RF: Tensor, weights_TK: Tensor, rows_R: Tensor, act: Options,
    for_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from moe_ops.kernels.triton.activate_backward import activate_backward as launched

    return launched(dh_RI, y_RF, weights_TK, rows_R, Act(*act), for_weights)


compiles_ahead(activate_backward, "triton", _activate_backward)


def supports_saving(call: ExpertsSavingCall) -> str | None:
    return supports_experts(call.layer)


@experts_saving.backend(
    "triton", reads=reads.FLOAT_EXPERTS, supports=supports_saving, devices=("cuda",), priority=1,
    arithmetic=of_training,
)  # fmt: skip
def launch_saving(call: ExpertsSavingCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`experts_saving` by the products of triton.grouped; tokens are read where they are."""
    return _saving(call)


def _saving(
    call: ExpertsSavingCall, before: Before = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from moe_ops.kernels.triton.replay import replay

    c = call.layer
    tensors = (
        with_rows(c.x_TD), contiguous(c.weights_TK), contiguous(c.ids_TK), c.w13_EFD, c.w2_EDI,
        contiguous(c.b13_EF), contiguous(c.b2_ED), contiguous(c.expert_map),
    )  # fmt: skip
    return replay(_launch_saving, tensors, (c.transposed, c.activation), before)


def _launch_saving(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch with the tensors of `_saving`, and its other arguments behind them."""
    from moe_ops.kernels.triton.experts.training import saving

    x_TD, weights_TK, ids_TK, w13_EFD, w2_EDI, b13_EF, b2_ED, expert_map, transposed, act = given
    up, down = refused_products(
        ExpertsCall(
            x_TD, weights_TK, ids_TK, w13_EFD, w2_EDI, b13_EF, b2_ED, expert_map, transposed, *act
        ),
        activates=False,
    )
    return saving(
        x_TD, weights_TK, ids_TK, w13_EFD, w2_EDI, b13_EF, b2_ED, expert_map, transposed,
        Act(*act), (up is None, down is None),
    )  # fmt: skip


compiles_ahead(experts_saving, "triton", _saving)


def supports_backward(call: ExpertsBackwardCall) -> str | None:
    if needs_grad(call.grad_TD, call.y_RF):
        return "is not differentiable, and an argument requires grad"
    return supports_experts(call.layer)


@experts_backward.backend(
    "triton",
    reads=(*reads.FLOAT_EXPERTS, "for_tokens", "for_weights"),
    supports=supports_backward,
    devices=("cuda",),
    priority=1,
)
def launch_backward(call: ExpertsBackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`experts_backward` by the products of triton.grouped; gradients are read where they are."""
    return _backward(call)


def _backward(
    call: ExpertsBackwardCall, before: Before = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from moe_ops.kernels.triton.replay import replay

    c, wanted = call.layer, (call.for_tokens, call.for_weights)
    tensors = (
        with_rows(call.grad_TD), contiguous(call.y_RF), contiguous(call.rows_R),
        contiguous(call.ends_E), contiguous(c.weights_TK), c.w13_EFD, c.w2_EDI,
        contiguous(c.b2_ED),
    )  # fmt: skip
    rest = (c.transposed, c.activation, wanted)
    dx_TD, dweights_TK, dy_RF, wh_RI = replay(_launch_backward, tensors, rest, before)
    return dx_TD, dweights_TK.to(c.weights_TK.dtype), dy_RF, wh_RI


def _launch_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch with the tensors of `_backward`, and its other arguments behind them."""
    from moe_ops.kernels.triton.experts.training import backward

    grad_TD, y_RF, rows_R, ends_E, weights_TK, w13_EFD, w2_EDI, b2_ED, transposed, act, wanted = (
        given
    )
    wgmma = multiplied(grad_TD, y_RF, w13_EFD, w2_EDI, transposed)
    return backward(
        grad_TD, y_RF, rows_R, ends_E, weights_TK, w13_EFD, w2_EDI, b2_ED, transposed, Act(*act),
        wanted, wgmma,
    )  # fmt: skip


def multiplied(
    grad_TD: Tensor, y_RF: Tensor, w13_EFD: Tensor, w2_EDI: Tensor, transposed: bool
) -> tuple[bool, bool]:
    """Which products of a backward the kernel for Hopper runs."""
    w13_EDF, w2_EID = (w if transposed else w.transpose(1, 2) for w in (w13_EFD, w2_EDI))
    # The gradient of y is laid out as y is, and begins anew.
    return refuse_gemm(grad_TD, w2_EID) is None, refuse_gemm(y_RF, w13_EDF) is None


compiles_ahead(experts_backward, "triton", _backward)
