"""Candidates for the next tokens, which steps of several tokens check: of prompt lookup, of
assistants, of a model's own layers."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache, GenerationMixin, modeling_layers
from transformers.generation import candidate_generator
from transformers.generation.candidate_generator import CandidateGenerator

import moe_ops
from moe_ops import compiler
from moe_ops.forward.layer_cache import CACHE
from moe_ops.generation.wide import WIDTHS, width_for
from tests.chosen import in_turn, one_in
from tests.generation.test_caches import check_alike
from tests.hf import families
from tests.hf.auto_classes import build_published
from tests.hf.twins import PLAIN, twin_of
from tests.recompiling import Traced

# From transformers 5.24 on its generator asks for the last states alone.
HAS_MTP = hasattr(modeling_layers, "MtpModel") and CACHE == "cache"
MORE = {**PLAIN, "max_new_tokens": 30}  # past a window of 16
DICT = {**MORE, "return_dict_in_generate": True}
# Attention alone, with windows and sinks, with latents.
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", pytest.param("mixtral", marks=pytest.mark.every)]
# With latents that an indexer chooses, with chosen blocks, with windows and pictures.
CLASSES = ["DeepseekV32ForCausalLM", "MiniMaxM3SparseForConditionalGeneration"]
CLASSES += ["Gemma4ForConditionalGeneration"]


def repeating(*pads: int) -> tuple[Tensor, Tensor]:
    """A text whose end was there before, behind padding."""
    ids = torch.randint(16, 90, (len(pads) or 1, 9))
    ids = torch.cat([ids, ids[:, :5]], 1)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return ids, mask


def assistant(family: str, tokens: int = 5) -> Any:
    model = families.build(family, seed=0).model
    return drafting(model, tokens)


def drafting(model: Any, tokens: int = 5) -> Any:
    """A model that drafts so many tokens, however sure it is."""
    model.generation_config.num_assistant_tokens = tokens
    model.generation_config.assistant_confidence_threshold = 0
    return model


def lookup(family: str) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": 3}


def assisted(family: str) -> dict[str, Any]:
    return {"assistant_model": assistant(family)}


def seeded(model: Any, ids: Tensor, **kwargs: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(ids, **{**DICT, **kwargs})


def check_same(model: Any, twin: Any, ids: Tensor, make: Callable[[], Any], **kwargs: Any) -> None:
    """Tokens and cache of both are the same."""
    want, got = (seeded(m, ids, **make(), **kwargs) for m in (model, twin))
    assert torch.equal(got.sequences, want.sequences), (got.sequences, want.sequences)
    for layer in want[CACHE].layers:  # of transformers before 5.24 it may be a tensor
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = int(layer.cumulative_length)
    check_alike(got[CACHE], want[CACHE])
    assert not twin._moe_ops_generation.told


def wide_of(twin: Any) -> dict[int, int]:
    """The steps of several tokens so far, by the size that served them."""
    return {w.tokens: w.steps for r in moe_ops.generation_report(twin) for w in r.wide}


@in_turn(
    pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"]),
    pytest.mark.parametrize("how", [lookup, assisted], ids=lambda how: how.__name__),
    pytest.mark.parametrize("family", FAMILIES),
)
def test_tokens_and_the_cache_are_stocks(family: str, how: Any, sampled: bool) -> None:
    if CACHE != "cache" and (family, how) == ("gpt_oss", assisted):
        pytest.skip("transformers before 5.24 raises an error behind a window")
    model = families.build(family).model
    twin = twin_of(model)
    ids, mask = repeating(0)
    make = functools.partial(how, family)
    check_same(model, twin, ids, make, do_sample=sampled)
    assert wide_of(twin)[8] > 1
    ids, mask = repeating(3)
    check_same(model, twin, ids, make, do_sample=sampled, attention_mask=mask)


@pytest.mark.slow
@one_in(3, pytest.mark.parametrize("name", CLASSES))
def test_of_published_classes_as_well(name: str) -> None:
    model = build_published(name).model
    twin = twin_of(model)
    draft = drafting(build_published(name).model)
    ids, _ = repeating()
    for sampled in (False, True):
        check_same(model, twin, ids, lambda: lookup(""), do_sample=sampled)
        check_same(model, twin, ids, lambda: {"assistant_model": draft}, do_sample=sampled)
    assert wide_of(twin)[8] > 1


class Known(CandidateGenerator):
    """Candidates that are known ahead: so many tokens of a text, or others."""

    def __init__(self, text: Tensor, numbers: list[int], wrong: bool = False) -> None:
        self.text = text
        self.numbers = numbers
        self.wrong = wrong

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        n = input_ids.shape[1]
        number = self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]
        new = self.text[:, n : n + number]
        return torch.cat([input_ids, (new + 1) % 90 if self.wrong else new], 1), None

    def update_candidate_strategy(self, *args: Any) -> None:
        """There is none."""


def generated_with(
    monkeypatch: pytest.MonkeyPatch, twin: Any, ids: Tensor, candidates: Any, **kwargs: Any
) -> Tensor:
    """The tokens with these candidates, whichever transformers is asked for."""
    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda *_, **__: candidates)
    out: Tensor = twin.generate(ids, prompt_lookup_num_tokens=1, **{**MORE, **kwargs})
    return out


@pytest.mark.parametrize("wrong", [False, True], ids=["all accepted", "none accepted"])
def test_candidates_save_steps_if_they_are_right(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build("gpt_oss").model
    twin, (ids, _) = twin_of(model), repeating()
    want = model.generate(ids, **{**MORE, "max_new_tokens": 36})
    got = generated_with(monkeypatch, twin, ids, Known(want, [4], wrong))
    assert torch.equal(got, want[:, :44])
    # With the prompt four tokens and the next one, then five at a time or one.
    assert wide_of(twin) == {8: 30 if wrong else 6}


def test_numbers_of_candidates_share_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("qwen3_moe").model
    twin, (ids, _) = twin_of(model), repeating()
    want = model.generate(ids, **{**MORE, "max_new_tokens": 300})
    numbers = [0, 1, 6, 2, 0, 7, 8, 30, 3, 31, 0, 140, 1]
    got = generated_with(monkeypatch, twin, ids, Known(want, numbers), max_new_tokens=290)
    assert torch.equal(got, want[:, : got.shape[1]]) and got.shape[1] == 304
    (report,) = moe_ops.generation_report(twin)
    assert [w.tokens for w in report.wide] == [8, 32, 128]
    assert all(w.captured for w in report.wide) and report.captured


def test_more_tokens_than_slots_move_to_larger_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("gpt_oss").model
    twin, ids = twin_of(model), torch.randint(16, 90, (1, 200))
    want = model.generate(ids, **{**MORE, "max_new_tokens": 200})
    # transformers drops what goes beyond the last token.
    got = generated_with(monkeypatch, twin, ids, Known(want, [3, 100, 3]), max_new_tokens=40)
    assert torch.equal(got, want[:, :240])
    assert [r.slots for r in moe_ops.generation_report(twin)] == [256, 512]


def test_a_prompt_with_candidates_shares_the_graph_of_others() -> None:
    model = families.build("qwen3_moe").model
    twin, (ids, _) = twin_of(model), repeating()
    for more in ({}, {"prompt_lookup_num_tokens": 3}, {}, {"prompt_lookup_num_tokens": 2}):
        want, got = (m.generate(ids, **MORE, **more) for m in (model, twin))
        assert torch.equal(got, want)
    (report,) = moe_ops.generation_report(twin)
    assert (report.prompt_graphs, report.prompts_replayed) == (1, 2)


@one_in(2, pytest.mark.parametrize("tokens", [5, 20]))
def test_a_compiled_assistant_runs_by_steps_and_goes_on(tokens: int) -> None:
    model = families.build("gpt_oss").model
    twin, draft = twin_of(model), twin_of(assistant("gpt_oss", tokens))
    ids = torch.randint(16, 90, (1, 244 - tokens))  # drafts begin in 256 slots, and need more
    for _ in range(2):
        want = model.generate(ids, **MORE)
        got = twin.generate(ids, assistant_model=draft, **MORE)
        assert torch.equal(got, want)
        gc.collect()
        reports = moe_ops.generation_report(draft)
        assert [r.slots for r in reports] == [256, 512]  # given back, and of no call any more
    # Of the tokens that are drafted the first follows from one step of several.
    assert sum(r.steps for r in reports) > 3 * sum(wide_of(draft).values()) > 0
    assert not twin._moe_ops_generation.told and not draft._moe_ops_generation.told


def test_drafts_are_those_of_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a window, where transformers' own assistants forget some of it."""
    model = families.build("gpt_oss").model
    draft = twin_of(assistant("gpt_oss"))
    own, compared = candidate_generator.AssistedCandidateGenerator.get_candidates, []

    def watched(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        ids, logits = own(self, input_ids, **kwargs)
        if logits is not None:
            want = model(ids).logits[:, input_ids.shape[1] - 1 : -1]
            torch.testing.assert_close(logits, want, rtol=1e-3, atol=1e-4)
            compared.append(logits.shape[1])
        return ids, logits

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "get_candidates", watched)
    with torch.no_grad():
        seeded(model, repeating()[0], assistant_model=draft, do_sample=True, top_k=0)
    assert sum(compared) > 20


def test_a_model_drafts_for_itself_with_fewer_layers() -> None:
    model = families.build("qwen3_moe").model
    twin, (ids, _) = twin_of(model), repeating()
    want, got = (seeded(m, ids, assistant_early_exit=1).sequences for m in (model, twin))
    assert torch.equal(got, want) and wide_of(twin)
    assert twin._moe_ops_generation.told == {"it is an assistant of fewer layers"}


def random_layers(cls: Any, main_model: Any, **kwargs: Any) -> Any:
    """Layers that predict further tokens, in place of those of a checkpoint."""
    made = cls(main_model, main_model.config.num_mtp_layers).eval()
    families.randomise(made.layers, seed=3)
    return made


@in_turn(
    pytest.mark.parametrize("layers", [1, 2]),
    pytest.mark.parametrize("family", [f for f in ("deepseek_v3", "glm4_moe") if HAS_MTP]),
)
def test_own_layers_draft_from_the_last_states(
    family: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_layers.MtpModel, "from_pretrained", classmethod(random_layers))
    model = families.build(family).model
    model.config.num_mtp_layers = layers
    own, drafts = candidate_generator.MTPCandidateGenerator.get_candidates, []

    def watched(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        ids, logits = own(self, input_ids, **kwargs)
        drafts.append(ids[:, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(candidate_generator.MTPCandidateGenerator, "get_candidates", watched)
    twin, (ids, _) = twin_of(model), repeating()
    for sampled in (False, True):
        drafts.clear()
        check_same(model, twin, ids, lambda: {"use_mtp": True}, do_sample=sampled)
        half = len(drafts) // 2
        assert drafts[:half] == drafts[half:] and len(drafts[1][0]) == layers
    assert wide_of(twin)


REFUSED = {
    "states": ("lfm2_moe", {}, "candidates may be forgotten again, but not what its layers keep"),
    "a cache": ("qwen3_moe", {CACHE: DynamicCache}, "candidates would go on behind a cache of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_calls_are_stocks_for_a_reason(case: str) -> None:
    family, more, reason = REFUSED[case]
    model = families.build(family).model
    twin, (ids, _) = twin_of(model), repeating()
    want, got = (
        seeded(m, ids, **lookup(family), **{name: make() for name, make in more.items()})
        for m in (model, twin)
    )
    assert torch.equal(got.sequences, want.sequences)
    check_alike(got[CACHE], want[CACHE])
    (told,) = twin._moe_ops_generation.told
    assert told.startswith(reason)


class Wants(Known):
    requires_model_outputs = True
    model_kwargs_overrides = {"output_attentions": True}  # noqa: RUF012


def test_candidates_that_ask_for_more_are_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("qwen3_moe", "eager").model
    model.set_attn_implementation("eager")
    twin, (ids, _) = twin_of(model), repeating()
    want = model.generate(ids, **MORE)
    got = generated_with(monkeypatch, twin, ids, Wants(want, [3]))
    assert torch.equal(got, want)
    asked = "what makes candidates asks for output_attentions"
    assert twin._moe_ops_generation.told == {asked}


MORE_OF_IT: dict[str, dict[str, Any]] = {
    "scores": {"output_scores": True, "output_logits": True},
    "many candidates": {"prompt_lookup_num_tokens": 200},
    "an end": {"eos_token_id": 17},
}


if CACHE == "cache":  # transformers before 5.24 refuses it
    MORE_OF_IT["a static cache"] = {"cache_implementation": "static"}


@pytest.mark.parametrize("case", MORE_OF_IT)
def test_what_else_may_be_asked_for_is_stocks(case: str) -> None:
    model = families.build("qwen3_moe").model
    twin, (ids, _) = twin_of(model), repeating()
    how = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 20, **MORE_OF_IT[case]}
    want, got = (seeded(m, ids, **how) for m in (model, twin))
    assert want.keys() == got.keys() and torch.equal(got.sequences, want.sequences)
    check_alike(got[CACHE], want[CACHE])
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
    assert wide_of(twin) and not twin._moe_ops_generation.told


def test_errors_of_stock_are_raised() -> None:
    model = families.build("qwen3_moe").model
    twin, (ids, _) = twin_of(model), repeating(0, 0)
    with pytest.raises(ValueError, match="only supported for batch_size = 1"):
        twin.generate(ids, prompt_lookup_num_tokens=2, **MORE)
    check_same(model, twin, ids[:1], lambda: lookup(""))


def test_a_cache_forgets_no_more_than_it_has() -> None:
    twin = twin_of(families.build("qwen3_moe").model)
    with twin._moe_ops_generation.call():
        lease = twin._moe_ops_generation.lease(1, 20, DynamicCache(), False)
        lease.read(torch.randint(16, 90, (1, 5)), use_cache=True)
        for tokens in (-6, 2):
            with pytest.raises(ValueError, match="a cache of 5 tokens cannot forget"):
                lease.crop(tokens)
        assert lease.reading and lease.get_seq_length() == 5
        lease.crop(-2)
        assert lease.get_seq_length() == 3 == int(lease.steps.filled)


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (8, 8), (9, 32), (128, 128)])
def test_few_sizes_serve_all_numbers(tokens: int, width: int) -> None:
    assert width_for(tokens) == width in WIDTHS


def test_a_step_of_too_many_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 128 tokens, got 129; split them"):
        width_for(129)


@pytest.mark.every
@pytest.mark.slow
def test_nothing_is_compiled_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    # Dynamo's graphs are counted, which need no code.
    monkeypatch.setattr(compiler, "Net", Traced)
    model = families.build("gpt_oss").model
    twin, draft = (moe_ops.compile(m) for m in (model, assistant("gpt_oss")))
    for k in (4, 4, 2, 5):
        for more in ({"prompt_lookup_num_tokens": k}, {"assistant_model": drafting(draft, k)}):
            ids, _ = repeating()
            want, got = (m.generate(ids, **MORE, **more) for m in (model, twin))
            assert torch.equal(got, want)
        if k == 4:
            counters.clear()
    assert counters["stats"]["unique_graphs"] == 0
