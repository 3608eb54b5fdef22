"""What experts compute in `generate` at a large batch has the same bits in a training forward, in
other company."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import experts
from moe_ops.invariant.compare import same_bits
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import BF16, F32
from tests.hf import families
from tests.hf.twins import PLAIN

SEQUENCES, PROMPT = 32, 6
SOME = [17, 3, 31, 20]  # that are trained on, four at a time


@dataclass(frozen=True, slots=True)
class Noted:
    """A call of a layer's experts in `generate`, and its result."""

    call: ExpertsCall
    out_TD: Tensor


@contextmanager
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Noted]]:
    """All calls of `experts` in a block, as the backends that run them are given them: a hook on a
    module would keep a model from being compiled."""
    calls: list[Noted] = []
    own = {"_backends": dict(experts.backends), "_plans": {}, "_order": {}}

    def noting(run: Any) -> Any:
        def ran(call: ExpertsCall) -> Tensor:
            rows = {n: getattr(call, n).clone() for n in ("x_TD", "weights_TK", "ids_TK")}
            out_TD: Tensor = run(call)
            calls.append(Noted(replace(call, **rows), out_TD.clone()))
            return out_TD

        return ran

    with monkeypatch.context() as patched:
        for name, value in own.items():
            patched.setattr(experts, name, value)
        for name in ("cpu", "by_row"):
            backend = experts.backends[name]
            own["_backends"][name] = backend.changed(run=noting(backend.run))
        experts.memo.clear()
        yield calls
    experts.memo.clear()


def by_sequence(calls: list[Noted], what: Any) -> Tensor:
    """A tensor of a layer's calls, of a prompt and then of steps: [sequences, tokens, ...]."""
    return torch.cat([what(n).unflatten(0, (SEQUENCES, -1)) for n in calls], 1)


def trained(calls: list[Noted]) -> tuple[Tensor, Tensor]:
    """What a layer computes of some sequences in a forward that saves for a backward, and what it
    computed of them in `generate`."""
    first = calls[0].call
    rows = {
        name: by_sequence(calls, lambda n, name=name: getattr(n.call, name))[SOME].flatten(0, 1)
        for name in ("x_TD", "weights_TK", "ids_TK")
    }
    weights = {
        name: getattr(first, name).detach().clone().requires_grad_()
        for name in ("w13_EFD", "w2_EDI")
    }
    call = replace(first, **rows, **weights)
    with moe_ops.using(batch_invariant=True), torch.enable_grad():
        out_TD: Tensor = experts(*experts.arguments.flat(call))
    assert out_TD.requires_grad
    return out_TD.detach(), by_sequence(calls, lambda n: n.out_TD)[SOME].flatten(0, 1)


def text() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(16, 90, (SEQUENCES, PROMPT), generator=generator)


CASES = {
    "eager float32": ("qwen3_moe", False, F32),
    "eager bfloat16": ("qwen3_moe", False, BF16),
    "eager, by columns": ("gpt_oss", False, BF16),
    "compiled bfloat16": ("qwen3_moe", True, BF16),
    "compiled float32": ("qwen3_moe", True, F32),
    "compiled, by columns": ("gpt_oss", True, BF16),
}
MARKS = {
    "compiled bfloat16": [pytest.mark.slow],
    "compiled float32": [pytest.mark.slow, pytest.mark.every],
    "compiled, by columns": [pytest.mark.slow, pytest.mark.every],
}


@pytest.mark.parametrize(
    ("family", "compiled", "dtype"),
    [pytest.param(*case, id=name, marks=MARKS.get(name, [])) for name, case in CASES.items()],
)
def test_experts_of_generate_are_those_of_training(
    family: str, compiled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = families.build(family).model.to(dtype)
    run = moe_ops.compile(model, batch_invariant=True) if compiled else moe_ops.optimize(model)
    with noted(monkeypatch) as calls, moe_ops.using(batch_invariant=True):
        run.generate(text(), **PLAIN)
    layers = len(families.experts(model))
    assert calls
    assert len(calls) % layers == 0
    for layer in range(layers):
        got, want = trained(calls[layer::layers])
        assert len(want) == len(SOME) * (PROMPT + PLAIN["max_new_tokens"] - 1)
        assert same_bits(got, want), layer
