"""Prompts given as embeddings: transformers' tokens, by steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

import moe_ops
from moe_ops import compiler
from moe_ops.forward.layer_cache import CACHE
from moe_ops.generation import prompts
from moe_ops.graphs.runner import TIMES
from tests.chosen import in_turn, one_in, those_of
from tests.generation.test_published_classes import SERVED
from tests.hf import families
from tests.hf.auto_classes import build_published
from tests.hf.twins import PLAIN, check, twin_of
from tests.recompiling import Traced

# Attention alone, pictures and states, latents and an indexer, and a class that takes none.
CHOSEN = (
    "MixtralForCausalLM", "Qwen3_5MoeForConditionalGeneration", "DeepseekV32ForCausalLM",
    "NemotronHForCausalLM",
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("qwen3_moe").model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(16, 90, (3, 9))


def padded(ids: Tensor, *pads: int) -> Tensor:
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


def result(model: Any, inputs: dict[str, Any]) -> Tensor | str:
    """The tokens of a call, or its error."""
    torch.manual_seed(7)
    try:
        tokens: Tensor = model.generate(**{**PLAIN, **inputs})
    except ValueError as error:
        return str(error)
    return tokens


def check_embeds(model: Any, twin: Any, ids: Tensor, **inputs: Any) -> Tensor | str:
    """What both give for the embeddings of ids, which has to be the same."""
    with torch.no_grad():
        inputs["inputs_embeds"] = model.get_input_embeddings()(ids)
    want, got = result(model, inputs), result(twin, inputs)
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor) and torch.equal(got, want), f"got {got}, want {want}"
    else:
        assert got == want
    return want


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize("name", those_of(CHOSEN, SERVED)))
def test_tokens_are_stocks(name: str, ids: Tensor) -> None:
    model = build_published(name).model
    twin, mask = twin_of(model), padded(ids, 3, 0, 1)
    tokens = check_embeds(model, twin, ids[:1], max_new_tokens=24)
    check_embeds(model, twin, ids, attention_mask=mask, max_new_tokens=24)
    check_embeds(model, twin, ids, attention_mask=mask, do_sample=True)
    check_embeds(model, twin, ids, attention_mask=mask, num_beams=2)
    check_embeds(model, twin, ids, attention_mask=mask, input_ids=ids.flip(1))
    check_embeds(model, twin, ids, attention_mask=mask, input_ids=ids[:, :4])
    assert not twin._moe_ops_generation.told
    sizes = {(r.rows, r.captured) for r in moe_ops.generation_report(twin)}
    assert sizes == ({(1, True), (4, True), (8, True)} if isinstance(tokens, Tensor) else set())


@in_turn(
    pytest.mark.parametrize("beams", [1, 2]),
    pytest.mark.parametrize("given", ["embeds", "ids", "fewer ids"]),
)
def test_ids_beside_them_are_handed_out(given: str, beams: int, model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    told = {"embeds": {}, "ids": {"input_ids": ids.flip(1)}, "fewer ids": {"input_ids": ids[:, :2]}}
    more = {"num_beams": beams, "repetition_penalty": 1.5, **told[given]}
    tokens = check_embeds(model, twin, ids, attention_mask=padded(ids, 2), **more)
    assert isinstance(tokens, Tensor)
    before = told[given].get("input_ids", ids[:, :0])
    assert torch.equal(tokens[:, : before.shape[1]], before)
    check(model, twin, ids)  # and from ids again
    assert not twin._moe_ops_generation.told


def test_embeddings_without_a_text(model: Any) -> None:
    """As soft prompts are, also of the caller's mode and with a gradient."""
    twin = twin_of(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            embeds = torch.randn(2, 5, model.config.hidden_size)
            want, got = (m.generate(inputs_embeds=embeds, **PLAIN) for m in (model, twin))
        assert torch.equal(got, want)
    asked = torch.nn.Parameter(torch.randn(2, 5, model.config.hidden_size))
    want, got = (m.generate(inputs_embeds=asked, **PLAIN) for m in (model, twin))
    assert torch.equal(got, want)
    assert [r.steps for r in moe_ops.generation_report(twin)] == [3 * 8]


@pytest.mark.parametrize("given", ["embeds", "ids"])
def test_a_chat_goes_on_from_and_with_embeddings(given: str, model: Any, ids: Tensor) -> None:
    twin, embed = twin_of(model), model.get_input_embeddings()
    said = []
    for m in (model, twin):
        cache, text = DynamicCache(config=model.config), ids
        for _ in range(3):
            with torch.no_grad():
                call = {"inputs_embeds": embed(text), **PLAIN, CACHE: cache}
                if given == "ids":
                    call["input_ids"] = text
                new = m.generate(**call)[:, -PLAIN["max_new_tokens"] :]
            text = torch.cat([text, new, ids[:, :4]], 1)
        said.append(text)
    assert torch.equal(*said)
    assert not twin._moe_ops_generation.told


def test_they_are_not_captured_and_leave_the_graphs_of_others(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    for _ in range(TIMES + 1):
        check_embeds(model, twin, ids, attention_mask=padded(ids, 2))
    assert [(r.captured, r.prompt_graphs) for r in moe_ops.generation_report(twin)] == [(True, 0)]
    for _ in range(TIMES + 1):
        check(model, twin, ids)
        check_embeds(model, twin, ids)
    (report,) = moe_ops.generation_report(twin)
    assert (report.prompt_graphs, report.prompts_replayed) == (1, 2)
    positions = torch.zeros_like(ids)
    given = prompts.Prompt(None, None, positions, embeds=torch.zeros(3, 9, 4))
    assert prompts.key_of(given, {}) is None
    assert prompts.key_of(prompts.Prompt(ids, None, positions), {}) is not None


@pytest.mark.slow
def test_they_share_the_code_of_ids(
    model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    # Dynamo's graphs are counted, which need no code.
    monkeypatch.setattr(compiler, "Net", Traced)
    twin = moe_ops.compile(model)
    for length in (9, 5):
        check(model, twin, ids[:, :length])
    counters.clear()
    check_embeds(model, twin, ids)
    with torch.inference_mode():
        embeds = torch.randn(3, 7, model.config.hidden_size)
        want, got = (m.generate(inputs_embeds=embeds, **PLAIN) for m in (model, twin))
    assert torch.equal(got, want)
    assert counters["stats"]["unique_graphs"] == 0
