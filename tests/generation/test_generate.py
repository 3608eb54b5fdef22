"""`generate` by steps: transformers' tokens, whatever the call; what is compiled, kept, refused."""

from __future__ import annotations

import inspect
import logging
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import GenerationConfig

import moe_ops
from moe_ops.forward.layer_cache import CACHE
from moe_ops.generation.decoder import Decoder, rows_for, slots_for
from moe_ops.generation.generate import QuickGenerate
from moe_ops.generation.refusals import shape_refusal
from moe_ops.generation.sample import StopCheck
from moe_ops.graphs.cuda_graph import CaptureError
from tests.chosen import CHOSEN, in_turn, those_of
from tests.graphs.recorder import Recorder
from tests.hf import families
from tests.hf.auto_classes import build_text
from tests.hf.twins import PLAIN, check, defer, twin_of, uncompiled


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("qwen3_moe").model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(16, 90, (3, 7))


CALLS = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "sampled": {"do_sample": True, "top_k": 9, "temperature": 0.7},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several of each": {"do_sample": True, "num_return_sequences": 2},
    "no repetition": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "static": {"cache_implementation": "static"},
}


@in_turn(
    pytest.mark.parametrize(
        "family",
        [
            "qwen3_moe",
            *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt_oss", "deepseek_v3")),
        ],
    ),
    pytest.mark.parametrize("call", CALLS),
)
def test_tokens_are_those_of_transformers(family: str, call: str, ids: Tensor) -> None:
    model = families.build(family).model
    twin = twin_of(model)
    check(model, twin, ids, **CALLS[call])
    check(model, twin, ids[:2, :4], **CALLS[call])
    assert moe_ops.generation_report(twin)[0].captured == (call != "one token")
    assert not twin._moe_ops_generation.told


def test_the_last_slot_is_used(model: Any) -> None:
    ids = torch.randint(16, 90, (1, 255))
    twin = twin_of(model)
    check(model, twin, ids, max_new_tokens=2)
    assert [r.slots for r in moe_ops.generation_report(twin)] == [256]
    check(model, twin, ids, max_new_tokens=3)
    assert [r.slots for r in moe_ops.generation_report(twin)] == [256, 512]


def test_left_padding_and_odd_masks(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[2, :1] = 0
    check(model, twin, ids, attention_mask=mask)
    mask[1, 3] = 0
    check(model, twin, ids, attention_mask=mask)


def test_sequences_that_end_early_are_padded(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    ends = check(model, twin, ids)[:, 9].tolist()
    check(model, twin, ids, eos_token_id=ends)
    for end in ends:
        check(model, twin, ids, eos_token_id=end)


def test_a_window_shorter_than_the_text(ids: Tensor) -> None:
    model = families.build("gpt_oss").model
    check(model, twin_of(model), ids.repeat(1, 3), max_new_tokens=20)


def test_scores_cache_and_streamer_are_handed_out(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    more = {**PLAIN, "return_dict_in_generate": True, "output_scores": True}
    want, got = model.generate(ids, **more), twin.generate(ids, **more)
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores))
    for theirs, ours in zip(want[CACHE].layers, got[CACHE].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
    twin.generate(ids + 1, **PLAIN)  # does not write into what was handed out
    on = [{CACHE: out[CACHE]} for out in (want, got)]
    tokens = [twin.generate(want.sequences, **PLAIN, **kwargs) for kwargs in on]
    assert torch.equal(*tokens)

    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[Tensor] = []

        def put(self, tokens: Tensor) -> None:
            self.tokens.append(tokens.flatten())

        def end(self) -> None: ...

    streamer = Streamer()
    got = twin.generate(ids[:1], streamer=streamer, **PLAIN)
    assert torch.equal(torch.cat(streamer.tokens), got[0])


def test_calls_that_need_more_fall_back_to_transformers(
    ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    model = families.build("qwen3_moe").model  # to hand out attentions it gets hooks that stay
    twin = twin_of(model)
    with caplog.at_level(logging.INFO, "moe_ops"):
        for _ in range(2):
            check(model, twin, ids, use_cache=False)
        out = twin.generate(
            ids, output_attentions=True, return_dict_in_generate=True, **PLAIN
        )  # an attention that gives its weights is another one
    assert len(out.attentions) == 9
    reasons = [r.getMessage() for r in caplog.records if "falls back" in r.getMessage()]
    assert [r.partition("own: ")[2] for r in reasons] == [
        "use_cache is off",
        "output_attentions is asked for",
    ]
    assert moe_ops.generation_report(twin) == []


def test_the_callers_mode_does_not_matter(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    want = check(model, twin, ids)
    with torch.inference_mode():
        assert torch.equal(twin.generate(ids, **PLAIN), want)
    assert torch.equal(twin.generate(ids, **PLAIN), want)
    assert [r.steps for r in moe_ops.generation_report(twin)] == [3 * 8]


def test_sizes_are_rounded_up_and_the_one_used_longest_ago_is_dropped(model: Any) -> None:
    assert [rows_for(n) for n in (1, 2, 3, 8, 9)] == [1, 2, 4, 8, 16]
    assert [slots_for(n) for n in (1, 256, 257, 4096)] == [256, 256, 512, 4096]
    assert [slots_for(n) for n in (4097, 9000)] == [8192, 12288]
    decoder = Decoder(model, uncompiled(), most=2)
    first = decoder.lease(3, 100)
    decoder.give_back(first.steps)
    assert decoder.lease(4, 200).steps is first.steps  # nobody else gets it now
    assert decoder.lease(4, 200).steps is not first.steps
    for batch in (4, 1, 2):
        decoder.give_back(decoder.lease(batch, 100).steps)
    assert [r.rows for r in decoder.report()] == [1, 2]


def test_replaced_weights_are_captured_again(ids: Tensor) -> None:
    model = families.build("qwen3_moe").model
    recorder = Recorder()
    twin = twin_of(model, uncompiled(recorder))
    check(model, twin, ids)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    check(model, twin, ids)
    assert recorder.captures == 1
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()
    check(model, twin, ids)
    assert recorder.captures == 2


def test_a_failed_capture_is_logged_and_steps_run(
    model: Any, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    errors = CaptureError("a host sync"), AssertionError("tried again")
    twin = twin_of(model, uncompiled(Recorder(*errors)))
    with caplog.at_level(logging.WARNING, "moe_ops"):
        check(model, twin, ids)
        check(model, twin, ids)
    (record,) = caplog.records
    assert "a host sync" in record.getMessage()
    assert not moe_ops.generation_report(twin)[0].captured


@pytest.mark.slow
def test_threads_and_nested_calls(model: Any, ids: Tensor) -> None:
    twin, wrong = twin_of(model), []
    want = {n: model.generate(ids[:, :n], **PLAIN) for n in (3, 5, 7)}

    def use(n: int) -> None:
        for _ in range(3):
            if not torch.equal(twin.generate(ids[:, :n], **PLAIN), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=use, args=(n,)) for n in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

    def nested(tokens: Tensor, scores: Tensor) -> Tensor:
        assert torch.equal(twin.generate(ids[:, :3], **PLAIN), want[3])
        return scores

    assert torch.equal(twin.generate(ids, logits_processor=[nested], **PLAIN), want[7])


@pytest.mark.parametrize("ends_at", [0, 1, 4])
def test_a_deferred_check_is_one_token_late(ends_at: int) -> None:
    check = StopCheck(torch.device("cpu"), deferred=True)
    flags = [torch.tensor([int(n < ends_at), 0]) for n in range(8)]
    stops = [check(flag) for flag in flags[: ends_at + 2]]
    assert stops == [False] * (ends_at + 1) + [True]
    assert check.late == 1
    check = StopCheck(torch.device("cpu"), deferred=True)
    assert not any(check(torch.tensor([1])) for _ in range(3))
    check.finish()
    assert check.late == 0


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where what is too much has to be cut off."""
    defer(monkeypatch)


def test_deferred_checks_give_the_same_tokens(model: Any, ids: Tensor, deferred: None) -> None:
    twin = twin_of(model)
    tokens = check(model, twin, ids[:1])[0].tolist()
    for end in tokens[7:]:
        check(model, twin, ids[:1], eos_token_id=end)


@pytest.mark.slow
def test_a_compiled_model_compiles_once_for_all_lengths_and_calls(model: Any) -> None:
    torch._dynamo.reset()
    twin = moe_ops.compile(model)
    assert type(twin).__name__ == type(model).__name__ and isinstance(twin, type(model))
    ids = torch.randint(16, 90, (4, 40))
    check(model, twin, ids[:3, :7])
    counters.clear()
    for batch, length in ((3, 12), (4, 40), (3, 7), (4, 2)):
        check(model, twin, ids[:batch, :length])
    assert counters["stats"]["unique_graphs"] == 0
    check(model, twin, ids[:1, :9])  # another number of rows: another step, the same prompt code
    assert counters["stats"]["unique_graphs"] == 4
    report = moe_ops.generation_report(twin)[-1]
    assert (report.rows, report.slots, report.steps, report.captured) == (1, 256, 8, False)


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "olmoe", "deepseek_v3"])
def test_compiled_families(family: str) -> None:
    torch._dynamo.reset()
    model = families.build(family).model
    twin = moe_ops.compile(model)
    ids = torch.randint(16, 90, (3, 11))
    check(model, twin, ids)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    check(model, twin, ids, attention_mask=mask)


@pytest.mark.every
@pytest.mark.slow
def test_an_optimized_model_with_inductors_own_graphs_asked_for(ids: Tensor) -> None:
    torch._dynamo.reset()
    model = families.build("qwen3_moe").model
    twin = moe_ops.compile(moe_ops.optimize(model), mode="reduce-overhead")
    check(model, twin, ids)
    check(model, twin, ids[:, :3], num_beams=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", those_of(CHOSEN, families.discover()))
def test_every_family_gives_the_same_tokens_or_says_why_it_keeps_its_own(family: str) -> None:
    tiny = build_text(family)
    if not tiny.can_generate:
        pytest.skip(f"{family} does not generate")
    twin = twin_of(tiny.model)
    if shape_refusal(tiny.model) is not None:
        assert not isinstance(twin, QuickGenerate)
        return
    inputs = dict(tiny.inputs)
    check(tiny.model, twin, inputs.pop("input_ids"), **inputs)


@pytest.mark.parametrize("family", ["qwen3_moe", "nemotron_h"])
def test_the_twin_has_the_signatures_of_transformers(family: str) -> None:
    """By which transformers decides what to pass, and what is a typo."""
    model = families.build(family).model
    twin, cls = twin_of(model), type(model)
    ours = [n for n, v in vars(QuickGenerate).items() if callable(v) and hasattr(cls, n)]
    assert {"generate", "prepare_inputs_for_generation", "_sample"} <= set(ours)
    for name in {*ours, "forward", "_validate_model_kwargs"} - {"__reduce_ex__"}:
        got, want = (inspect.signature(getattr(c, name)).parameters for c in (type(twin), cls))
        assert [(p.name, p.kind, p.default) for p in got.values()] == [
            (p.name, p.kind, p.default) for p in want.values()
        ], name
    with pytest.raises(ValueError, match=r"not used by the model: \['inptus'\]"):
        twin.generate(torch.ones(1, 3, dtype=torch.int64), inptus=1, **PLAIN)


def test_a_model_that_is_not_ours_has_no_report(model: Any) -> None:
    with pytest.raises(ValueError, match=r"is not ours; give its model to moe_ops\.compile"):
        moe_ops.generation_report(model)


@pytest.mark.every
@pytest.mark.slow
def test_a_config_for_transformers_own_compilation(model: Any, ids: Tensor) -> None:
    torch._dynamo.reset()
    config = moe_ops.compile_config(stop_after="lower")
    config._compile_all_devices = True
    assert config.to_dict()["options"]["triton.cudagraphs"] is True
    check(model, model, ids)
    want = model.generate(ids, **PLAIN)
    got = model.generate(ids, cache_implementation="static", compile_config=config, **PLAIN)
    assert torch.equal(got, want)


@pytest.mark.slow
def test_continuous_batching(ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import ContinuousBatchingConfig

    model = families.build("qwen3_moe").model
    config = GenerationConfig(do_sample=False, **{**PLAIN, "eos_token_id": 1})
    want = [model.generate(row[None], generation_config=config)[0, len(row) :] for row in ids]
    twin = moe_ops.compile(model)
    # To ask for a CPU's memory it wants another package.
    memory = ("cpu", 1 << 30, 0, 0)
    module = "transformers.generation.continuous_batching.cache"
    monkeypatch.setattr(f"{module}.get_device_and_memory_breakdown", lambda: memory)
    blocks = ContinuousBatchingConfig(num_blocks=32, max_batch_tokens=64)
    with torch.no_grad():
        out = twin.generate_batch(
            ids.tolist(), generation_config=config, continuous_batching_config=blocks
        )
    assert [r.generated_tokens for r in out.values()] == [w.tolist() for w in want]
    assert twin._moe_ops_generation.told == {"it is generate_batch, which has a cache of its own"}
