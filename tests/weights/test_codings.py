"""Configurations that code matrices in several ways, for layers: the coding is that of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_ops.parallel.config import ParallelConfig
from moe_ops.weights import load_checkpoint
from moe_ops.weights.codings import blocks_in, coding_of, codings_in, codings_of
from moe_ops.weights.said import Said
from tests.weights.checkpoints import GROUP, LAYOUTS, PREFIX, write
from tests.weights.test_quantized_checkpoints import check_values, layer_of

WEIGHTS = {"strategy": "group", "group_size": GROUP}
OTHER = PREFIX.replace(".0.", ".1.")


def compressed(*groups: tuple[str, int]) -> dict[str, Any]:
    found = {
        str(i): {"targets": [target], "weights": {**WEIGHTS, "num_bits": bits}}
        for i, (target, bits) in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": found
    }  # fmt: skip


CONFIGS = {
    "patterns": ("packed_int4", compressed(("re:.*mlp.experts.*", 4), ("re:.*o_proj", 8))),
    "class_last": ("packed_int8", compressed(("Linear", 4), (r"re:.*experts\.", 8))),
    "dynamic": ("gptq_int8", {"quant_method": "gptq", "bits": 4,
                              "dynamic": {r"+:.*\.experts\..*": {"bits": 8}}}),
    "not_dynamic": ("gptq_int4", {"quant_method": "gptq", "bits": 4, "dynamic": {
        r"-:.*\.gate$": {}, r"+:.*self_attn.*": {"bits": 8}}}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "config"), CONFIGS.values(), ids=CONFIGS)
def test_a_layer_has_the_coding_of_its_experts(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    values = write(tmp_path, LAYOUTS[name]).values
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    layer = layer_of(LAYOUTS[name], ParallelConfig())
    assert load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False).complete
    check_values(layer, values)


def test_layers_that_are_coded_in_two_ways_are_loaded_apart(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["packed_int4"])
    config = compressed((r"re:.*layers\.0\.", 4), (r"re:.*layers\.1\.", 8))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    layers = {p: layer_of(LAYOUTS["packed_int4"], ParallelConfig()) for p in (PREFIX, OTHER)}
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp.* is compressed of 8 bits, by .*; load l"
    ):
        load_checkpoint(layers, tmp_path, style="qwen", progress=False)
    report = load_checkpoint({PREFIX: layers[PREFIX]}, tmp_path, style="qwen", progress=False)
    assert report.complete


def test_names_come_before_patterns_and_patterns_before_classes() -> None:
    found = codings_of(compressed(("Linear", 8), ("re:a.*", 4), ("a.b", 8)))
    assert [found.said(name).bits for name in ("a.b", "a.c", "c")] == [8, 4, 8]
    assert codings_of(compressed(("re:a", 4), ("b", 4))).said("c") == Said("compressed", 4, True)
    with pytest.raises(
        ValueError, match="c is of no group of quantization_config: none has a targ"
    ):
        codings_of(compressed(("re:a", 4), ("b", 8))).said("c")


def test_the_first_pattern_of_gptq_decides() -> None:
    config = {"quant_method": "gptq", "bits": 4, "sym": True, "dynamic": {
        "-:a": {}, "+:a.b": {"bits": 8}, "c": {"bits": 8, "sym": False}}}  # fmt: skip
    found = codings_of(config)
    want = {
        "a.b": Said(), "c": Said("gptq", 8, False), "d.a": Said("gptq", 4, True),
    }  # fmt: skip
    assert {name: found.said(name) for name in want} == want
    with pytest.raises(ValueError, match=r"says of some matrices .* and of others"):
        coding_of(config)


def test_inputs_alone_are_no_coding() -> None:
    groups = {"a": {"targets": ["re:.*attn"], "input_activations": {"num_bits": 8}}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized",
              "config_groups": groups}  # fmt: skip
    assert codings_of(config).said("x") == Said()


PAIRS = Said("pairs", symmetric=True, inputs="float8_e4m3fn")
MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.1.mlp.experts": {"quant_algo": "W4A8_AWQ"},
        "model.layers.1.self_attn.o_proj": {"quant_algo": "FP8_BLOCK_SCALES"},
    },
}


def test_experts_of_w4afp8_are_pairs_and_others_blocks() -> None:
    found = codings_of({"quant_method": "w4afp8"})
    for name in ("model.layers.3.mlp.experts.7.gate_proj", "experts", "a.experts"):
        assert found.said(name) == PAIRS
    for name in ("model.layers.3.mlp.shared_experts.up_proj", "model.experts_of.o_proj", "o_proj"):
        assert found.said(name) == Said(block=(128, 128))
    found = codings_of({"quant_method": "w4afp8", "weight_block_size": [64, 128]})
    assert found.block("o_proj") == (64, 128)


def test_modelopt_names_what_is_in_pairs() -> None:
    found = codings_of({"quant_method": "modelopt", **MIXED})
    assert found.said("model.layers.1.mlp.experts.0.up_proj") == PAIRS
    for name in ("model.layers.11.mlp.experts.0.up_proj", "model.layers.1.mlp.experts_too"):
        assert found.said(name) == Said(block=(128, 128))
    of_nvfp4 = {"a": {"quant_algo": "NVFP4"}}
    config = {"quant_method": "modelopt", **MIXED, "quantized_layers": of_nvfp4}
    assert codings_of(config).said("a") == Said()


def test_files_beside_a_checkpoint_say_it_too(tmp_path: Path) -> None:
    inner = {"quantization": {"quant_algo": "MIXED_PRECISION"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(inner))
    name = "model.layers.1.mlp.experts.0.up_proj"
    assert codings_in(tmp_path).said(name) == Said()
    (tmp_path / "quant_cfg.json").write_text(json.dumps(MIXED))
    assert codings_in(tmp_path).said(name) == PAIRS
    assert blocks_in(tmp_path).block("o_proj") == (128, 128)
    for wrong, message in (
        ("{", r"quant_cfg\.json is no JSON"),
        ('{"quantized_layers": 3}', r"quantized_layers must be an object .*quant_cfg\.json"),
        ('{"quantized_layers": {"a": 3}}', r"quantized_layers\['a'\] must be an object"),
    ):
        (tmp_path / "quant_cfg.json").write_text(wrong)
        with pytest.raises((ValueError, TypeError), match=message):
            codings_in(tmp_path)
