"""Routings of forwards that are captured and padded, by a stand-in for captures."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moe_ops
from moe_ops import RecordedRouting
from moe_ops.graphs.cuda_graph import CaptureError
from moe_ops.graphs.runner import TIMES
from moe_ops.testing import TOL, assert_close
from tests.forward.layered import Layered, left_padded, tokens
from tests.hf import families

# The first is padded to 40 tokens; buffers that grow would have it captured again.
SIZES = [(2, 37), (3, 11)]
F32 = torch.float32


def layered(family: str = "qwen3_moe") -> Layered:
    return Layered(families.build(family).model)


def recorded(model: object, *seeds: int) -> RecordedRouting:
    with moe_ops.record_routing(model, tokens=400) as recording, torch.no_grad():  # type: ignore[arg-type]
        for seed in seeds:
            for size in SIZES:
                model(input_ids=tokens(*size, seed), use_cache=False)  # type: ignore[operator]
    return recording.take()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_call_is_recorded_before_and_after_its_capture(family: str) -> None:
    run = layered(family)
    seeds = range(TIMES + 3)
    want, got = recorded(run.model, *seeds), recorded(run.twin, *seeds)
    assert (run.graphs.captures, run.graphs.replayed) == (2, 6)
    assert got.calls == want.calls
    assert torch.equal(got.ids_TLK, want.ids_TLK)
    assert run.whole == 0


def test_a_call_that_could_not_be_captured_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    run = layered()

    def fails(*args: object, **kwargs: object) -> None:
        raise CaptureError("not today")

    monkeypatch.setattr(type(run.graphs), "__call__", fails)
    seeds = range(TIMES + 1)
    want, got = recorded(run.model, *seeds), recorded(run.twin, *seeds)
    assert all(size.refusal == "not today" for size in run.forwards.report())
    assert torch.equal(got.ids_TLK, want.ids_TLK)


def test_masked_calls_are_recorded_with_their_padding() -> None:
    run = layered()
    found = []
    for model in (run.model, run.twin):
        with moe_ops.record_routing(model) as recording, torch.no_grad():
            for seed in range(TIMES + 1):
                mask = left_padded(3, 11, seed, 0, 5)
                model(input_ids=tokens(3, 11, seed), attention_mask=mask, use_cache=False)
        found.append(recording.take())
    seen = torch.cat([left_padded(3, 11, seed, 0, 5).flatten() for seed in range(TIMES + 1)]) > 0
    assert found[0].calls == found[1].calls
    # What is masked attends to nothing, and each attention makes something else of that.
    assert torch.equal(found[0].ids_TLK[seen], found[1].ids_TLK[seen])
    assert run.graphs.replayed == 1


def test_captured_forwards_take_what_was_recorded() -> None:
    run = layered()
    seeds = range(TIMES + 2)
    record = recorded(run.model, *seeds)
    record = dataclasses.replace(record, ids_TLK=(record.ids_TLK + 1) % record.num_experts)
    outs = []
    for model in (run.model, run.twin):
        with moe_ops.replay_routing(model, record) as replay, torch.no_grad():
            outs.append([
                model(input_ids=tokens(*size, seed), use_cache=False).logits
                for seed in seeds
                for size in SIZES
            ])  # fmt: skip
        assert replay.calls_left == 0
    assert run.graphs.replayed == 4
    for want, got in zip(*outs, strict=True):
        assert_close(got, want, TOL["model", F32])


def test_graphs_are_made_anew_where_a_context_begins_and_ends() -> None:
    run = layered()
    for _ in range(2):
        for _ in range(TIMES + 1):
            run(input_ids=tokens(2, 37), use_cache=False)
        recorded(run.twin, *range(TIMES + 1))
    assert run.graphs.captures == 2 * (1 + 2)
    run(input_ids=tokens(2, 37), use_cache=False)
