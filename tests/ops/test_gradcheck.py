"""Gradients of every op against differences of its results, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from moe_ops.conformance.samples import specified
from moe_ops.registry.spec import OPS, Op
from tests.ops.doubles import EVERY, WITH_GRADIENTS, calls, floats

# What `delta_rule_step` reads of its state it overwrites, and autograd says so; prompts train by
# `delta_rule`.
DIFFERENTIABLE = [n for n in WITH_GRADIENTS if n != "delta_rule_step"]
RECORDS = ("ring_weights_SK",)  # what is written down, which has no gradient
QUICK = ("experts", "expert_gemm", "activate_backward")  # of the gradients of gradients


LINEAR = ("dispatch", "dispatch_tokens", "combine_tokens", "sum_ranks")  # whose gradients are fixed


def each_sample(names: Sequence[str], quick: Sequence[str] | None = None) -> Any:
    """Ops and their samples; those that are not quick are left for `every`."""
    rest = [pytest.mark.slow, pytest.mark.every]
    found = [
        pytest.param(
            name, label, id=f"{name}-{label}",
            marks=[] if quick is None or name in quick else rest,
        )
        for name in names
        for label in calls(name)
    ]  # fmt: skip
    return pytest.mark.parametrize(("name", "label"), found)


def function_of(op: Op, args: list[Any]) -> tuple[Callable[..., tuple[Tensor, ...]], list[Tensor]]:
    """An op as a function of its floats alone, which gives the floats that are specified; what it
    writes to are results too."""
    flat: list[tuple[int, int | None]] = []
    names = list(op.arguments.signature.parameters)
    for i, a in enumerate(args):
        if names[i] in RECORDS:
            continue
        if isinstance(a, list):
            flat += [(i, j) for j, t in enumerate(a) if t is not None]
        elif isinstance(a, Tensor) and a.is_floating_point():
            flat.append((i, None))
    written = [names.index(name) for name in op.arguments.mutated if name not in RECORDS]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        values = [list(a) if isinstance(a, list) else a for a in args]
        for (i, j), t in zip(flat, given, strict=True):
            if j is None:
                values[i] = t.clone() if i in written else t
            else:
                values[i][j] = t
        out = op(*values)
        got = specified(op.name, tuple(values), out) if op.name in OPS else floats(out)
        return tuple(floats([*got, *(values[i] for i in written)]))

    leaves = [args[i] if j is None else args[i][j] for i, j in flat]
    return function, [t.detach().clone().requires_grad_() for t in leaves]


@each_sample(DIFFERENTIABLE)
def test_gradients_are_those_of_differences(name: str, label: str) -> None:
    function, leaves = function_of(EVERY[name], calls(name)[label])
    assert gradcheck(function, leaves, fast_mode=True)
    assert all(t.dtype is torch.float64 for t in function(*leaves))


@each_sample([n for n in DIFFERENTIABLE if n not in LINEAR], QUICK)
def test_gradients_of_gradients_are_those_of_differences(name: str, label: str) -> None:
    function, leaves = function_of(EVERY[name], calls(name)[label])
    if label == "no_rows_used":
        assert not any(t.numel() for t in function(*leaves))
        return
    assert gradgradcheck(function, leaves, fast_mode=True)


def test_no_gradient_is_made_of_what_no_pair_has() -> None:
    """Rows that nobody wrote may hold NaN, which 0 times it would be."""
    combine, args = EVERY["combine"], calls("combine")["nothing_here"]
    y_RD, weights_TK, rows_R = args
    assert y_RD.isnan().all() and (rows_R == -1).all()
    leaves = [y_RD.requires_grad_(), weights_TK.requires_grad_()]
    for grad in torch.autograd.grad(combine(*leaves, rows_R).sum(), leaves):
        assert torch.equal(grad, torch.zeros_like(grad))
