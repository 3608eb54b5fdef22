"""The backend "cpu" of the stages that are no products: the kernels of libmoe_ops, where it was
loaded before this package was imported. Elsewhere PyTorch runs them, but for calls that have to be
batch invariant: the last numbers of a tensor, which fill no register, PyTorch computes by other
functions than the rest.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_ops.backends import reads
from moe_ops.backends.strides import contiguous, with_rows
from moe_ops.kernels import cpu as kernels
from moe_ops.kernels.cpu import loaded, stages
from moe_ops.ops.activate import ActivateCall, activate, options_of
from moe_ops.ops.combine import CombineCall, combine
from moe_ops.ops.dispatch import DispatchCall, dispatch
from moe_ops.registry.gradients import needs_grad


def _unavailable() -> str | None:
    """Why the kernels cannot be compiled, or None: those of libmoe_ops are."""
    return kernels.unavailable() if loaded.library() is None else None


def arithmetic(call: Any) -> str:
    """How the kernels compute a row: each by itself, in one order."""
    return "cpu"


def _refuse(*tensors: Tensor) -> str | None:
    if needs_grad(*tensors):
        return "is not differentiable, and an argument requires grad"
    dtype = tensors[0].dtype
    return _unavailable() if dtype in stages.DTYPES else f"needs float32 or bfloat16, got {dtype}"


def supports_dispatch(call: DispatchCall) -> str | None:
    if needs_grad(call.x_TD):
        return "is not differentiable, and x_TD requires grad"
    return _unavailable()


def run_dispatch(call: DispatchCall) -> tuple[Tensor, Tensor, Tensor]:
    """`dispatch` that copies each row once, after a sort that only counts."""
    x_TD, ids_TK = with_rows(call.x_TD), contiguous(call.ids_TK)
    return stages.dispatch(x_TD, ids_TK, call.num_experts, contiguous(call.expert_map))


def supports_activate(call: ActivateCall) -> str | None:
    if needs_grad(call.y_RF):
        return "is not differentiable, and y_RF requires grad"
    return _unavailable()


def run_activate(call: ActivateCall) -> Tensor:
    """`activate` in one pass over its rows; of float16 in float32, and then rounded."""
    y_RF = with_rows(call.y_RF)
    if y_RF.dtype in stages.DTYPES:
        return stages.activate(y_RF, options_of(call))
    return stages.activate(y_RF.float(), options_of(call)).to(y_RF.dtype)


def supports_combine(call: CombineCall) -> str | None:
    return _refuse(call.y_RD, call.weights_TK)


def run_combine(call: CombineCall) -> Tensor:
    """`combine` that reads each row once."""
    y_RD, weights_TK = with_rows(call.y_RD), call.weights_TK
    if weights_TK.dtype != y_RD.dtype:
        weights_TK = weights_TK.float()  # as the dtypes of a product promote
    return stages.combine(y_RD, contiguous(weights_TK), contiguous(call.rows_R))


OPTIONS: dict[str, Any] = {"devices": ("cpu",), "priority": 1, "arithmetic": arithmetic}
dispatch.backend("cpu", reads=("expert_map",), supports=supports_dispatch, **OPTIONS)(run_dispatch)
activate.backend("cpu", reads=reads.ACTIVATION, supports=supports_activate, **OPTIONS)(run_activate)
combine.backend("cpu", supports=supports_combine, **OPTIONS)(run_combine)
if loaded.library() is None:
    for op in (dispatch, activate, combine):
        op.keeps_for_invariant("cpu")
