"""What happens to a model between calls of `generate` or beside them, and what calls leave."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moe_ops
from moe_ops import terminal as terminal_module
from moe_ops.forward.layer_cache import CACHE
from moe_ops.generation import steps
from moe_ops.generation.one_query import NAME
from moe_ops.generation.steps import Steps
from tests.hf import families
from tests.hf.twins import PLAIN, check, defer, twin_of, uncompiled
from tests.terminals import Terminal

HALF = torch.bfloat16


@pytest.fixture
def model() -> Any:
    return families.build("qwen3_moe").model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(16, 90, (3, 7))


def test_a_step_leaves_the_configuration_to_others(
    model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the model meanwhile gets masks and attention of its own."""
    twin = twin_of(model)
    seen = set()

    def watch(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        one = kwargs["hidden_states"].shape[1] == 1
        seen.add((one, attention.config._attn_implementation, model.config._attn_implementation))

    # Steps do not run with hooks, but nothing is compiled here, so this one is called.
    monkeypatch.setattr("moe_ops.generation.refusals.hooks_of", lambda model: ())
    model.model.layers[0].self_attn.register_forward_pre_hook(watch, with_kwargs=True)
    twin.generate(ids, **PLAIN)
    assert seen == {(False, "sdpa", "sdpa"), (True, NAME, "sdpa")}


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_with_a_hook_the_model_runs_its_own_way(
    model: Any, ids: Tensor, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A captured step calls none, and like layers share code, of which one may have a hook."""
    twin, calls = twin_of(model), []
    check(model, twin, ids)
    handle = getattr(model.model.layers[0].mlp, kind)(lambda *_: calls.append(1))
    with caplog.at_level(logging.INFO, "moe_ops"):
        twin.generate(ids, **PLAIN)
    assert len(calls) == PLAIN["max_new_tokens"]
    assert "a hook is on model.layers.0.mlp" in caplog.text
    handle.remove()
    steps = moe_ops.generation_report(twin)[-1].steps
    check(model, twin, ids)
    assert moe_ops.generation_report(twin)[-1].steps > steps


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_so_it_does_with_a_hook_of_every_module(
    model: Any, ids: Tensor, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    twin = twin_of(model)
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    try:
        with caplog.at_level(logging.INFO, "moe_ops"):
            twin.generate(ids, **PLAIN)
    finally:
        handle.remove()
    assert "a hook is on every module" in caplog.text


def test_another_dtype_has_other_buffers(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    check(model, twin, ids)
    model.to(torch.bfloat16)
    check(model, twin, ids, max_new_tokens=2)


def test_a_cast_of_either_is_one_of_both(model: Any, ids: Tensor) -> None:
    """Of a part of the twin with the twin's next call."""
    twin = twin_of(model)
    part = twin.model.rotary_emb
    for one, dtype in ((twin, HALF), (model, torch.float32), (part, HALF), (model, torch.float32)):
        one.to(dtype)
        if one is part:
            twin.generate(ids, **PLAIN)
        assert {t.dtype for t in model.model.rotary_emb.buffers()} == {dtype}
        check(model, twin, ids, max_new_tokens=2)
        assert {t.dtype for t in part.buffers()} == {dtype}


def test_a_replaced_head_and_layer_are_used(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    check(model, twin, ids)
    other = families.build("qwen3_moe").model
    torch.manual_seed(5)
    for p in other.parameters():
        p.data.normal_(std=0.3)
    model.lm_head = other.lm_head
    check(model, twin, ids)
    model.model.layers[1] = other.model.layers[1]
    check(model, twin, ids)
    model.model.layers[0].self_attn = other.model.layers[0].self_attn
    check(model, twin, ids)


def test_a_model_in_training_runs_its_own_way(
    model: Any, ids: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it was when the twin was made does not matter."""
    model.train()
    twin = twin_of(model)
    with caplog.at_level(logging.INFO, "moe_ops"):
        twin.generate(ids, **PLAIN)
    assert "the model is in training mode" in caplog.text
    assert not moe_ops.generation_report(twin)
    model.eval()
    check(model, twin, ids)
    assert moe_ops.generation_report(twin)


def test_an_event_of_a_gpu_is_not_waited_for_elsewhere(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    twin._moe_ops_generation.done = object()  # of a call before the model left its GPU
    check(model, twin, ids)


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_dropped_buffers_are_freed_at_once(model: Any, ids: Tensor, no_gc: None) -> None:
    twin = twin_of(model, uncompiled())
    decoder = twin._moe_ops_generation.decoder
    decoder.most = 1
    check(model, twin, ids)
    (steps,) = decoder._idle.values()
    known = [weakref.ref(x) for x in (steps, steps.cache, steps.cache.layers[0].keys)]
    del steps
    check(model, twin, ids[:1])  # of another size, after which the first is dropped
    assert [ref() for ref in known] == [None] * 3


def test_idle_sizes_make_room(
    model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    twin = twin_of(model)
    check(model, twin, ids)
    fill, full = Steps.fill, [True, False]

    def fails_once(self: Steps, *args: Any) -> Any:
        if full and full.pop(0):
            raise torch.OutOfMemoryError("no memory")
        return fill(self, *args)

    monkeypatch.setattr(Steps, "fill", fails_once)
    with caplog.at_level(logging.WARNING, "moe_ops"):
        check(model, twin, ids[:1])
    assert [r.rows for r in moe_ops.generation_report(twin)] == [1]
    assert "1 sizes lose their buffers" in caplog.text


def test_without_idle_sizes_the_error_is_the_callers(
    model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = twin_of(model)

    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Steps, "fill", fails)
        with pytest.raises(torch.OutOfMemoryError):
            twin.generate(ids, **PLAIN)
    assert not moe_ops.generation_report(twin)  # half-made buffers are not kept
    check(model, twin, ids)


def test_copies_are_uncompiled_models_of_the_same_class(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)
    want = check(model, twin, ids)
    for made in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), copy.copy(twin)):
        assert type(made) is type(model)
        assert torch.equal(made.generate(ids, **PLAIN), want)
    assert type(twin) is not type(model)


def test_a_twin_of_a_twin_generates_too(model: Any, ids: Tensor) -> None:
    twin = twin_of(twin_of(model))
    check(model, twin, ids)
    assert moe_ops.generation_report(twin)


def test_a_token_too_many_draws_no_random_number(
    model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the end is known one token late; the next call goes on as transformers' would."""
    defer(monkeypatch)
    twin = twin_of(model)
    sampled = {**PLAIN, "do_sample": True, "top_k": 20}
    torch.manual_seed(1)
    end = int(model.generate(ids[:1], **sampled)[0, 9])
    found = []
    for one in (model, twin):
        torch.manual_seed(1)
        first = one.generate(ids[:1], **{**sampled, "eos_token_id": end})
        assert first.shape[1] < 16
        found.append((first, one.generate(ids[:1], **sampled)))
    for want, got in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_custom_generate_may_ask_for_anything(model: Any, ids: Tensor) -> None:
    twin = twin_of(model)

    def two_steps(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        cache = model(input_ids, use_cache=True)[CACHE]
        return model(input_ids[:, -1:], output_hidden_states=True, **{CACHE: cache})

    out = twin.generate(ids, custom_generate=two_steps, **PLAIN)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    assert not moe_ops.generation_report(twin)


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_what_takes_a_while_is_logged_or_shown(
    model: Any,
    ids: Tensor,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    twin, terminal = twin_of(model), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    waited = []

    @contextmanager
    def waiting_for(text: str) -> Iterator[None]:
        waited.append(text)
        with terminal_module.waiting_for(text):
            yield

    monkeypatch.setattr(steps, "waiting_for", waiting_for)
    with caplog.at_level(level, "moe_ops"):
        for _ in range(2):
            twin.generate(ids, **PLAIN)
    first, step = "compiling the layers for prompts", "making a step of 4 rows, 256 slots"
    assert waited == [first, step]
    if level == logging.INFO:
        assert not terminal.getvalue()
        assert caplog.text.count(first) == caplog.text.count(step) == 1
