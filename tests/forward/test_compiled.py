"""Compiled layers: how many graphs there are, what else of `compile` works, and who compiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

import moe_ops
from moe_ops import compiler
from moe_ops.forward.layer_cache import CACHE
from moe_ops.passes.inductor.compiled import Compiled, pipeline_of
from moe_ops.testing import assert_close
from tests.chosen import COMPILED, one_in, those_of
from tests.forward.layered import MODEL, check_output, left_padded, tokens
from tests.hf import families
from tests.recompiling import Traced

FIRST = ("gpt_oss", "qwen3_moe")
PARTS = 2  # a layer, the last norm


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo's graphs are counted, which need no code."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiler, "Net", Traced)
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with inductor_config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def check(model: Any, twin: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        want, got = model(**kwargs), twin(**kwargs)
    check_output(got, want, kwargs.get("attention_mask"))
    return got


def ran_by_layers(twin: Any) -> bool:
    call = twin._compiled_call_impl
    assert isinstance(call, Compiled) and call.by_layers is not None
    return call.by_layers._refusal is None and not call.by_layers.refused


@pytest.mark.slow
@one_in(2, pytest.mark.parametrize("first", [(1, 12), (3, 9)]))
def test_two_graphs_a_kind_serve_all_sizes(first: tuple[int, int], traced: None) -> None:
    model = families.build("qwen3_moe").model
    twin = moe_ops.compile(model)
    for shape in (first, (1, 12), (1, 7), (3, 9), (2, 40)):
        check(model, twin, input_ids=tokens(*shape), use_cache=False)
        assert graphs() == PARTS
    for shape in ((2, 1), (1, 1), (5, 1)):
        check(model, twin, input_ids=tokens(*shape), use_cache=False)
    assert graphs() == 2 * PARTS
    for shape in ((1, 12), (3, 9), (1, 7)):
        out = check(model, twin, input_ids=tokens(*shape), use_cache=True)
        assert out[CACHE].get_seq_length() == shape[1]
    assert graphs() == 2 * PARTS  # with a cache as without
    for _ in range(3):
        twin.generate(tokens(2, 11), max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert graphs() == 2 * PARTS  # prompts are read by the same code
    assert ran_by_layers(twin)


@pytest.mark.slow
@pytest.mark.parametrize("family", those_of(FIRST[:1], families.discover()))
def test_caches_and_masks_of_any_length_cost_few_graphs(family: str, traced: None) -> None:
    tiny = families.build(family)
    twin = moe_ops.compile(tiny.model)
    if twin._compiled_call_impl.by_layers is None or set(tiny.inputs) != {"input_ids"}:
        pytest.skip(f"{family} is compiled as a whole, or takes more than ids")
    counts = []
    for B in (2, 1, 3, 2, 1):
        out = check(tiny.model, twin, input_ids=tokens(B, 9), use_cache=True)
        if out.get(CACHE) is None or not ran_by_layers(twin):
            pytest.skip(f"{family} runs calls with a cache as one graph, or keeps none")
        for S in (4, 1, 30, 1, 1, 5):  # over a window
            with torch.inference_mode():
                out = twin(input_ids=tokens(B, S), **{CACHE: out[CACHE]})
        for S in (9, 30, 12):
            mask = left_padded(B, S, 3)
            check(tiny.model, twin, input_ids=tokens(B, S), attention_mask=mask)
        counts.append(graphs())
    assert counts[2:] == counts[1:-1]
    # One sequence has code of its own in layers of some families, as those that copy into parts of
    # keys, where torch asks for sizes of 1.
    assert counts[1] <= counts[0] * (1 if family in FIRST else 2)


@pytest.mark.slow
def test_sequences_may_share_a_mask_of_the_caller(traced: None) -> None:
    model = families.build("qwen3_moe").model
    twin = moe_ops.compile(model)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    for B, rows in ((2, 2), (3, 1), (1, 1), (4, 4)):
        mask = causal.expand(rows, 1, 9, 9)
        with torch.inference_mode():
            want, got = (
                m(input_ids=tokens(B, 9), attention_mask=mask, use_cache=False).logits
                for m in (model, twin)
            )
        assert_close(got, want, MODEL, "logits")
    assert ran_by_layers(twin)


# Prompts that `generate` reads run the same code: tests/generation/test_generate.py.
@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("family", (*COMPILED, "mixtral", "qwen3_moe"))
def test_code_of_inductor_gives_the_same(family: str, fresh: None) -> None:
    model = families.build(family).model
    twin = moe_ops.compile(model)
    for shape in ((1, 12), (3, 9)):
        out = check(model, twin, input_ids=tokens(*shape))
        with torch.inference_mode():
            more = {"input_ids": tokens(shape[0], 4)}
            want = model(torch.cat([tokens(*shape), more["input_ids"]], 1), use_cache=False)
            got = twin(**more, **{CACHE: out[CACHE]})
        torch.testing.assert_close(got.logits, want.logits[:, -4:], atol=1e-4, rtol=1e-4)


@pytest.mark.every
@pytest.mark.slow
def test_options_reach_the_layers(fresh: None) -> None:
    model = families.build("qwen3_moe").model
    del model.model.layers[1:]
    twin = moe_ops.compile(model, stop_after="pick_backend", dump=True, strict=True)
    check(model, twin, input_ids=tokens(2, 7), use_cache=False)
    passes = [[p.name for p in run.passes] for run in pipeline_of(twin).runs if run.passes]
    assert passes and all(names[-1] == "pick_backend" for names in passes)
    explained = str(moe_ops.explain(model, {"input_ids": tokens(2, 7), "use_cache": False}))
    assert "1 of 1 MoE layers" in explained


@pytest.mark.slow
def test_inside_a_larger_model_its_compiler_decides(fresh: None) -> None:
    model = families.build("qwen3_moe").model
    twin = moe_ops.compile(model)

    def doubled(ids: torch.Tensor) -> torch.Tensor:
        return twin(input_ids=ids, use_cache=False).logits * 2

    with torch.inference_mode():
        got = torch.compile(doubled, backend="eager")(tokens(2, 7))
        want = model(tokens(2, 7), use_cache=False).logits * 2
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert not any(twin._compiled_call_impl.by_layers.forwards.report())
