"""The routing kernel that writes down what it chooses, and takes what was written; in Triton's
interpreter without a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ops import OPS
from moe_ops.conformance.samples import mutated, samples
from moe_ops.testing import CASES, DEVICE, TOL, assert_close, reference_of, tolerance

pytest.importorskip("triton", reason="the kernels are Triton's")

CASE = replace(next(case for case in CASES if case.name == "odd"), T=7, E=12)
NAMES = ("route_recording", "route_replaying")
CALLS = [
    (name, sample.name)
    for name in NAMES
    for sample in samples(name, CASE, torch.bfloat16)
    if sample.name != "to_bfloat16"  # the interpreter cuts numbers off where a GPU rounds them
]


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.to(DEVICE, copy=True) if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize(("name", "label"), CALLS)
def test_kernel_does_what_the_definition_does(name: str, label: str) -> None:
    op = OPS[name]
    args = next(s.args for s in samples(name, CASE, torch.bfloat16) if s.name == label)
    got_args, want_args = on_device(args), on_device(args)
    weights, ids = op.backends["triton"].run(op.call(*got_args))
    want_weights, want_ids = reference_of(op.reference, *want_args)
    assert torch.equal(ids, want_ids)
    assert_close(weights, want_weights, tolerance(name, weights.dtype, torch.bfloat16))
    for got, want in zip(mutated(op, got_args), mutated(op, want_args), strict=True):
        assert_close(got.float(), want.float(), TOL[name, torch.bfloat16])
        assert torch.equal(got < 0, want < 0)  # the rows that nobody wrote


def test_what_is_recorded_has_the_bits_of_the_router() -> None:
    logits = torch.randn(5, 16, dtype=torch.bfloat16, device=DEVICE)
    ids = torch.full((4, 2), -1, dtype=torch.int16, device=DEVICE)
    weights = torch.full((4, 2), -1.0, device=DEVICE)
    at = torch.tensor([6], device=DEVICE)
    call = OPS["route_recording"].call(logits, 2, ids, at, ring_weights_SK=weights)
    got = OPS["route_recording"].backends["triton"].run(call)
    route = OPS["route"]
    want = route.backends["triton"].run(route.call(logits, 2))
    assert all(map(torch.equal, got, want))
    # Tokens 1 to 4 are at rows 7 to 10, which are 3, 0, 1 and 2 of four.
    assert torch.equal(ids.int(), want[1][[2, 3, 4, 1]])
    assert torch.equal(weights, want[0][[2, 3, 4, 1]])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ids_of_the_router_give_the_bits_of_its_weights(score: str) -> None:
    logits = torch.randn(5, 16, dtype=torch.bfloat16, device=DEVICE)
    route, replaying = OPS["route"], OPS["route_replaying"]
    same = {"score": score, "renormalize": True, "bias_E": torch.randn(16, device=DEVICE)}
    want = route.backends["triton"].run(route.call(logits, 3, **same))
    given = want[1].to(torch.int16)
    got = replaying.backends["triton"].run(replaying.call(logits, 3, given, **same))
    assert all(map(torch.equal, got, want))
