"""Prompts whose sizes come again: captured by a stand-in, they give transformers' tokens."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import moe_ops
from moe_ops import compiler
from moe_ops.forward.masks import repeatable
from moe_ops.forward.regions import ByKind, Region
from moe_ops.generation import prompts
from moe_ops.generation.refusals import shape_refusal
from moe_ops.generation.steps import Tools
from moe_ops.graphs.cuda_graph import Captured, CaptureError, GraphPool
from moe_ops.graphs.runner import TIMES
from moe_ops.testing import F32, TOL, assert_close
from tests.chosen import CHOSEN, those_of
from tests.graphs.recorder import Recorder
from tests.hf import families, twins
from tests.hf.auto_classes import build_text
from tests.recompiling import Traced

PLAIN = {"max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
GENERATOR = torch.Generator().manual_seed(0)


class Graphs(Recorder):
    """A stand-in that counts by kind. What runs takes it that it is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.monkeypatch = monkeypatch
        self.of_kind: Counter[str] = Counter()
        self.replayed_of_kind: Counter[str] = Counter()
        self.masks: list[list[Any]] = [[]]  # that layers got, a list for each run
        self.error: str | None = None  # of prompts

    def tools(self) -> Tools:
        return twins.uncompiled(self, layers=ByKind("layer", self.recording))

    def recording(self, region: Region) -> Region:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if "attention_mask" in kwargs:
                self.masks[-1].append(kwargs["attention_mask"])
            return region(module, *args, **kwargs)

        return call

    def __call__(self, function: Callable[[], None], *args: Any, **kwargs: Any) -> Captured:
        kind = "prompt" if "Prompts" in getattr(function, "__qualname__", "") else "step"
        if self.error is not None and kind == "prompt":
            raise CaptureError(self.error)
        self.of_kind[kind] += 1
        runs = 0

        def captured() -> None:
            nonlocal runs
            self.masks.append([])
            with self.monkeypatch.context() as patch:
                if runs:
                    self.replayed_of_kind[kind] += 1
                    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                function()
            runs += 1

        return super().__call__(captured, *args, **kwargs)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("qwen3_moe").model


def twin_of(model: Any, graphs: Graphs) -> Any:
    return twins.twin_of(model, graphs.tools())


def tokens(rows: int, length: int) -> Tensor:
    """Others at every call, though `check` sets the seed."""
    return torch.randint(16, 90, (rows, length), generator=GENERATOR)


def padded(ids: Tensor, *pads: int) -> Tensor:
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


def check(model: Any, twin: Any, ids: Tensor, **kwargs: Any) -> None:
    """The tokens of both are the same, and so are the logits of every one."""
    kwargs = {**PLAIN, "return_dict_in_generate": True, "output_logits": True, **kwargs}
    torch.manual_seed(7)
    want = model.generate(ids, **kwargs)
    torch.manual_seed(7)
    got = twin.generate(ids, **kwargs)
    assert torch.equal(got.sequences, want.sequences)
    assert_close(torch.stack(got.logits), torch.stack(want.logits), TOL["model", F32])


def last_report(twin: Any) -> tuple[int, int]:
    report = moe_ops.generation_report(twin)[-1]
    return report.prompt_graphs, report.prompts_replayed


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "gpt_oss"),
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("mixtral", "deepseek_v3")),
    ],
)
def test_prompts_of_a_size_that_comes_again_are_replayed(family: str, graphs: Graphs) -> None:
    model = families.build(family).model
    twin = twin_of(model, graphs)
    for time in range(TIMES + 2):
        ids = tokens(3, 11)  # one row to spare
        check(model, twin, ids)
        check(model, twin, ids, attention_mask=padded(ids, time, 0, 5))
        ready = time + 1 >= TIMES
        assert graphs.of_kind == Counter(step=1, prompt=2 * ready)
        assert graphs.replayed_of_kind["prompt"] == 2 * max(0, time + 2 - TIMES)
    assert last_report(twin) == (2, 6)


@pytest.mark.slow
@pytest.mark.parametrize("family", those_of(CHOSEN, families.discover()))
def test_every_family_gives_the_same_tokens(family: str, graphs: Graphs) -> None:
    tiny = build_text(family)
    if not tiny.can_generate or shape_refusal(tiny.model) is not None:
        pytest.skip(f"{family} does not generate by steps")
    twin = twin_of(tiny.model, graphs)
    for seed in range(TIMES + 1):
        inputs = families.inputs_for(tiny, 3, 9, seed)
        ids = inputs.pop("input_ids")
        check(tiny.model, twin, ids, **inputs)
        check(tiny.model, twin, ids, attention_mask=padded(ids, seed + 1, 0, 2), **inputs)
    assert inputs or twin._moe_ops_generation.told or graphs.replayed_of_kind["prompt"] == 4


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("pads", [(), (3, 0)])
def test_layers_get_the_masks_that_they_get_uncaptured(
    family: str, pads: tuple[int, ...], graphs: Graphs
) -> None:
    """What else they get would be compiled in the midst of a capture."""
    model = families.build(family).model
    twin = twin_of(model, graphs)
    ids = tokens(2, 150)  # longer than a window
    for _ in range(TIMES):
        twin.generate(ids, attention_mask=padded(ids, *pads), **{**PLAIN, "max_new_tokens": 1})
    first, *rest = (of_run for of_run in graphs.masks if of_run)
    assert len(rest) == 1 + 1  # to warm up, and the replay; the first TIMES - 1 are in one list
    n = len(first) // (TIMES - 1)
    for of_run in rest:
        assert len(of_run) == n
        for got, want in zip(of_run, first, strict=False):
            assert (got is None) == (want is None)
            if want is not None:
                assert got.dtype == want.dtype and got.stride() == want.stride()
                assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("family", those_of(["qwen3_moe"], ["qwen3_moe", "gpt_oss"]))
def test_nothing_is_compiled_for_a_capture(
    family: str, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(compiler, "GraphPool", lambda: GraphPool(graphs))
    # Dynamo's graphs are counted, which need no code; test_generate.py has that compiled, too.
    monkeypatch.setattr(compiler, "Net", Traced)
    model = families.build(family).model
    twin = moe_ops.compile(model)
    for time in range(TIMES + 1):
        if time == TIMES - 1:
            counters.clear()
        for rows, length in ((3, 9), (1, 9), (4, 40), (1, 1)):
            ids = tokens(rows, length)
            check(model, twin, ids)
            if length > 1:
                check(model, twin, ids, attention_mask=padded(ids, time + 1))
        with torch.inference_mode():
            check(model, twin, tokens(3, 12))
    assert graphs.of_kind["prompt"] == 8 and graphs.replayed_of_kind["prompt"] == 16
    assert counters["stats"]["unique_graphs"] == 0


def test_other_calls_between_do_not_matter(model: Any, graphs: Graphs) -> None:
    twin = twin_of(model, graphs)
    for _ in range(TIMES + 1):
        for rows, length in ((4, 9), (1, 9), (3, 9), (4, 8), (1, 1)):
            check(model, twin, tokens(rows, length))
        check(model, twin, tokens(2, 9), num_beams=2)
        check(model, twin, tokens(2, 9), do_sample=True, num_return_sequences=2)
        with torch.inference_mode():
            check(model, twin, tokens(4, 9))
    assert graphs.of_kind["prompt"] == 5  # beams and returned sequences are rows like others
    for rows, length in ((4, 9), (1, 9)):
        check(model, twin, tokens(rows, length), repetition_penalty=1.5)

    def nested(ids: Tensor, scores: Tensor) -> Tensor:
        check(model, twin, tokens(4, 9))
        return scores

    ids = tokens(4, 9)
    want = model.generate(ids, **PLAIN)
    for _ in range(TIMES):
        assert torch.equal(twin.generate(ids, logits_processor=[nested], **PLAIN), want)


def test_replaced_weights_forget_the_graphs(graphs: Graphs) -> None:
    model = families.build("qwen3_moe").model
    twin = twin_of(model, graphs)
    for _ in range(TIMES + 1):
        check(model, twin, tokens(2, 7))
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)  # in place, which a graph sees
    check(model, twin, tokens(2, 7))
    assert last_report(twin) == (1, 3)
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()
    check(model, twin, tokens(2, 7))
    assert last_report(twin) == (0, 3)
    for _ in range(TIMES):
        check(model, twin, tokens(2, 7))
    assert last_report(twin) == (1, 5) and graphs.of_kind["prompt"] == 2


def test_a_failed_capture_is_logged_and_not_tried_again(
    model: Any, graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    twin = twin_of(model, graphs)
    graphs.error = "a host sync"
    with caplog.at_level(logging.WARNING, "moe_ops"):
        for _ in range(TIMES + 2):
            check(model, twin, tokens(2, 7))
        for _ in range(TIMES + 1):
            check(model, twin, tokens(2, 8))
    (record,) = caplog.records
    assert record.getMessage() == ("prompts of generate (2 x 7) run uncaptured: a host sync")
    assert last_report(twin) == (0, 0)
    sizes = moe_ops.generation_report(twin)[-1].prompts
    assert [(p.batch, p.tokens, p.masked, p.calls, p.refusal) for p in sizes] == [
        (2, 7, False, TIMES + 2, "a host sync"),
        (2, 8, False, TIMES + 1, "a host sync"),
    ]
    graphs.error = None
    model.lm_head.weight.data = model.lm_head.weight.data.clone().neg_()
    for _ in range(TIMES):
        check(model, twin, tokens(2, 7))
    assert last_report(twin) == (1, 1)


def test_the_sizes_that_came_last_are_kept(
    model: Any, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_SIZES", 2)
    twin = twin_of(model, graphs)
    for _ in range(TIMES + 1):
        check(model, twin, tokens(1, 5))
        check(model, twin, tokens(1, 6))
    assert last_report(twin) == (2, 4)
    check(model, twin, tokens(1, 7))
    check(model, twin, tokens(1, 6))
    assert last_report(twin) == (1, 5)
    captured = graphs.of_kind["prompt"]
    for _ in range(2 * TIMES):  # more than are kept take turns
        for length in (5, 6, 7):
            check(model, twin, tokens(1, length))
    assert graphs.of_kind["prompt"] == captured and last_report(twin) == (0, 6)


def test_long_prompts_and_other_attentions_are_not_captured(
    model: Any, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_TOKENS", 12)
    twin = twin_of(model, graphs)
    for _ in range(TIMES):
        check(model, twin, tokens(2, 7))
        check(model, twin, tokens(2, 6))
    assert last_report(twin) == (1, 1)
    monkeypatch.setattr(prompts, "REPEATABLE", {"eager": None})
    check(model, twin, tokens(2, 6))
    assert last_report(twin) == (1, 1)


def test_a_graph_is_of_one_attention(model: Any, graphs: Graphs) -> None:
    twin = twin_of(model, graphs)
    for _ in range(TIMES):
        check(model, twin, tokens(2, 7))
    assert last_report(twin) == (1, 1)
    before = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        check(model, twin, tokens(2, 7))
        assert last_report(twin) == (1, 1)
    finally:
        model.config._attn_implementation = before
    check(model, twin, tokens(2, 7))
    assert last_report(twin) == (1, 2)


def test_calls_that_share_a_graph() -> None:
    ids, mask = tokens(2, 7), torch.ones(2, 7)
    usual = {"use_cache": True, "logits_to_keep": 1, "return_dict": True}

    def key(ids: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Any:
        return prompts.key_of(prompts.Prompt(ids, mask, torch.zeros_like(ids)), kwargs)

    first = key(ids, None, usual)
    assert first is not None and first == key(ids + 1, None, {**usual, "inputs_embeds": None})
    others = [
        key(ids, mask, usual),
        key(ids[:1], None, usual),
        key(ids[:, :1], None, usual),
        key(ids, None, {**usual, "logits_to_keep": 0}),
        key(ids, None, {**usual, "use_cache": False}),
        key(ids, None, {"return_dict": True}),
    ]
    assert len({first, *others}) == 7
    for more in (
        {"return_dict": False},
        {"output_hidden_states": True},
        {"logits_to_keep": torch.tensor([6])},
        {"inputs_embeds": torch.zeros(2, 7, 4)},
        {"pixel_values": torch.zeros(2)},
    ):
        assert key(ids, None, {**usual, **more}) is None
    assert key(tokens(1, prompts.MOST_TOKENS), None, usual) is not None
    assert key(tokens(1, prompts.MOST_TOKENS + 1), None, usual) is None


def test_a_changed_argument_is_not_served_by_the_graph_of_another(
    model: Any, graphs: Graphs
) -> None:
    twin = twin_of(model, graphs)
    for keep in (1, 1, 1, 3, 1, 0, 3, 3):
        check(model, twin, tokens(2, 7), logits_to_keep=keep)
    assert graphs.of_kind["prompt"] == 2
    assert last_report(twin) == (2, 3)


def test_without_captures_nothing_is_replayed(model: Any) -> None:
    twin = twins.twin_of(model, twins.uncompiled())
    for _ in range(TIMES + 1):
        check(model, twin, tokens(2, 7))
    assert last_report(twin) == (0, 0)


def test_the_model_keeps_its_attention_while_masks_are_made(model: Any) -> None:
    """Another thread may run it."""
    before = model.config._attn_implementation
    ours = repeatable(model.config)
    assert ours._attn_implementation == f"moe_ops_prompt_{before}"
    assert model.config._attn_implementation == before
