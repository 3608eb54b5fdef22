"""`generate` and forwards of models whose linear layers and heads hold codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.testing import Tol, assert_close
from tests.hf import families
from tests.hf.coded_linears import MAKERS, in_floats
from tests.hf.test_quantize import qwen
from tests.hf.twins import PLAIN, check, twin_of

TOL = Tol(1e-5, "float32 sums in another order")
CALLED = "moe_ops::quantized_linears by cpu"  # as profiles have it
FP8, INT4 = "float8_e4m3fn:row", "uint4:1x32"


def quantized(make: Any = qwen) -> Any:
    model = make()
    moe_ops.quantize_model(model, "int8_w8a16", linear_format=INT4, head_format=FP8, progress=False)
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 60, (3, 7))


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("call", [{}, {"num_beams": 3}, {"do_sample": True}], ids=str)
def test_tokens_are_those_of_the_model_with_its_codes_decoded(
    family: str, call: dict[str, Any], ids: Tensor
) -> None:
    model = quantized(MAKERS[family])
    twin = twin_of(model)
    check(in_floats(model), twin, ids, **call)
    assert moe_ops.generation_report(twin)[0].captured
    assert not twin._moe_ops_generation.told


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "nemotron_h"])
def test_layers_that_keep_latents_or_states(family: str, ids: Tensor) -> None:
    model = families.build(family).model
    moe_ops.quantize_model(
        model, None, linear_format="int8:row", head_format="int8:row", progress=False
    )
    check(in_floats(model), twin_of(model), ids + 16)


@pytest.mark.slow
def test_compiled_layers_call_the_op(ids: Tensor) -> None:
    model = quantized()
    fast, stock = moe_ops.compile(model), in_floats(model)
    assert torch.equal(fast.generate(ids, **PLAIN), stock.generate(ids, **PLAIN))
    assert [steps.steps for steps in moe_ops.generation_report(fast)] == [8]
    with torch.profiler.profile() as profile:
        fast.generate(ids, **PLAIN)
    (calls,) = [e.count for e in profile.key_averages() if e.key == CALLED]
    assert calls == 9 * (2 * 2 + 1)  # of two layers query, key and value, and the output; the head
    with torch.inference_mode():
        assert_close(fast(input_ids=ids).logits, stock(input_ids=ids).logits, TOL)


def test_a_model_that_gets_codes_after_it_was_compiled(ids: Tensor) -> None:
    model = qwen()
    twin = twin_of(model)
    check(model, twin, ids)
    moe_ops.quantize_model(model, None, linear_format=INT4, head_format=FP8, progress=False)
    check(in_floats(model), twin, ids)


def test_explain_lists_them() -> None:
    found = moe_ops.explain(quantized(), {"input_ids": torch.zeros(2, 9, dtype=torch.int64)})
    assert [(of.layers, of.format, of.rows, of.columns) for of in found.linears] == [
        *(
            (tuple(f"model.layers.{n}.self_attn.{name}_proj" for n in (0, 1)), INT4, rows, 64)
            for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))
        ),
        (("lm_head",), FP8, 64, 64),
    ]
    q, head = found.linears[0], found.linears[-1]
    assert (q.bytes, head.bytes) == (2 * 64 * (32 + 2 * (4 + 1)), 64 * (64 + 4))
    assert {of.runs for of in found.linears} == {"cpu"}
    assert "lm_head: float8_e4m3fn:row [64, 64], 4.35 kB, by cpu" in str(found)
    (merges,) = [p.rewrites for p in found.passes if p.name == "merge_quantized_linears"]
    assert merges == 2 + 5  # of each layer's first three, and a plan for each call
