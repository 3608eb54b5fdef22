"""The report of the graphs of a compiled model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.graphs.cuda_graph import capture_call
from moe_ops.graphs.repeated import Repeated
from moe_ops.graphs.report import (
    BucketReport,
    ForwardReport,
    GraphReport,
    SizeReport,
    StepsReport,
    WideReport,
    refusals,
)
from moe_ops.graphs.runner import TIMES
from tests.forward.layered import Layered
from tests.graphs.recorder import Recorder, runner
from tests.hf import families
from tests.moe_block import Block

TOOLS: Any = (Recorder(), capture_call)

CAPTURED = ForwardReport(
    batch=1, tokens=128, masked=False, calls=9, replays=6, bytes=38 << 20, refusal=None
)
REFUSED = ForwardReport(
    batch=2, tokens=64, masked=True, calls=4, replays=0, bytes=0, refusal="its decoder gives two"
)
STEPS = StepsReport(
    rows=4, slots=256, steps=31, captured=True, cache_bytes=3 << 20, prompt_graphs=1,
    prompts_replayed=2,
)  # fmt: skip


WIDE = (
    WideReport(tokens=8, steps=5, captured=True, bytes=2 << 20, refusal=None),
    WideReport(tokens=32, steps=1, captured=False, bytes=0, refusal="a sync"),
)
WITH_PROMPTS = replace(
    STEPS,
    captured=False,
    refusal="a sync",
    prompts=(CAPTURED, replace(REFUSED, refusal=None)),
    wide=WIDE,
)
BUCKETS = (
    BucketReport(tokens=8, hits=3, bytes=5 << 20),
    BucketReport(tokens=64, hits=0, bytes=0, refusal="a sync"),
)
CALLS = (
    SizeReport(shapes=((2, 8), (), (5,)), calls=6, replays=3, bytes=1 << 20, refusal=None),
    SizeReport(shapes=(), calls=1, replays=0, bytes=0, refusal=None),
)


def test_it_says_what_is_captured_and_why_not() -> None:
    assert str(GraphReport((CAPTURED, REFUSED), (STEPS,))).splitlines() == [
        "forward 1 x 128: 9 calls, 6 by a graph of 38 MiB",
        "forward 2 x 64, masked: 4 calls, no graph, its decoder gives two",
        "generate, 4 rows of 256 slots: 31 steps, captured; 1 graphs of prompts served 2; cache of "
        "3 MiB",
    ]
    assert str(GraphReport((), ())) == "no graphs yet"


def test_prompts_calls_and_buckets_have_lines_of_their_own() -> None:
    refused = refusals("forward", {"it has a hook": 4}.items())
    assert str(GraphReport((), (WITH_PROMPTS,), CALLS, BUCKETS, refused)).splitlines() == [
        "generate, 4 rows of 256 slots: 31 steps, uncaptured, a sync; 1 graphs of prompts served "
        "2; cache of 3 MiB",
        "  prompt 1 x 128: 9 calls, 6 by a graph of 38 MiB",
        "  prompt 2 x 64, masked: 4 calls, no graph",
        "  steps of up to 8 tokens: 5, captured in 2 MiB",
        "  steps of up to 32 tokens: 1, uncaptured, a sync",
        "call of 2 x 8, (), 5: 6 calls, 3 by a graph of 1 MiB",
        "call of nothing: 1 calls, no graph",
        "bucket of 8 tokens: 3 by a graph of 5 MiB",
        "bucket of 64 tokens: no graph, a sync",
        "forward: 4 calls, no graph, it has a hook",
    ]


def test_a_model_has_one_and_others_are_refused() -> None:
    model = families.build("qwen3_moe").model
    fast = moe_ops.compile(model)
    assert moe_ops.graph_report(fast) == GraphReport((), ())
    assert moe_ops.graph_report(moe_ops.compile(Block())) == GraphReport((), ())
    with pytest.raises(ValueError, match=r"is not compiled by moe_ops\.compile; give the model"):
        moe_ops.graph_report(model)


@pytest.mark.every
@pytest.mark.slow
def test_explain_has_the_same_as_the_report() -> None:
    model = families.build("qwen3_moe").model
    run, inputs = Layered(model), {"input_ids": torch.randint(3, 90, (2, 5))}
    for _ in range(TIMES + 1):
        run(**inputs)
    run(**inputs, position_ids=torch.arange(5)[None])
    with torch.no_grad():
        run.twin(**inputs, output_hidden_states=True)
    report = moe_ops.graph_report(run.twin)
    assert str(report).splitlines() == [
        "forward 2 x 5: 4 calls, 1 by a graph of 0 MiB",
        "forward as one graph: 1 calls, no graph, output_hidden_states is asked for",
        "forward: 1 calls, no graph, it takes position_ids, too",
    ]
    found = moe_ops.explain(run.twin, inputs)
    assert found.captured == report
    assert type(found).from_json(found.to_json()) == found
    (_, text) = str(found).split("CUDA graphs\n")
    assert [line.strip() for line in text.splitlines()] == str(report).splitlines()
    assert moe_ops.explain(model, inputs).captured is None


def test_backends_and_captured_functions_have_one() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    recorded = runner(double, Recorder())
    for rows in (3, 3, 17):
        with torch.no_grad():
            recorded(torch.rand(rows, 8))
    assert str(moe_ops.graph_report(recorded)).splitlines() == [
        "bucket of 4 tokens: 2 by a graph of 0 MiB",
        "call: 1 calls, no graph, 17 tokens are more than the largest bucket, 16",
    ]
    backend = moe_ops.backend(capture=True)
    backend.repeated = [Repeated(lambda x: [x * 2], frozenset(), capture=tool) for tool in TOOLS]
    for repeated in backend.repeated:
        for _ in range(TIMES + 2):
            repeated(torch.rand(2, 8))
    assert str(moe_ops.graph_report(backend)).splitlines() == [
        "call of 2 x 8: 5 calls, 2 by a graph of 0 MiB",
        "call: 5 calls, no graph, there is no CUDA GPU to capture on",
    ]


@pytest.mark.parametrize("other", [None, "model", lambda x: x, moe_ops.backend()])
def test_of_anything_else_there_is_none(other: Any) -> None:
    with pytest.raises(TypeError, match=r"graphs are of a model that moe_ops\.compile returned"):
        moe_ops.graph_report(other)
