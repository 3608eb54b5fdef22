"""What may be wanted of an op's arguments: gradients, and the tangents of forward-mode autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd would record a call with these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def grad_wanted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autograd would record a call with these arguments."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args, kwargs))


def forward_mode() -> bool:
    """Whether arguments may have tangents."""
    return forward_ad._current_level >= 0


def refuse_tangents(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError if an argument has a tangent, which a call would drop."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in _tensors(args, kwargs)):
        raise NotImplementedError(
            f"{name} has no forward-mode derivative, and got an argument with a tangent; use "
            "reverse mode (backward, torch.func.grad or torch.func.vjp)"
        )


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for a in (*args, *kwargs.values()):
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from (t for t in a if isinstance(t, Tensor))
