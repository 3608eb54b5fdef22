"""Hooks on the forwards of modules. Dynamo does not guard on them, so who compiles has to ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

# transformers leaves these on a model that was once asked for hidden states. They do nothing else.
RECORDERS = "transformers.utils.output_capturing"

Hooks = tuple[tuple[str, Callable[..., Any]], ...]


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of this module is more than its `forward`, as `nn.Module._call_impl` asks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._has_any_global_hook()
    )


def are_on_every_module() -> bool:
    """Whether there are hooks that torch calls for every module."""
    return bool(torch_module._has_any_global_hook())


def hooks_of(model: nn.Module) -> Hooks:
    """The forward hooks and forward pre-hooks of a model and its parts, each with the part's name,
    and those of every module.

    Each call of `generate` asks, so this walks by itself: `named_modules` takes longer.
    """
    of_all = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
    found = [("every module", hook) for hooks in of_all for hook in hooks.values()]
    left: list[tuple[str, nn.Module | None]] = [("", model)]
    seen: set[nn.Module] = set()
    while left:
        path, module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        if module._forward_hooks or module._forward_pre_hooks:
            own = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            found += [(path, h) for h in own if getattr(h, "__module__", "") != RECORDERS]
        left += [(f"{path}.{name}", part) for name, part in module._modules.items()]
    return tuple((path.removeprefix("."), hook) for path, hook in found)
