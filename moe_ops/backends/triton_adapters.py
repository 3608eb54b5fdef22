"""The Triton backends of experts with adapters, for NVIDIA GPUs: those of `experts`, by the paths
whose products add what adapters do, and those of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_ops.backends import reads, triton_paths
from moe_ops.backends.strides import contiguous, with_rows
from moe_ops.backends.triton import (
    Supports,
    call_of,
    formats_named,
    layer_of,
    of_adapter,
    parts_of,
    run_experts,
    supports_many,
    tensors_of,
)
from moe_ops.backends.triton_ahead import Before, compiles_ahead
from moe_ops.backends.triton_device import HALF, refuse_hopper
from moe_ops.backends.triton_hopper import STEP_BY_COLUMNS, refuse_product, refused_products
from moe_ops.backends.triton_limits import max_tiny_tokens, most_rows_tokens, most_tiny_tokens
from moe_ops.backends.triton_support import supports_codes, supports_tiny
from moe_ops.backends.triton_training import multiplied
from moe_ops.ops.adapters import ADAPTER, Adapter
from moe_ops.ops.experts import ExpertsCall
from moe_ops.ops.experts_adapted import ExpertsAdaptedCall, experts_adapted
from moe_ops.ops.experts_adapted_backward import (
    ExpertsAdaptedBackwardCall,
    experts_adapted_backward,
)
from moe_ops.ops.experts_adapted_saving import ExpertsAdaptedSavingCall, experts_adapted_saving
from moe_ops.ops.experts_backward import ExpertsBackwardCall
from moe_ops.registry.backend import ANY_NUMBER, Rows
from moe_ops.registry.gradients import needs_grad

MOST_RANK = 128
Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def refuse_adapter(adapter: Adapter) -> str | None:
    """Why the kernels do not add adapters, or None."""
    if needs_grad(*(getattr(adapter, name) for name in ADAPTER)):
        return "is not differentiable, and an argument requires grad"
    rank = max(adapter.ranks)
    return None if rank <= MOST_RANK else f"adds adapters up to rank {MOST_RANK}, got {rank}"


def _run(kernel: str, call: ExpertsAdaptedCall, before: Before = None) -> Tensor:
    return run_experts(kernel, call.layer, before=before, adapter=call.adapter)


def _register(kernel: str, supports: Supports, priority: int, rows: Rows = ANY_NUMBER) -> None:
    """A backend of experts with adapters, and its paths."""
    backend = f"triton.{kernel}"

    def refuses(call: ExpertsAdaptedCall) -> str | None:
        if call.layer.x_format:
            return "adds adapters to products of inputs that are not quantised alone"
        return supports(call.layer) or refuse_adapter(call.adapter)

    def run(call: ExpertsAdaptedCall) -> Tensor:
        return _run(kernel, call)

    experts_adapted.backend(
        backend,
        reads=(*reads.SCALED_EXPERTS, *ADAPTER[1:]),
        supports=refuses,
        rows=rows,
        devices=("cuda",),
        priority=priority,
    )(run)
    experts_adapted.tells(backend, lambda call: triton_paths.told(kernel, call.layer, adapted=True))
    adapting = [path for path in triton_paths.paths_of(kernel) if path.adapts]
    for path in adapting:
        of = path.forced.removeprefix("triton.")

        # A function of its own, as the cache of compiled graphs knows nothing of partial ones.
        def run_path(call: ExpertsAdaptedCall, of: str = of) -> Tensor:
            return _run(of, call)

        asked = {"refusal": _of_layer(path.refusal), "most": _of_layer(path.most)}
        experts_adapted.path(backend, path.forced, run_path, **asked)
    for name in (backend, *(path.forced for path in adapting)):
        of = name.removeprefix("triton.")
        compiles_ahead(experts_adapted, name, functools.partial(_run, of))


def _of_layer(limit: Callable[[ExpertsCall], Any]) -> Callable[[Any], Any]:
    """What asks the layer of a call with adapters."""
    return lambda call: limit(call.layer)


TINY = Rows(preferred=_of_layer(most_tiny_tokens), possible=_of_layer(max_tiny_tokens))
_register("tiny", supports_tiny, 3, TINY)
ROWS = Rows(preferred=_of_layer(functools.partial(most_rows_tokens, adapted=True)))
_register("rows", supports_codes, 2, ROWS)
_register("grouped", supports_many, 1)


def supports_saving(call: ExpertsAdaptedSavingCall) -> str | None:
    return supports_many(call.layer) or refuse_adapter(call.adapter)


OF_TRAINING = (*reads.EXPERTS[:-1], "global_scale13_E", "global_scale2_E", *ADAPTER[1:])


@experts_adapted_saving.backend(
    "triton", reads=OF_TRAINING, supports=supports_saving, devices=("cuda",), priority=1
)
def launch_saving(
    call: ExpertsAdaptedSavingCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`experts_adapted_saving` by the products of triton.grouped."""
    return _saving(call)


def _saving(call: ExpertsAdaptedSavingCall, before: Before = None) -> Six:
    return saving(call.layer, call.adapter, before)


def saving(c: ExpertsCall, adapter: Adapter | None, before: Before) -> Six:
    """What `experts_adapted_saving` gives; without adapters u has no columns."""
    from moe_ops.kernels.triton.replay import replay

    rest = (c.transposed, c.activation, formats_named(c))
    return replay(_launch_saving, (*tensors_of(c), *of_adapter(adapter)), rest, before)


def _launch_saving(*given: Any) -> Six:
    from moe_ops.kernels.triton.experts.training import saving_adapted

    named, adapters, rest = parts_of(given)
    up, down = refused_products(call_of(named, *rest), activates=False)
    layer, wgmma = layer_of(named, *rest), (up is None, down is None)
    routed = (named["x_TD"], named["weights_TK"], named["ids_TK"], named["expert_map"])
    return saving_adapted(*routed, layer, adapters, wgmma)


compiles_ahead(experts_adapted_saving, "triton", _saving)


def supports_backward(call: ExpertsAdaptedBackwardCall) -> str | None:
    if needs_grad(call.grad_TD, call.y_RF):
        return "is not differentiable, and an argument requires grad"
    return supports_many(call.layer) or refuse_adapter(call.adapter)


@experts_adapted_backward.backend(
    "triton", reads=(*OF_TRAINING, "for_tokens", "for_weights"), supports=supports_backward,
    devices=("cuda",), priority=1,
)  # fmt: skip
def launch_backward(
    call: ExpertsAdaptedBackwardCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`experts_adapted_backward` by the products of triton.grouped."""
    return _backward(call)


def _backward(call: ExpertsAdaptedBackwardCall, before: Before = None) -> Six:
    return backward(call, call.adapter, before)


def backward(
    call: ExpertsBackwardCall | ExpertsAdaptedBackwardCall, adapter: Adapter | None, before: Before
) -> Six:
    """What `experts_adapted_backward` gives; without adapters v has no columns."""
    from moe_ops.kernels.triton.replay import replay

    c = call.layer
    of_gradient = (
        with_rows(call.grad_TD), contiguous(call.y_RF), contiguous(call.rows_R),
        contiguous(call.ends_E),
    )  # fmt: skip
    wanted = (call.for_tokens, call.for_weights)
    rest = (c.transposed, c.activation, formats_named(c), wanted)
    tensors = (*tensors_of(c), *of_adapter(adapter), *of_gradient)
    made = replay(_launch_backward, tensors, rest, before)
    dx_TD, dweights_TK, dy_RF, wh_RI, v13_Rr, v2_Rr = made
    return dx_TD, dweights_TK.to(c.weights_TK.dtype), dy_RF, wh_RI, v13_Rr, v2_Rr


def _multiplied(a: Tensor, inputs: int, outputs: int) -> bool:
    """Whether the kernel for Hopper multiplies rows by decoded weights, whose columns lie."""
    widths = (inputs, outputs)
    refusal = refuse_hopper(a) or refuse_product(widths, a.stride(0), a, None)
    return refusal is None and a.dtype in HALF and inputs % STEP_BY_COLUMNS == 0


def _launch_backward(*given: Any) -> Six:
    from moe_ops.kernels.triton.experts.training import backward_adapted

    named, adapters, rest = parts_of(given)
    grad_TD, y_RF, rows_R, ends_E, transposed, act, formats, wanted = rest
    if formats[0]:
        D, I = call_of(named, transposed, act, formats).widths  # noqa: E741
        wgmma = _multiplied(grad_TD, D, I), _multiplied(y_RF, y_RF.shape[1], D)
    else:
        wgmma = multiplied(grad_TD, y_RF, named["w13_EFD"], named["w2_EDI"], transposed)
    layer = layer_of(named, transposed, act, formats)
    order, weights_TK = (rows_R, ends_E), named["weights_TK"]
    return backward_adapted(grad_TD, y_RF, order, weights_TK, layer, adapters, wanted, wgmma)


compiles_ahead(experts_adapted_backward, "triton", _backward)
