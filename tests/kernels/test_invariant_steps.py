"""Invariant calls of what else a decoding step consists of, by Triton's kernels: a row, or a
sequence, has the same bits alone and beside others, in caches of any size."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from moe_ops.backends.triton_linears import multiply_few, multiply_normed
from moe_ops.decode_ops.normed_quantized_linears import NormedQuantizedLinearsCall
from moe_ops.kernels.triton.decode import linears, one_query
from moe_ops.kernels.triton.decode.one_query_plan import (
    INVARIANT_SPAN,
    MERGED,
    invariant_plan_for,
)
from moe_ops.registry.invariance import invariant
from moe_ops.testing import F16
from tests.chosen import those_of
from tests.decode_ops import test_quantized_linears as of_the_op
from tests.random_batches import bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
call_of = partial(of_the_op.call_of, device=DEVICE)
H, N, D = 4, 2, 32
SEEN = 90
# Slots of a cache, and before a sequence in it.
CACHES = {
    "alone": (128, 0), "behind padding": (128, 37), "in a larger one": (700, 0),
    "across spans": (700, INVARIANT_SPAN - 50),
    "of many spans": (MERGED * INVARIANT_SPAN + 600, 2 * INVARIANT_SPAN + 3),
}  # fmt: skip


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(bits(got), bits(want))


def attended(slots: int, before: int, sequences: int, sinks: bool) -> Tensor:
    """The output of the last of some sequences, whose own is the same in any cache."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, sink = (
        torch.randn(size, generator=draw) for size in ((1, H, D), (N, SEEN, D), (N, SEEN, D), (H,))
    )
    queries = torch.randn(sequences, H, D)
    keys, values = (torch.randn(sequences, N, slots, D) for _ in range(2))
    mask = torch.rand(sequences, slots) < 0.5
    mask[-1] = False
    mask[-1, before : before + SEEN] = True
    queries[-1], keys[-1, :, before : before + SEEN] = q[0], k
    values[-1, :, before : before + SEEN] = v
    for t in (keys, values):  # behind the last slot that is seen there may be anything
        t[-1, :, before + SEEN :] = float("nan")
    given = [t.to(DEVICE, F16) for t in (queries, keys, values)]
    of = sink.to(DEVICE, F16) if sinks else None
    return one_query.attend(*given, mask.to(DEVICE), D**-0.5, of, invariant=True)[-1]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("name", those_of([*CACHES][:4], CACHES))
def test_attention_of_a_sequence_does_not_know_its_cache(name: str, sinks: bool) -> None:
    want = attended(*CACHES["alone"], 1, sinks)
    sequences = 2 if name == "of many spans" else 3
    assert same(attended(*CACHES[name], sequences, sinks), want)


@pytest.mark.parametrize("slots", [1, 512, 4096, 200000])
def test_programs_have_as_many_slots_of_every_cache(slots: int) -> None:
    plan = invariant_plan_for(slots, 512, 2048)
    assert (plan.span, plan.tile) == (INVARIANT_SPAN, 64)
    assert plan.splits >= 2 and plan.splits * plan.span >= slots


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
def test_linear_layers_of_a_row(normed: bool) -> None:
    K, sizes = 200, (33, 5)
    x_TK = torch.randn(9, K, device=DEVICE).to(F16)
    weights = [torch.randn(n, K, device=DEVICE).to(F16) for n in sizes]
    gain, biases = torch.randn(K, device=DEVICE).to(F16), [None, weights[1][:, 0].contiguous()]

    def run(rows: Tensor) -> list[Tensor]:
        if normed:
            return linears.run_normed(rows, rows, gain, 1e-6, weights, biases, invariant=True)
        return linears.run(rows, weights, biases, invariant=True)

    want = run(x_TK)
    for t in (0, 8):
        got = run(x_TK[t, None])
        assert all(same(y, of_all[t : t + 1]) for y, of_all in zip(got, want, strict=True))


@pytest.mark.parametrize("format", those_of(["int8:row"], ["mxfp4", "int8:row", "uint4:1x128"]))
def test_linear_layers_in_codes_of_a_row(format: str) -> None:
    """Of more rows than one launch has, too."""
    call, _ = call_of(70, 256, (33, 5), format, F16)
    gain, rest = torch.ones(256, device=DEVICE, dtype=F16), [
        getattr(call, name) for name in ("weights", "scales", "zeros", "global_scales", "biases")
    ]  # fmt: skip

    def run(rows: Tensor) -> list[Tensor]:
        normed = NormedQuantizedLinearsCall(rows, None, gain, 1e-6, *rest, call.w_format)
        plain = type(call)(rows, *rest, call.w_format)
        return [*multiply_few(plain), *multiply_normed(normed)]

    with invariant():
        want = run(call.x_TK)
        for t in (0, 69):
            got = run(call.x_TK[t, None].clone())
            assert all(same(y, of_all[t : t + 1]) for y, of_all in zip(got, want, strict=True))
