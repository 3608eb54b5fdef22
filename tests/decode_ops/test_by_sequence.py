"""Ops of a step on CPUs that have to be batch invariant: sequences as if they were alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.backends.by_sequence import NAME
from moe_ops.conformance.decode_samples import DECODE_MAKERS
from moe_ops.registry.spec import DECODE_OPS
from moe_ops.testing import BF16, F32, Case
from tests.independent_rows import rows_of

OPS = ["one_query_latents", *(n for n, op in DECODE_OPS.items() if NAME in op.backends)]
CASE = Case(name="sequences", T=7, E=4, K=2, D=64, I=32)
ALL = slice(None)


def of_sequences(call: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The call of some sequences: copies, as states are written to."""
    batched = {n for n, t in call.items() if isinstance(t, Tensor) and "B" in n.rpartition("_")[2]}
    return {n: t[rows].clone() if n in batched else copy.copy(t) for n, t in call.items()}


def results(op: Any, call: dict[str, Any]) -> list[Tensor]:
    """What an op returns, and the states that it leaves."""
    with moe_ops.using(batch_invariant=True):
        out = op(**call)
    states = [call[name] for name in op.arguments.mutated]
    return [*(out if isinstance(out, (list, tuple)) else (out,)), *states]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_a_sequence_in_company_is_as_alone(name: str, dtype: torch.dtype) -> None:
    op = DECODE_OPS[name]
    for what, call in DECODE_MAKERS[name](CASE, dtype).items():
        together = results(op, of_sequences(call, ALL))
        reference = op.reference(**of_sequences(call, ALL))
        first = reference if isinstance(reference, Tensor) else reference[0]
        assert torch.allclose(together[0].float(), first.float(), rtol=2e-2, atol=2e-2), what
        for b in range(CASE.T):
            alone = results(op, of_sequences(call, slice(b, b + 1)))
            for a, t in zip(alone, together, strict=True):
                assert torch.equal(rows_of(a, ALL), rows_of(t[b : b + 1], ALL)), (what, b)


def test_attention_knows_nothing_of_slots_that_it_does_not_see() -> None:
    """A prompt beside longer ones has others before it, and a buffer of more slots behind."""
    call = DECODE_MAKERS["one_query"](CASE, F32)["plain"]
    k, v = call["k_BNSD"], call["v_BNSD"]
    mask = torch.ones(CASE.T, k.shape[2], dtype=torch.bool)
    shifted = {n: torch.nn.functional.pad(t, (0, 0, 3, 11)) for n, t in (("k", k), ("v", v))}
    op = DECODE_OPS["one_query"]
    plain = {**call, "mask_BS": mask}
    moved = {**call, "k_BNSD": shifted["k"], "v_BNSD": shifted["v"]}
    moved["mask_BS"] = torch.nn.functional.pad(mask, (3, 11))
    want, got = (results(op, given)[0] for given in (plain, moved))
    assert torch.equal(got, want)


def test_other_calls_are_not_run_so() -> None:
    call = DECODE_MAKERS["one_query"](CASE, F32)["plain"]
    refusals = DECODE_OPS["one_query"].refusals(**call)
    assert str(refusals[NAME]).startswith("is for calls that have to be batch invariant")
