"""Steps of every class that transformers' auto classes give for a published configuration: stock's
tokens, or a sentence why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import moe_ops
from moe_ops.generation.refusals import shape_refusal
from tests.chosen import those_of
from tests.hf import families, page
from tests.hf.auto_classes import build_published, published
from tests.hf.twins import check, twin_of

# Pictures and states; states alone; an indexer; a state and a window in one layer.
CHOSEN = (
    "Qwen3_5MoeForConditionalGeneration", "NemotronHForCausalLM", "DeepseekV32ForCausalLM",
    "LaraMiniForCausalLM",
)  # fmt: skip
# Why no call of a class runs by steps, by its shape or once one was tried.
UNSERVED = {
    "DeepseekV4ForCausalLM": "has layers of heavily_compressed_attention, for which there is no "
    "static cache",
    "DiffusionGemmaForBlockDiffusion": "cannot generate",
    "Inkling2LoopForConditionalGeneration": "a model sets layers of its cache",
    "MiniMaxForCausalLM": "transformers makes no cache for it",
    "PhimoeForCausalLM": "has a prepare_inputs_for_generation that looks at the length of the text",
    "Qwen4ExpForCausalLM": "a model asks a layer of its cache for indexer_position_ids",
    "Qwen4ExpForConditionalGeneration": "a model asks a layer of its cache for "
    "indexer_position_ids",
    "UnlimitedOcrForConditionalGeneration": "has a _prefill of its own",
}
# Classes that no tiny configuration builds, by what is missing.
UNBUILT = {
    "InklingForConditionalGeneration": "a package that computes its audio features",
    "Nemotron3_5TranscribeForConditionalGeneration": "sizes of its audio that fit each other",
    "Qwen3OmniMoeForConditionalGeneration": "a field of the configuration of what talks",
}
CLASSES = [name for name in published() if name not in UNBUILT]
SERVED = [name for name in CLASSES if name not in UNSERVED]


def inputs_of(tiny: Any, rows: int, pads: tuple[int, ...] = ()) -> tuple[Tensor, dict[str, Tensor]]:
    inputs = families.inputs_for(tiny, rows, 9, 1)
    ids = inputs.pop("input_ids")
    if pads:
        mask = torch.ones_like(ids)
        for row, pad in enumerate(pads):
            mask[row, :pad] = 0
        inputs["attention_mask"] = mask
    return ids, inputs


@pytest.mark.slow
@pytest.mark.parametrize("name", those_of(CHOSEN, CLASSES))
def test_tokens_are_stocks_or_a_reason_is_given(name: str) -> None:
    tiny = build_published(name)
    twin = twin_of(tiny.model)
    reason = shape_refusal(tiny.model)
    if reason is not None:
        assert reason == UNSERVED[name]
        return
    ids, inputs = inputs_of(tiny, 1)
    check(tiny.model, twin, ids, max_new_tokens=24, **inputs)
    ids, inputs = inputs_of(tiny, 3, (3, 0, 1))
    check(tiny.model, twin, ids, max_new_tokens=24, **inputs)
    check(tiny.model, twin, ids, do_sample=True, **inputs)
    ids, inputs = inputs_of(tiny, 2, (3, 0))
    check(tiny.model, twin, ids, num_beams=2, **inputs)
    assert twin._moe_ops_generation.told == ({UNSERVED[name]} if name in UNSERVED else set())
    report = moe_ops.generation_report(twin)
    assert name in UNSERVED or [(r.rows, r.captured) for r in report] == [(1, True), (4, True)]


def cell_of(name: str) -> str:
    if name in UNBUILT:
        return f"not tested, as a tiny one lacks {UNBUILT[name]}"
    return f"no: {UNSERVED[name]}" if name in UNSERVED else "yes"


def test_the_page_of_families_says_which_are_served() -> None:
    cells: dict[str, dict[str, str]] = {}
    for name, cls in published().items():
        cells.setdefault(cls.__module__.split(".")[2], {})[name] = cell_of(name)
    joined = {family: "; ".join(dict.fromkeys(found.values())) for family, found in cells.items()}
    page.hold(joined, f"generate by steps, transformers {transformers.__version__}")


@pytest.mark.slow
def test_attention_in_chunks() -> None:
    """Whose experts are no family's."""
    cls = transformers.Llama4ForCausalLM
    tiny = families.build_class(cls, families.tiny_config(cls.config_class))
    assert {type(x).__name__ for x in DynamicCache(config=tiny.model.config).layers} == {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
    }
    twin = twin_of(tiny.model)
    for pads in ((), (3, 0, 1)):
        ids, inputs = inputs_of(tiny, max(1, len(pads)), pads)
        check(tiny.model, twin, ids, max_new_tokens=40, **inputs)
        check(tiny.model, twin, ids, prefill_chunk_size=4, **inputs)
    assert not twin._moe_ops_generation.told


@pytest.mark.slow
@pytest.mark.parametrize("name", those_of(["LaraMiniForCausalLM"], SERVED))
def test_windows_are_passed(name: str) -> None:
    """By 300 tokens, of windows of 16."""
    tiny = build_published(name)
    ids, inputs = inputs_of(tiny, 2, (3, 0))
    check(tiny.model, twin_of(tiny.model), ids, max_new_tokens=16 + 300, **inputs)
