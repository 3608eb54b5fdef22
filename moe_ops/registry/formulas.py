"""Gradients by a formula: an op whose forward saves what its backward, made of ops, reads.

The backward is recorded in turn, so what is made of ops that have gradients has them of every
order. Compilers trace both, and see ops, never their definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import _C, Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function

from moe_ops.registry.gradients import grad_wanted
from moe_ops.registry.invariance import invariant
from moe_ops.registry.watched import autocasting, transforms

# Gradients by the names of arguments; None, or no name, where there is none.
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """How an op is differentiated.

    `takes` says of a record whether the formula knows the gradients that are wanted; if not,
    autograd takes the definition apart. `forward` gives the op's result and then what else
    `backward` reads. That gets the record, what was saved, the gradients of all that `forward`
    gave (None for one that nobody used), and the names of arguments whose gradients are wanted; it
    may empty the list of what was saved, so that memory is free ahead of its end.
    `writes` names the arguments that it writes to: they are no values that it was recorded with.
    An op of several `results` gives a tuple, and `backward` gets all but the first as saved, too.
    """

    takes: Callable[[Any], bool]
    forward: Callable[[Any], tuple[Tensor, ...]]
    backward: Callable[[Any, list[Tensor], tuple[Tensor | None, ...], frozenset[str]], Gradients]
    writes: tuple[str, ...] = ()
    results: int = 1


def wants(call: Any, names: Sequence[str]) -> bool:
    """Whether gradients are wanted of no other arguments of a record than these."""
    others = (getattr(call, n) for n in type(call).__slots__ if n not in names)
    return not grad_wanted(tuple(others), {})


def recorded(formula: Formula, arguments: Any, call: Any) -> Any:
    """The result of a call that was checked, which autograd differentiates by the formula.
    `arguments` says what flat arguments there are."""
    names = tuple(arguments.paths)
    # Not by its own `apply`, which begins with the transforms anew: their levels come here one by
    # one, as every op of ATen does to its formula.
    apply = super(torch.autograd.Function, _ByFormula).apply
    with enable_single_level_autograd_function() if transforms() else nullcontext():
        outs = apply(formula, arguments.of, names, *arguments.flat(call))
    return outs[0] if formula.results == 1 else outs[: formula.results]


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """A formula's forward ran below autocast, which had cast its arguments. In its backward nothing
    is cast either, wherever that is called."""
    if autocasting() and torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


class _ByFormula(torch.autograd.Function):
    """One call of an op: its result, and what is saved of it."""

    @staticmethod
    def forward(
        ctx: Any, formula: Formula, of: Callable[..., Any], names: tuple[str, ...], *flat: Any
    ) -> tuple[Tensor, ...]:
        # Autograd is off in here, of transforms outside of this one, too, which record what runs.
        outer = torch.enable_grad() if transforms() else nullcontext()
        with _C._AutoDispatchBelowAutograd(), outer:
            outs = formula.forward(of(*flat))
        ctx.formula, ctx.of, ctx.names, ctx.count = formula, of, names, len(flat)
        given = {
            i: a
            for i, (name, a) in enumerate(zip(names, flat, strict=True))
            if isinstance(a, Tensor) and name not in formula.writes
        }
        ctx.others = {i: a for i, a in enumerate(flat) if i not in given}
        ctx.places = tuple(given)
        ctx.save_for_backward(*given.values(), *outs[1:])
        ctx.mark_non_differentiable(*(t for t in outs if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        count = len(ctx.places)
        tensors = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # unless the graph is kept for another backward
        flat = {**ctx.others, **dict(zip(ctx.places, tensors[:count], strict=True))}
        call = ctx.of(*(flat[i] for i in range(ctx.count)))
        wanted = [n for n, w in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if w]
        device, saved = tensors[0].device.type, list(tensors[count:])
        del tensors
        with _without_autocast(device), invariant(False):  # it sums over rows
            made: Mapping[str, Tensor | None] = ctx.formula.backward(
                call, saved, grads, frozenset(wanted)
            )
        return (None, None, None, *(made.get(name) for name in ctx.names))
