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
from moe_ops.conformance.samples import samples, specified
from moe_ops.registry.spec import Op
from moe_ops.testing import (
    DEVICE,
    Case,
    assert_close,
    poisoned,
    reference_of,
    tolerance,
)

BACKEND, HERE = "triton", torch.device(DEVICE)


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of arguments with NaN around them."""
    return tuple(surrounded(a, HERE) for a in args)


def run(op: Op, args: tuple[Any, ...]) -> Any:
    """What the backend gives, NaN where it writes nothing. No call may be refused."""
    call = op.call(*args)
    backend = op.backends[BACKEND]
    assert backend.refusal("cuda", op.arguments.rows(call), call) is None
    with poisoned():
        return backend.run(call)


def hold(op: Op, case: Case, dtype: torch.dtype) -> None:
    """Each sample of the op at these sizes gives what the definition gives in float32."""
    for label, args in samples(op.name, case, dtype):
        got = run(op, on_device(args))
        got = got.cpu() if isinstance(got, Tensor) else tuple(t.cpu() for t in got)
        want = reference_of(op.reference, *args)
        pairs = zip(specified(op.name, args, got), specified(op.name, args, want), strict=True)
        repro = f"samples({op.name!r}, {case.name}, {dtype}): {label!r}"
        for i, (g, w) in enumerate(pairs):
            assert_close(g, w, tolerance(op.name, g.dtype, dtype), f"result {i}", repro)


@contextmanager
def anywhere(op: Op, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which the backend takes tensors of a CPU, too, as its kernels do here."""
    backend = replace(op.backends[BACKEND], devices=None)
    with monkeypatch.context() as patched:
        patched.setattr(op, "_backends", {**op.backends, BACKEND: backend})
        patched.setattr(op, "_order", {})
        yield
