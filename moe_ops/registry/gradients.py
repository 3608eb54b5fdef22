"""What may be wanted of an op's arguments: gradients, and the tangents of forward-mode autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_fake

_library = Library("moe_ops", "FRAGMENT")
# An operator, so that compilers trace a backward without running it.
_library.define("undefined_gradient(Tensor grad, Tensor like, str reason) -> Tensor")


def _undefined(grad: Tensor, like: Tensor, reason: str) -> Tensor:
    raise RuntimeError(reason)


_library.impl("undefined_gradient", _undefined, "CompositeExplicitAutograd")
register_fake(
    "moe_ops::undefined_gradient", lambda grad, like, reason: torch.empty_like(like), lib=_library
)


def undefined_gradient(grad: Tensor, like: Tensor, reason: str) -> Tensor:
    """In place of a gradient by `like`: raises RuntimeError with the reason when it runs."""
    made: Tensor = torch.ops.moe_ops.undefined_gradient(grad, like, reason)
    return made


def in_backward() -> bool:
    """Whether this thread runs a backward: forwards that run in it are those that activation
    checkpointing runs again, whose tokens were seen. A trace takes it that none does."""
    if torch.compiler.is_compiling():
        return False
    return int(torch._C._current_graph_task_id()) != -1


class _Undefined(torch.autograd.Function):
    """A tensor that depends on others in a way that has no gradient."""

    @staticmethod
    def forward(out: Tensor, reason: str, *sources: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.reason, *sources = inputs
        ctx.save_for_backward(*sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = [undefined_gradient(grad, source, ctx.reason) for source in ctx.saved_tensors]
        return None, None, *made


def without_gradient(out: Tensor, reason: str, *sources: Tensor | None) -> Tensor:
    """A result that was computed without autograd, which depends on those of `sources` that require
    gradients: it requires one too, and a backward through it raises RuntimeError with the reason.
    """
    wanted = [t for t in sources if t is not None and t.requires_grad]
    made: Tensor = _Undefined.apply(out, reason, *wanted)
    return made


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
