"""The Triton backends of training on frozen experts in codes, for NVIDIA GPUs: those for experts
with adapters, which decode a layer's weights first, without adapters."""

from __future__ import annotations

from torch import Tensor

from moe_ops.backends import reads, triton_adapters
from moe_ops.backends.triton import supports_many
from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.backends.triton_arithmetic import of_training
from moe_ops.ops.experts_backward import ExpertsBackwardCall, experts_backward
from moe_ops.ops.experts_saving import ExpertsSavingCall, experts_saving
from moe_ops.registry.gradients import needs_grad

NAME = "triton.decoded"
READS = (*reads.EXPERTS[:-1], "global_scale13_E", "global_scale2_E")
Four = tuple[Tensor, Tensor, Tensor, Tensor]


def supports_saving(call: ExpertsSavingCall) -> str | None:
    return supports_many(call.layer) if call.layer.w_format else "decodes codes, got floats"


@experts_saving.backend(
    NAME, reads=READS, supports=supports_saving, devices=("cuda",), priority=1,
    arithmetic=of_training,
)  # fmt: skip
def launch_saving(call: ExpertsSavingCall) -> Four:
    """`experts_saving` by the products of triton.grouped, of weights that are decoded first."""
    return _saving(call)


def _saving(call: ExpertsSavingCall, before: Before = None) -> Four:
    out_TD, y_RF, _, _, rows_R, ends_E = triton_adapters.saving(call.layer, None, before)
    return out_TD, y_RF, rows_R, ends_E


compiles_ahead(experts_saving, NAME, _saving)


def supports_backward(call: ExpertsBackwardCall) -> str | None:
    if needs_grad(call.grad_TD, call.y_RF):
        return "is not differentiable, and an argument requires grad"
    return supports_many(call.layer) if call.layer.w_format else "decodes codes, got floats"


@experts_backward.backend(
    NAME, reads=(*READS, "for_tokens", "for_weights"), supports=supports_backward,
    devices=("cuda",), priority=1,
)  # fmt: skip
def launch_backward(call: ExpertsBackwardCall) -> Four:
    """`experts_backward` by the products of triton.grouped, of weights that are decoded first."""
    return _backward(call)


def _backward(call: ExpertsBackwardCall, before: Before = None) -> Four:
    dx_TD, dweights_TK, dy_RF, wh_RI, _, _ = triton_adapters.backward(call, None, before)
    return dx_TD, dweights_TK, dy_RF, wh_RI


compiles_ahead(experts_backward, NAME, _backward)
