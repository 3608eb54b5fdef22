"""Who watches a call: a compiler, modes, a transform, a tracer, a profiler, forward-mode autograd.

Bound here, as a call that finds its code in no cache pays for every look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C, Tensor
from torch.autograd.profiler import record_function

from moe_ops.registry.gradients import forward_mode

compiling = torch.compiler.is_dynamo_compiling
dispatch_modes, function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
transforms, tracing = _C._are_functorch_transforms_active, _C._is_tracing
profiler = _C._autograd._profiler_enabled
autocasting = _C._is_any_autocast_enabled
_AUTOGRAD = _C.DispatchKey.AutogradFunctionality


def watched() -> bool:
    """Whether somebody who has to see a call sees it by torch's dispatcher."""
    modes = dispatch_modes() or function_modes() or transforms()
    return bool(modes or tracing() or profiler() or forward_mode())


def run_as(name: str, run: Callable[[Any], Any], call: Any) -> Any:
    """What runs a call, under a name in the trace of the profiler that looks on."""
    with record_function(name):
        return run(call)


def below_autograd() -> bool:
    """Whether the caller runs below autograd, as a custom operator does: torch's operators record
    nothing there, whatever requires grad."""
    return _C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)


def counting() -> bool:
    """Whether all that sees a call are modes that look at ops as they are run, as torch's counter
    of operations does: no trace and no transform, which take ops apart."""
    if transforms() or tracing() or not dispatch_modes():
        return False
    modes = (_C._get_dispatch_stack_at(i) for i in range(dispatch_modes()))
    return not any(mode.is_infra_mode() for mode in modes)


def compiled() -> bool:
    """Whether torch.compile traces, and not torch.export. Dynamo of torch 2.11 takes all that it
    traces for exported where `is_exporting` is called, so the flag behind it is read."""
    return torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag


def readable(t: Tensor) -> bool:
    """Whether a definition may look at the values of `t`: it lies on a CPU, and nobody traces."""
    seen = compiling() or dispatch_modes() or transforms() or tracing()
    return type(t) is Tensor and t.is_cpu and not seen
