"""Compiled, every class that auto classes give for a published configuration: stock's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers

import moe_ops
from moe_ops import compiler
from tests.chosen import those_of
from tests.generation.test_continued import chat
from tests.generation.test_published_classes import SERVED, inputs_of
from tests.hf import families
from tests.hf.auto_classes import AS_PUBLISHED, build_published
from tests.hf.twins import check
from tests.recompiling import Traced

# Its experts are no family's; transformers' class with pictures around it fails in 5.24.
LLAMA4 = "Llama4ForCausalLM"
# Windows; tests/generation/test_published_classes.py has others uncompiled.
CHOSEN = ("GptOssForCausalLM",)


def build(name: str) -> families.TinyModel:
    if name != LLAMA4:
        return build_published(name)
    cls = getattr(transformers, name)
    return families.build_class(cls, families.tiny_config(cls.config_class, AS_PUBLISHED))


def calls(names: Iterable[str]) -> list[Any]:
    """Every class as Dynamo reads it, of which the graphs run uncompiled, and compiled."""
    every = pytest.mark.every
    return [
        *those_of([(name, "eager") for name in CHOSEN], [(name, "eager") for name in names]),
        *(pytest.param((name, "inductor"), marks=every) for name in names),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("call", calls((*SERVED, LLAMA4)), ids="-".join)
def test_tokens_are_stocks(call: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, padded or not, of beams, in a chat, and 300 tokens past each window (of
    16 tokens) and each chunk (of 64 at most)."""
    name, backend = call
    if backend == "eager":
        monkeypatch.setattr(compiler, "Net", Traced)
    torch._dynamo.reset()
    tiny = build(name)
    model: Any = tiny.model
    twin = moe_ops.compile(model)
    ids, inputs = inputs_of(tiny, 1)
    check(model, twin, ids, max_new_tokens=64 + 300, **inputs)
    ids, inputs = inputs_of(tiny, 3, (3, 0, 1))
    check(model, twin, ids, max_new_tokens=24, **inputs)
    check(model, twin, ids, do_sample=True, **inputs)
    ids, inputs = inputs_of(tiny, 2, (3, 0))
    check(model, twin, ids, num_beams=2, **inputs)
    (want, _), (got, _) = chat(model, 3, 0, 1), chat(twin, 3, 0, 1)
    assert all(map(torch.equal, got, want))
    assert not twin._moe_ops_generation.told
    assert [(r.rows, r.slots) for r in moe_ops.generation_report(twin)] == [(1, 512), (4, 256)]
