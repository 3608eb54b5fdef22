"""The Triton backends of the ops that training adds, for NVIDIA GPUs."""

from __future__ import annotations

from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends.strides import contiguous, with_rows
from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.backends.triton_device import FLOATS, either, refuse_device
from moe_ops.ops.activate_backward import ActivateBackwardCall, activate_backward
from moe_ops.ops.expert_wgrad import ExpertWgradCall, expert_wgrad
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
    from moe_ops.kernels.triton.wgrad import wgrad

    c = call
    rows = contiguous(c.a_rows_R), contiguous(c.b_rows_R)
    tensors = (with_rows(c.a_RM), with_rows(c.b_RN), contiguous(c.ends_E), *rows)
    return replay(wgrad, tensors, (c.dtype,), before)


compiles_ahead(expert_wgrad, "triton", _wgrad)


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
    from moe_ops.kernels.triton import Act
    from moe_ops.kernels.triton.activate_backward import activate_backward as launched
    from moe_ops.kernels.triton.replay import replay

    c = call
    tensors = with_rows(c.dh_RI), with_rows(c.y_RF), contiguous(c.weights_TK), contiguous(c.rows_R)
    act = Act(c.kind, c.gated, c.interleaved, c.alpha, c.limit, c.up_shift)
    return replay(launched, tensors, (act, c.for_weights), before)


compiles_ahead(activate_backward, "triton", _activate_backward)
