"""The report of the graphs of a compiled model."""

from __future__ import annotations

import pytest

import moe_ops
from moe_ops.compiler import GraphReport
from moe_ops.forward.captured import ForwardReport
from moe_ops.generation.steps import StepsReport
from tests.hf import families
from tests.moe_block import Block

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


def test_it_says_what_is_captured_and_why_not() -> None:
    assert str(GraphReport((CAPTURED, REFUSED), (STEPS,))).splitlines() == [
        "forward 1 x 128: 9 calls, 6 by a graph of 38 MiB",
        "forward 2 x 64, masked: 4 calls, no graph, its decoder gives two",
        "generate, 4 rows of 256 slots: 31 steps, captured; 1 graphs of prompts served 2; cache of "
        "3 MiB",
    ]
    assert str(GraphReport((), ())) == "no graphs yet"


def test_a_model_has_one_and_others_are_refused() -> None:
    model = families.build("qwen3_moe").model
    fast = moe_ops.compile(model)
    assert moe_ops.graph_report(fast) == GraphReport((), ())
    assert moe_ops.graph_report(moe_ops.compile(Block())) == GraphReport((), ())
    with pytest.raises(ValueError, match=r"is not compiled by moe_ops\.compile; give the model"):
        moe_ops.graph_report(model)
