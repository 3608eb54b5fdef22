"""Sizes of models, against what quantised tensors, caches and measured runs say of them."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from moe_ops.checks.config_sizes import TINY, shrink
from moe_ops.estimate.measured import Formats, shipped
from moe_ops.estimate.sizes import Sizes, bits_of, sizes_of
from moe_ops.estimate.work import cache_bytes, launches_of, step_of, weight_bytes
from moe_ops.hf.quantize import quantize_model
from tests.estimate.collect import RESULTS, of_example

transformers = pytest.importorskip("transformers")
# What their layers keep: keys and values, of windows too, latents, states.
FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h")
PROFILED = {
    "generate_qwen3_30b_h200": "qwen3-30b",
    "generate_mixtral_8x7b_h200": "mixtral-8x7b",
    "generate_gpt_oss_20b_h200": "gpt-oss-20b",
}


def tiny(family: str) -> transformers.PreTrainedModel:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = transformers.AutoConfig.for_model(family)
    shrink(config, {**TINY, "num_hidden_layers": 4}, None)
    auto = transformers.AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.bfloat16).eval()


def held(cache: transformers.DynamicCache) -> int:
    """The bytes of all floats of a cache."""
    found = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            parts = value.values() if isinstance(value, dict) else [value]
            tensors = [t for t in parts if isinstance(t, torch.Tensor) and t.is_floating_point()]
            found |= {id(t): t.nbytes for t in tensors}
    return sum(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_holds_what_sizes_say(family: str) -> None:
    model, ids = tiny(family), torch.ones(3, 7, dtype=torch.int64)
    sizes = sizes_of(model)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    assert sizes.refusal == "" and not sizes.guesses()
    assert cache_bytes(sizes, *ids.shape) == held(cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_weights_are_counted_once(family: str) -> None:
    model = tiny(family)
    nbytes = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    assert weight_bytes(sizes_of(model), Formats()) == nbytes


FORMATS = (
    "int8:row",
    "int4:1x128:bfloat16",
    "uint4:1x64",
    "mxfp4",
    "nvfp4",
    "float8_e4m3fn:128x128",
)


@pytest.mark.parametrize("format", FORMATS)
def test_the_bits_of_a_format_are_those_of_its_tensors(format: str) -> None:
    config = transformers.AutoConfig.for_model("qwen3_moe")
    shrink(config, {**TINY, "hidden_size": 512, "moe_intermediate_size": 512}, 1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    values = sum(p.numel() for p in experts.parameters())
    quantize_model(model, format, progress=False)
    tensors = [*experts.parameters(), *experts.buffers()]
    bits = 8 * sum(t.nbytes for t in tensors) / values
    assert bits == pytest.approx(bits_of(format), rel=0.01)  # a scale for each row, or expert


@pytest.mark.parametrize("file", PROFILED)
def test_a_step_reads_what_the_example_counted(file: str) -> None:
    figures = json.loads((RESULTS / f"{file}.json").read_text())
    (rates,) = (r for r in shipped().rates if r.device == figures["device"])
    sizes = sizes_of(of_example(PROFILED[file]))
    for batch, step in figures["steps"].items():
        parts = {w.part: w for w in step_of(sizes, Formats(), int(batch), 136, rates)}
        assert parts["experts"].bytes == pytest.approx(step["bytes"]["MoE"], rel=2e-3)
        rest = parts["linear layers"].bytes + parts["head"].bytes
        assert rest == pytest.approx(step["bytes"]["rest"], rel=1e-3)
        if "gpt" not in file:  # whose windows the example does not know
            assert parts["cache"].bytes == pytest.approx(step["bytes"]["attention"], rel=1e-6)
        least = parts["experts"].bytes / rates.bytes_per_second * 1e3
        assert parts["experts"].floor_ms == pytest.approx(least)


def test_norms_of_one_token_are_no_launches() -> None:
    sizes = sizes_of(of_example("qwen3-30b"))
    assert launches_of(sizes, 1) == 48 * 7
    assert launches_of(sizes, 8) == launches_of(sizes, 32) == 48 * 11


def test_what_a_layer_keeps_is_a_guess_where_it_is_not_known() -> None:
    config = transformers.AutoConfig.for_model("minimax")
    with torch.device("meta"):
        sizes = sizes_of(transformers.AutoModelForCausalLM.from_config(config))
    assert sizes.guesses() == ["what layers of linear_attention keep, taken for nothing"]


def test_a_model_without_experts_is_refused() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("llama", num_hidden_layers=1)
        )
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts; name an MoE model"):
        sizes_of(model)


def test_sizes_come_back_from_json() -> None:
    sizes = sizes_of(of_example("gpt-oss-20b"))
    assert Sizes.of_json(json.loads(json.dumps(asdict(sizes)))) == sizes
