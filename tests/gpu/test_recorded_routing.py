"""Routings recorded in captured prompts, steps and forwards, and replayed in them."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops import OPS
from moe_ops.conformance.samples import mutated, samples
from moe_ops.testing import CASES, TOL, assert_close, reference_of, tolerance
from tests.hf import families

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo")]
PLAIN = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
SHIFT = 1  # of ids, so that they are none that a router would choose


@pytest.mark.parametrize("name", ["route_recording", "route_replaying"])
@pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
def test_kernels_do_what_the_definitions_do(name: str, case: Any) -> None:
    op = OPS[name]
    for label, args in samples(name, case, torch.bfloat16):
        got_args, want_args = on_device(args), on_device(args)
        weights, ids = op.backends["triton"].run(op.call(*got_args))
        want_weights, want_ids = reference_of(op.reference, *want_args)
        assert torch.equal(ids, want_ids), label
        tol = tolerance(name, weights.dtype, torch.bfloat16)
        assert_close(weights, want_weights, tol, label)
        for got, want in zip(mutated(op, got_args), mutated(op, want_args), strict=True):
            assert_close(got.float(), want.float(), tol, label)


def on_device(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_generate_records_what_a_forward_of_its_text_chooses(batch: int) -> None:
    model = families.build("qwen3_moe").model.cuda()
    twin = moe_ops.compile(model)
    ids = torch.randint(16, 90, (batch, 9), device="cuda")
    want = twin.generate(ids, **PLAIN)
    with moe_ops.record_routing(twin, weights=True) as recording:
        for _ in range(4):  # of which the last prompt is captured
            text = twin.generate(ids, **PLAIN)
            recorded = recording.take().joined()
    assert torch.equal(text, want)
    assert all(report.captured for report in moe_ops.generation_report(twin))
    with moe_ops.record_routing(model, weights=True) as recording, torch.no_grad():
        model(text[:, :-1])
    of_text = recording.take()
    assert torch.equal(recorded.ids_TLK, of_text.ids_TLK)
    assert_close(recorded.weights_TLK, of_text.weights_TLK, TOL["route", torch.float16])


def test_forwards_that_are_captured_and_padded_are_recorded() -> None:
    model = families.build("qwen3_moe").model.cuda()
    twin = moe_ops.compile(model)
    ids = torch.randint(16, 90, (3, 37), device="cuda")  # padded to 40
    with moe_ops.record_routing(model) as recording, torch.no_grad():
        model(ids)
    want = recording.take()
    with moe_ops.record_routing(twin) as recording, torch.inference_mode():
        for _ in range(5):
            twin(ids, use_cache=False)
    got = recording.take()
    assert any(size.replays for size in moe_ops.graph_report(twin).forwards)
    for i in range(5):
        assert torch.equal(got.of_calls(i, i + 1).ids_TLK, want.ids_TLK), i


def test_captured_steps_take_what_was_recorded() -> None:
    model = families.build("qwen3_moe").model.cuda()
    twin = moe_ops.compile(model)
    ids = torch.randint(16, 90, (3, 9), device="cuda")
    with moe_ops.record_routing(twin) as recording:
        own = twin.generate(ids, **PLAIN)
    recorded = recording.take()
    others = replace(recorded, ids_TLK=(recorded.ids_TLK + SHIFT) % recorded.num_experts)
    with moe_ops.replay_routing(model, others):
        want = model.generate(ids, **PLAIN)
    with moe_ops.replay_routing(twin, others) as replay:
        for _ in range(4):
            replay.rewind()
            got = twin.generate(ids, **PLAIN)
    assert torch.equal(got, want)
    assert not torch.equal(got, own)
    with moe_ops.replay_routing(twin, recorded):
        assert torch.equal(twin.generate(ids, **PLAIN), own)


def test_memory_of_the_device_is_that_of_the_rings() -> None:
    """In 10,000 steps and more."""
    model = families.build("qwen3_moe").model.cuda()
    twin = moe_ops.compile(model)
    ids = torch.randint(16, 90, (8, 9), device="cuda")
    call = {**PLAIN, "max_new_tokens": 200}
    with moe_ops.record_routing(twin, tokens=256) as recording:
        for _ in range(4):  # of which the third captures its prompt
            twin.generate(ids, **call)
        gc.collect()  # what a call leaves in cycles
        before = torch.cuda.memory_allocated()
        for _ in range(51):
            twin.generate(ids, **call)
        gc.collect()
        assert torch.cuda.memory_allocated() <= before
    assert recording.take().tokens == 55 * 8 * (9 + 199)
