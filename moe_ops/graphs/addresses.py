"""Where the memory is that a captured call reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ops.interop.switches import may_branch, switches
from moe_ops.prepared import HoldsExperts


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that a function is, or is a method of, compiled or not."""
    if isinstance(function, nn.Module):
        return function
    found = (getattr(f, "__self__", None) for f in (function, inspect.unwrap(function)))
    return next((x for x in found if isinstance(x, nn.Module)), None)


def state_of(module: nn.Module) -> list[Any]:
    """Parameters, buffers, how experts are stored and what modules branch on, ten times as fast as
    `parameters` and `buffers`: at every call."""
    found: list[Any] = []
    modules: list[nn.Module | None] = [module]
    for m in modules:  # which grows
        if m is None:
            continue
        if m._parameters:
            found += m._parameters.values()
        if m._buffers:
            found += m._buffers.values()
        if isinstance(m, HoldsExperts):
            found.append(m.stored_as)
        kind: Any = type(m)
        if may_branch(kind):
            found.append(switches(m))
        if m._modules:
            modules += m._modules.values()
    return [x for x in found if x is not None]


def identities(values: Sequence[Any]) -> tuple[Any, ...]:
    """Equal if what reads these tensors reads those, and if the other values are equal.

    All of it is needed: other tensors come to lie at an address, once its first is gone.
    """
    return tuple(
        [  # half the time of a generator
            (x.data_ptr() or _parts(x), x.shape, x.stride(), x.dtype)
            if isinstance(x, Tensor)
            else (type(x), x)
            for x in values
        ]
    )


def _parts(x: Tensor) -> Any:
    """Where the tensors are that a tensor without an address wraps."""
    if not is_traceable_wrapper_subclass(x):
        return None
    names, _ = x.__tensor_flatten__()
    return identities([getattr(x, name) for name in names])
