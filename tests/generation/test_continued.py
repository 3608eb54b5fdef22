"""Prompts that go on behind tokens in a cache: chats, caches of the caller, prompts in chunks."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

import moe_ops
from moe_ops import compiler
from moe_ops.forward.kept import cache_refusal
from moe_ops.forward.layer_cache import CACHE
from tests.chosen import in_turn, those_of
from tests.generation.test_caches import check_alike
from tests.generation.test_published_classes import SERVED
from tests.hf import families
from tests.hf.auto_classes import build_published
from tests.hf.twins import PLAIN, check, twin_of
from tests.recompiling import Traced

CHOSEN = ("Qwen3_5MoeForConditionalGeneration", "DeepseekV32ForCausalLM", "LaraMiniForCausalLM")
DICT = {**PLAIN, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("gpt_oss").model


def prompt(*pads: int, tokens: int = 9) -> tuple[Tensor, Tensor]:
    ids = torch.randint(16, 90, (len(pads), tokens))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return ids, mask


def extended(ids: Tensor, mask: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """More tokens behind a text, all of which are seen."""
    ids = torch.cat([ids, torch.randint(16, 90, (len(ids), tokens))], 1)
    return ids, torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)


def empty_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def chat(model: Any, *pads: int) -> tuple[list[Tensor], Any]:
    """The tokens of three turns, each of which gets the cache that the last one gave, and that."""
    torch.manual_seed(0)
    ids, mask = prompt(*pads)
    kwargs: dict[str, Any] = {}
    said = []
    for tokens, more in ((7, 6), (12, 1), (5, 3)):  # past a window of 16
        how = {**DICT, "max_new_tokens": tokens, **kwargs}
        out = model.generate(ids, attention_mask=mask, **how)
        kwargs = {CACHE: out[CACHE]}
        said.append(out.sequences)
        ids, mask = extended(out.sequences, mask, more)
    return said, kwargs[CACHE]


@pytest.mark.slow
@pytest.mark.parametrize("name", those_of(CHOSEN, SERVED))
def test_chats_are_stocks(name: str) -> None:
    model = build_published(name).model
    twin = twin_of(model)
    for pads in ((0,), (3, 0)):
        (want, theirs), (got, ours) = chat(model, *pads), chat(twin, *pads)
        assert all(map(torch.equal, got, want))
        check_alike(ours, theirs)
    assert not twin._moe_ops_generation.told


@pytest.mark.slow
@pytest.mark.parametrize("name", those_of(CHOSEN, SERVED))
def test_prompts_in_chunks_give_the_same_tokens(name: str) -> None:
    model = build_published(name).model
    twin = twin_of(model)
    ids, mask = prompt(4, 0, tokens=23)
    for size in (8, 22, 40):
        check(model, twin, ids, attention_mask=mask, prefill_chunk_size=size)
    check(model, twin, ids, attention_mask=mask, prefill_chunk_size=8, num_beams=2)
    assert not twin._moe_ops_generation.told


@in_turn(
    pytest.mark.parametrize(
        "made", [empty_cache, lambda model: DynamicCache()], ids=["known", "grown"]
    ),
    pytest.mark.parametrize("only_new", [False, True]),
)
def test_a_cache_of_the_caller_ends_as_stock_leaves_it(
    model: Any, made: Any, only_new: bool
) -> None:
    twin = twin_of(model)
    ids, mask = prompt(3, 0)
    caches = made(model), made(model)
    how = [{CACHE: cache, **PLAIN} for cache in caches]
    want, got = (
        m.generate(ids, attention_mask=mask, **h) for m, h in zip((model, twin), how, strict=True)
    )
    assert torch.equal(got, want)
    ids, mask = extended(want, mask, 4)
    if only_new:  # what is not in the cache
        ids = ids[:, -5:]
    want, got = (
        m.generate(ids, attention_mask=mask, **h) for m, h in zip((model, twin), how, strict=True)
    )
    assert torch.equal(got, want)
    check_alike(*caches[::-1])
    assert not twin._moe_ops_generation.told


@pytest.mark.parametrize("only_new", [False, True])
def test_a_chat_takes_the_slots_of_its_text(model: Any, only_new: bool) -> None:
    twin = twin_of(model)
    ids, mask = prompt(0, tokens=200)
    cache = empty_cache(model)
    twin.generate(ids, attention_mask=mask, **{CACHE: cache}, **PLAIN)
    ids, mask = extended(ids, mask, 40)
    more = ids[:, 208:] if only_new else ids
    twin.generate(more, attention_mask=mask, **{CACHE: cache}, **PLAIN)
    assert cache.get_seq_length() == 248
    assert [r.slots for r in moe_ops.generation_report(twin)] == [256]


def test_a_prefix_is_shared_and_freed(model: Any) -> None:
    twin = twin_of(model)
    ids, mask = prompt(3, 0)
    cache = empty_cache(model)
    twin.generate(ids, attention_mask=mask, **{CACHE: cache}, **PLAIN)
    held = [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]
    ids, mask = extended(twin.generate(ids, attention_mask=mask, **PLAIN), mask, 4)
    want = model.generate(ids, attention_mask=mask, **PLAIN)
    for _ in range(2):
        copied = copy.deepcopy(cache)
        assert torch.equal(
            twin.generate(ids, attention_mask=mask, **{CACHE: copied}, **PLAIN), want
        )
    now = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    assert all(map(torch.equal, now, held))
    dead = weakref.ref(cache)
    del cache, copied
    gc.collect()
    assert dead() is None


def test_a_call_that_fails_leaves_the_cache_as_it_was(model: Any) -> None:
    twin = twin_of(model)
    ids, _ = prompt(0)
    cache = empty_cache(model)
    twin.generate(ids, **{CACHE: cache}, **PLAIN)
    before = copy.deepcopy(cache)

    def fails(tokens: Tensor, scores: Tensor) -> Tensor:
        raise RuntimeError("no more")

    more = torch.cat([ids, torch.randint(16, 90, (1, 20))], 1)
    with pytest.raises(RuntimeError, match="no more"):
        twin.generate(more, logits_processor=[fails], **{CACHE: cache}, **PLAIN)
    check_alike(cache, before)


class OfItsOwn(DynamicCache):
    """A cache of a class that nobody knows."""


def test_other_caches_are_refused_with_a_reason(model: Any) -> None:
    twin = twin_of(model)
    ids, _ = prompt(0, 0)
    theirs, ours = (OfItsOwn(config=model.config) for _ in range(2))
    want = model.generate(ids, **{CACHE: theirs}, **PLAIN)
    assert torch.equal(twin.generate(ids, **{CACHE: ours}, **PLAIN), want)
    check_alike(ours, theirs)
    recording = empty_cache(model)
    recording.activate_past_recording()
    assert cache_refusal(recording, model.config, 2) == (
        "the caller's cache keeps tokens beyond its windows"
    )
    others = DynamicCache(config=families.build("qwen3_moe").model.config)
    others.layers = others.layers[:1]
    assert cache_refusal(others, model.config, 2) == "the caller's cache has layers of other kinds"
    known = model.generate(ids, **DICT)[CACHE]
    assert cache_refusal(known, model.config, 2) is None
    assert cache_refusal(known, model.config, 4) == (
        "the caller's cache has 2 sequences in place of 4"
    )
    assert twin._moe_ops_generation.told == {"the caller has a OfItsOwn"}


@pytest.mark.slow
def test_chats_of_any_length_share_code(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    # Dynamo's graphs are counted, which need no code.
    monkeypatch.setattr(compiler, "Net", Traced)
    model = families.build("qwen3_next").model
    twin = moe_ops.compile(model)
    chat(twin, 0, 0)
    counters.clear()
    for tokens in (5, 40):
        ids, mask = prompt(0, 0, tokens=tokens)
        cache = empty_cache(model)
        for more in (13, 2):
            ids = twin.generate(ids, attention_mask=mask, **{CACHE: cache}, **PLAIN)
            ids, mask = extended(ids, mask, more)
    assert counters["stats"]["unique_graphs"] == 0
