"""Hold a Triton backend against the definition over the samples of its op; without a GPU in
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.conformance.memory import surrounded
from moe_ops.conformance.samples import mutated, samples, specified
from moe_ops.registry.spec import Op
from moe_ops.testing import (
    CASES,
    DEVICE,
    Case,
    Tol,
    assert_close,
    poisoned,
    reference_of,
    tolerance,
)

EXACT = Tol(0.0, "integers are exact")
BACKEND, HERE = "triton", torch.device(DEVICE)


def cases(quick: tuple[str, ...]) -> list[Any]:
    """Every case by name; those that are not quick are of `every` alone."""
    others = [pytest.mark.slow, pytest.mark.every]
    return [pytest.param(c.name, marks=[] if c.name in quick else others) for c in CASES]


def of_the_kit(*quick: str) -> list[Any]:
    """What of an op the kit examines: all samples of one token, of which each is held against the
    definition elsewhere, too; and the quick ones alone where not all tests are run."""
    whole = "one_token/float32"
    others = pytest.param(whole, marks=pytest.mark.every, id="all")
    return [*(pytest.param(f"{whole}/{label}", id=label) for label in quick), others]


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of arguments with NaN around them."""
    return tuple(surrounded(a, HERE) for a in args)


def refusal(op: Op, args: tuple[Any, ...], backend: str = BACKEND) -> str | None:
    """Why the backend would refuse a call on a GPU."""
    call = op.call(*args)
    return op.backends[backend].refusal("cuda", op.arguments.rows(call), call)


def run(op: Op, args: tuple[Any, ...], backend: str = BACKEND) -> Any:
    """What the backend gives, NaN where it writes nothing."""
    assert refusal(op, args, backend) is None
    with poisoned():
        return op.backends[backend].run(op.call(*args))


def hold(op: Op, case: Case, dtype: torch.dtype, backend: str = BACKEND) -> dict[str, str]:
    """Each sample of the op at these sizes gives what the definition gives in float32. Gives the
    refusals of those that are refused."""
    refused = {}
    for label, args in samples(op.name, case, dtype):
        why = refusal(op, args, backend)
        if why is not None:
            refused[label] = why
            continue
        given = on_device(args)
        got = run(op, given, backend)
        if got is not None:
            got = got.cpu() if isinstance(got, Tensor) else tuple(t.cpu() for t in got)
        want = reference_of(op.reference, *args)
        found = [*specified(op.name, args, got), *(t.cpu() for t in mutated(op, given))]
        wanted = [*specified(op.name, args, want), *mutated(op, args)]
        pairs = zip(found, wanted, strict=True)
        repro = f"samples({op.name!r}, {case.name}, {dtype}): {label!r}"
        for i, (g, w) in enumerate(pairs):
            tol = tolerance(op.name, g.dtype, dtype) if g.is_floating_point() else EXACT
            assert_close(g, w, tol, f"result {i}", repro)
    return refused


@contextmanager
def anywhere(monkeypatch: pytest.MonkeyPatch, *ops: Op) -> Iterator[list[str]]:
    """A context in which the backends take tensors of a CPU, too, as their kernels do here. Gives
    the names of the ops that they run."""
    ran: list[str] = []
    with monkeypatch.context() as patched:
        for op in ops:
            backend = op.backends[BACKEND]

            def run(call: Any, name: str = op.name, run: Any = backend.run) -> Any:
                ran.append(name)
                return run(call)

            here = replace(backend, devices=None, run=run)
            patched.setattr(op, "_backends", {**op.backends, BACKEND: here})
            patched.setattr(op, "_order", {})
        yield ran
