"""Routings recorded and replayed in compiled code."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import moe_ops
from moe_ops import RecordedRouting
from moe_ops.passes.inductor.compiled import pipeline_of
from moe_ops.passes.inductor.pipeline import GraphRun
from moe_ops.testing import TOL, assert_close
from tests.hf import families
from tests.hf.twins import PLAIN

pytestmark = pytest.mark.slow
F32 = torch.float32


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def pair(family: str = "qwen3_moe", layers: int = 2) -> tuple[Any, Any]:
    cls = families.model_class(family)
    config = families.tiny_config(cls.config_class, {"*": {"num_hidden_layers": layers}})
    model = families.build_class(cls, config).model
    return model, moe_ops.compile(model)


def text(batch: int, tokens: int) -> Tensor:
    return torch.randint(16, 90, (batch, tokens), generator=torch.Generator().manual_seed(batch))


def others(record: RecordedRouting) -> RecordedRouting:
    return dataclasses.replace(record, ids_TLK=(record.ids_TLK + 1) % record.num_experts)


def recorded(model: Any, *calls: Tensor) -> RecordedRouting:
    with moe_ops.record_routing(model, weights=True) as recording, torch.inference_mode():
        for ids in calls:
            model(ids)
    return recording.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwards:
    """Forwards of a compiled model: one that is recorded, the same that is not, then both again,
    and some of other sizes that are recorded."""

    want: RecordedRouting
    got: RecordedRouting
    codes: list[str]  # of the graphs of the first
    recording: list[GraphRun]  # of the pipeline
    plain: list[GraphRun]
    again: list[GraphRun]


@pytest.fixture(scope="module")
def forwards() -> Forwards:
    model, twin = pair()
    calls = [text(2, 7), text(3, 5), text(1, 9)]
    runs, ends = pipeline_of(twin).runs, [0]
    with config.patch(fx_graph_cache=False), torch.inference_mode():
        _, codes = run_and_get_code(recorded, twin, calls[0])  # which resets Dynamo
        ends.append(len(runs))
        twin(calls[0])
        ends.append(len(runs))
        recorded(twin, calls[0])
        twin(calls[0])
        ends.append(len(runs))
    parts = [runs[begin:end] for begin, end in itertools.pairwise(ends)]
    of_runs = dict(zip(("recording", "plain", "again"), parts, strict=True))
    want, got = (recorded(m, *calls) for m in (model, twin))
    return Forwards(want=want, got=got, codes=codes, **of_runs)


def test_forwards_of_any_size_are_recorded_by_one_graph(forwards: Forwards) -> None:
    want, got = forwards.want, forwards.got
    assert got.calls == want.calls == ((2, 7), (3, 5), (1, 9))
    assert torch.equal(got.ids_TLK, want.ids_TLK)
    assert want.weights_TLK is not None and got.weights_TLK is not None
    assert_close(got.weights_TLK, want.weights_TLK, TOL["route", torch.float16])


def test_ids_are_written_where_they_are_chosen(forwards: Forwards) -> None:
    """No launch copies them, and none casts them for the experts."""
    between = [
        code.rpartition("route_recording.planned(")[2].partition("moe_ops.experts.planned(")[0]
        for code in forwards.codes
        if "moe_ops.experts.planned(" in code
    ]
    assert between
    for part in between:
        assert part
        assert "cpp_fused" not in part
        assert "ops.aten" not in part


def test_models_that_are_not_recorded_have_the_graphs_that_they_had(forwards: Forwards) -> None:
    assert forwards.recording and forwards.plain and not forwards.again
    assert not any(c.op == "route_recording" for run in forwards.plain for c in run.choices)
    assert any(c.op == "route_recording" for run in forwards.recording for c in run.choices)


def test_generate_is_recorded_and_replayed() -> None:
    model, twin = pair()
    ids = text(3, 6)
    with moe_ops.record_routing(model) as recording:
        want = model.generate(ids, **PLAIN)
    of_model = recording.take()
    with moe_ops.record_routing(twin) as recording:
        assert torch.equal(twin.generate(ids, **PLAIN), want)
    record = recording.take()
    assert record.calls == of_model.calls
    assert torch.equal(record.ids_TLK, of_model.ids_TLK)
    with moe_ops.replay_routing(model, others(record)):
        moved = model.generate(ids, **PLAIN)
    with moe_ops.replay_routing(twin, others(record)):
        assert torch.equal(twin.generate(ids, **PLAIN), moved)
    assert not torch.equal(moved, want)


@pytest.mark.every  # eager training takes them in test_models.py
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_training_takes_what_was_recorded(family: str) -> None:
    model, twin = pair(family)
    ids = text(2, 6)
    record = recorded(model, ids)
    for given in (record, others(record)):
        grads = []
        for trained in (model, twin):
            model.zero_grad()
            with moe_ops.replay_routing(trained, given):
                trained(input_ids=ids, labels=ids).loss.backward()
            grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
            for p in model.parameters():
                p.grad = None
        assert grads[0].keys() == grads[1].keys()
        for name, want in grads[0].items():
            assert_close(grads[1][name], want, TOL["route", torch.float16], name)


@pytest.mark.every  # eager training is recorded in test_models.py
def test_training_is_recorded() -> None:
    model, twin = pair(layers=1)
    ids = text(2, 6)
    want = recorded(model, ids)
    with moe_ops.record_routing(twin) as recording:
        twin(input_ids=ids, labels=ids).loss.backward()
    assert torch.equal(recording.take().ids_TLK, want.ids_TLK)
