"""`generate` that is transformers' own: of a compiled model it compiles what it would of another,
and nothing else."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationMixin,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import moe_ops
from moe_ops.forward.layer_cache import CACHE
from moe_ops.generation.fallback import falls_back
from moe_ops.passes.inductor.compiled import pipeline_of
from tests.hf import families
from tests.hf.twins import PLAIN, check
from tests.uncoded import run_nodes

# Served by no steps for its layers, its inputs and its prompts.
UNSERVED = ("deepseek_v4", "phimoe", "unlimited_ocr")


@pytest.fixture
def model() -> Any:
    return families.build("qwen3_moe").model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(16, 90, (2, 70))


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()
    counters.clear()


def compiled_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def chunked(model: Any) -> dict[str, Any]:
    return {"prefill_chunk_size": 16, "cache_implementation": "static"}


def hidden_states(model: Any) -> dict[str, Any]:
    return {"output_hidden_states": True}


def candidates_behind_a_cache(model: Any) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": 2, CACHE: DynamicCache(config=model.config)}


def own_cache(model: Any) -> dict[str, Any]:
    return {CACHE: StaticCache(config=model.config, max_cache_len=128)}


def custom(model: Any) -> dict[str, Any]:
    def greedy(model: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        for _ in range(4):
            last = model(input_ids).logits[:, -1:]
            input_ids = torch.cat([input_ids, last.argmax(-1)], 1)
        return input_ids

    return {"custom_generate": greedy}


REFUSED = (chunked, hidden_states, candidates_behind_a_cache, own_cache, custom)


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_a_refused_call_compiles_nothing(
    call: Callable[[Any], dict[str, Any]], model: Any, ids: Tensor
) -> None:
    twin = moe_ops.compile(model)
    ids = ids[:1]  # as assisted decoding wants
    for _ in range(2):
        want = model.generate(ids, **PLAIN, **call(model))
        assert torch.equal(twin.generate(ids, **PLAIN, **call(model)), want)
    assert compiled_graphs() == 0 and not moe_ops.generation_report(twin)


def test_nor_does_one_with_a_hook(model: Any, ids: Tensor) -> None:
    twin, calls = moe_ops.compile(model), []
    twin.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    check(model, twin, ids)
    assert compiled_graphs() == 0 and len(calls) == PLAIN["max_new_tokens"]


@pytest.mark.parametrize("family", [f for f in UNSERVED if f in families.discover()])
def test_nor_does_a_family_without_steps(family: str) -> None:
    tiny = families.build(family)
    twin = moe_ops.compile(tiny.model)
    inputs = dict(tiny.inputs)
    check(tiny.model, twin, inputs.pop("input_ids"), **inputs)
    assert compiled_graphs() == 0
    with pytest.raises(ValueError, match=r"is not ours"):
        moe_ops.generation_report(twin)


def test_nor_does_a_model_with_an_encoder(ids: Tensor) -> None:
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, num_heads=4, decoder_start_token_id=0))
    check(model.eval(), moe_ops.compile(model), ids)
    assert compiled_graphs() == 0


def test_nothing_falls_back_where_it_has_to_be_batch_invariant(model: Any, ids: Tensor) -> None:
    twin = moe_ops.compile(model, batch_invariant=True)
    with pytest.raises(NotImplementedError, match="is not batch invariant: use_cache is off"):
        twin.generate(ids, use_cache=False, **PLAIN)
    with pytest.raises(NotImplementedError, match="is not batch invariant: it is custom_generate"):
        twin.generate(ids, custom_generate=lambda *args, **kwargs: ids, **PLAIN)
    assert compiled_graphs() == 0


def test_a_block_does_not_reach_into_a_compiled_model(model: Any, ids: Tensor) -> None:
    twin = moe_ops.compile(model)
    with moe_ops.using(batch_invariant=True), torch.no_grad():
        for call in (lambda: twin(ids), lambda: twin.generate(ids, **PLAIN)):
            with pytest.raises(RuntimeError, match=r"give batch_invariant=True to moe_ops.compile"):
                call()
    assert compiled_graphs() == 0


def test_nor_a_model_without_steps(ids: Tensor) -> None:
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, num_heads=4, decoder_start_token_id=0))
    twin = moe_ops.compile(model.eval(), batch_invariant=True)
    with pytest.raises(NotImplementedError, match="the model has an encoder"):
        twin.generate(ids, **PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("coded", [False, pytest.param(True, marks=pytest.mark.every)])
def test_a_forward_is_compiled_before_and_after(
    coded: bool, model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not coded:
        run_nodes(monkeypatch)
    twin = moe_ops.compile(model)
    twin.generate(ids, **chunked(model), **PLAIN)
    with torch.inference_mode():
        got, want = twin(ids).logits, model(ids).logits
    torch.testing.assert_close(got, want)
    compiled = compiled_graphs()
    assert compiled > 0
    twin.generate(ids, **chunked(model), **PLAIN)
    assert compiled_graphs() == compiled


def test_a_call_that_fails_leaves_the_model_compiled(model: Any, ids: Tensor) -> None:
    twin = moe_ops.compile(model)

    def fails(tokens: Tensor, scores: Tensor) -> Tensor:
        assert falls_back(twin)
        raise RuntimeError("no more")

    for more in (chunked(model), {"use_cache": False}):
        with pytest.raises(RuntimeError, match="no more"):
            twin.generate(ids, logits_processor=[fails], **more, **PLAIN)
        assert not falls_back(twin)


@pytest.mark.every
@pytest.mark.slow
def test_a_call_by_steps_inside_one_that_falls_back(model: Any, ids: Tensor) -> None:
    twin, inside, own = moe_ops.compile(model), [], []

    def nested(tokens: Tensor, scores: Tensor) -> Tensor:
        inside.append(twin.generate(ids[:, :3], **PLAIN))
        own.append(falls_back(twin))
        return scores

    got = twin.generate(ids, use_cache=False, logits_processor=[nested], **PLAIN)
    assert torch.equal(got, model.generate(ids, **PLAIN)) and all(own)
    want = model.generate(ids[:, :3], **PLAIN)
    assert len(inside) == PLAIN["max_new_tokens"] and all(torch.equal(x, want) for x in inside)
    (report,) = moe_ops.generation_report(twin)
    assert report.steps == len(inside) * (PLAIN["max_new_tokens"] - 1)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers compiles steps with a static cache, whatever the device."""

    def criteria(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        cache = model_kwargs.get(CACHE)
        return not generation_config.disable_compile and cache.is_compileable

    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", criteria)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "coded"),
    [
        ("phimoe", False),
        pytest.param("phimoe", True, marks=pytest.mark.every),
        pytest.param("qwen3_moe", True, marks=pytest.mark.every),
    ],
)
def test_what_transformers_compiles_has_our_passes(
    family: str, coded: bool, ids: Tensor, as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not coded:
        run_nodes(monkeypatch)
    model = families.build(family).model
    call = {"cache_implementation": "static", "output_hidden_states": True, **PLAIN}
    want = model.generate(ids, compile_config=CompileConfig(backend="eager", mode=None), **call)
    stock = compiled_graphs()
    assert stock > 0
    twin, graphs = moe_ops.compile(model), []
    torch._dynamo.reset()
    for _ in range(2):
        counters.clear()
        assert torch.equal(twin.generate(ids, **call), want)
        graphs.append(compiled_graphs())
    assert graphs == [stock, 0]
    runs = pipeline_of(twin).runs
    assert sum(p.rewrites for run in runs for p in run.passes if p.name == "lift_grouped_mm") > 0
    twin.generate(ids, disable_compile=True, **call)
    assert compiled_graphs() == 0


@pytest.mark.every
@pytest.mark.slow
def test_hooks_put_on_since_are_called_by_what_transformers_compiles(
    model: Any, ids: Tensor, as_on_a_gpu: None
) -> None:
    twin, calls = moe_ops.compile(model), Counted()
    static = {"cache_implementation": "static", "output_hidden_states": True, **PLAIN}
    want = twin.generate(ids, **static)
    handle = twin.model.layers[0].mlp.register_forward_hook(calls.add)
    assert torch.equal(twin.generate(ids, **static), want)
    assert calls.number == PLAIN["max_new_tokens"]
    handle.remove()
    assert torch.equal(twin.generate(ids, **static), want)
    assert calls.number == PLAIN["max_new_tokens"]


class Counted:
    def __init__(self) -> None:
        self.number = 0

    def add(self, module: nn.Module, args: Any, out: Any) -> None:
        self.number += 1


@pytest.mark.slow
def test_what_transformers_compiled_of_the_model_is_not_the_twins(
    model: Any, ids: Tensor, as_on_a_gpu: None
) -> None:
    config = CompileConfig(backend="eager", mode=None)
    call = {"cache_implementation": "static", "compile_config": config, **PLAIN}
    model.generate(ids, **call)
    twin = moe_ops.compile(model)
    assert "_compiled_call" in vars(model) and "_compiled_call" not in vars(twin)
    twin.lm_head = copy.deepcopy(twin.lm_head)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    other = twin.generate(ids, output_hidden_states=True, **call)
    assert not torch.equal(other, model.generate(ids, **call))


def test_copies_are_uncompiled_models_of_the_same_class() -> None:
    model = families.build("phimoe").model
    twin = moe_ops.compile(model)
    for made in (copy.copy(twin), copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert type(made) is type(model)
        assert not {"_moe_ops_fallback", "_compiled_call"} & vars(made).keys()


def test_a_generate_of_a_models_own_keeps_its_signature() -> None:
    model = families.build("phimoe").model

    class Own(type(model)):  # type: ignore[misc]
        def generate(self, input_ids: Tensor, extra: int = 3) -> Any:
            return super().generate(input_ids, max_new_tokens=extra)

    model.__class__ = Own
    twin = moe_ops.compile(model)
    assert inspect.signature(type(twin).generate) == inspect.signature(Own.generate)
    ids = torch.randint(16, 90, (1, 5))
    assert torch.equal(twin.generate(ids, extra=2), model.generate(ids, extra=2))
    assert compiled_graphs() == 0
