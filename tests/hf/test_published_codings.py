"""Published checkpoints whose configuration says several things, or says them in another file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ops.hf.stored import stored_format
from tests.hf.published import LAYOUTS, configure, write
from tests.hf.test_published import check, load
from tests.hf.test_quantize import experts_of
from tests.weights.checkpoints import GROUP, Layout

EXPERTS, OUT = "re:.*mlp.experts.*", "re:.*o_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
BLOCKS = {
    "num_bits": 8, "type": "float", "strategy": "block", "block_structure": [GROUP, GROUP],
}  # fmt: skip
PACKED = "pack-quantized"


def groups(*given: tuple[str | list[str], str, dict[str, Any]]) -> dict[str, Any]:
    """A configuration of compressed-tensors whose groups have targets, a format and weights."""
    found = {
        f"group_{i}": {
            "targets": [to] if isinstance(to, str) else to, "format": format, "weights": weights,
        }
        for i, (to, format, weights) in enumerate(given)
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": found,
    }  # fmt: skip


def gptq(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "sym": True, **more}


def auto_round(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True,
        "data_type": "int", "packing_format": "auto_round:auto_gptq", **more,
    }  # fmt: skip


blocks = replace(
    LAYOUTS["fp8_blocks"],
    write=lambda g, *sizes: renamed(LAYOUTS["fp8_blocks"].write(g, *sizes)),
)


def renamed(made: Any) -> Any:
    made.entries["weight_scale"] = made.entries.pop("weight_scale_inv")
    return made


SEVERAL: dict[str, tuple[str, Layout, dict[str, Any]]] = {
    "int8_beside": ("packed_int4", LAYOUTS["packed_int8"], groups(
        (EXPERTS, PACKED, INT4), (OUT, PACKED, INT4 | {"num_bits": 8}))),
    "blocks_beside": ("packed_int4", blocks, groups(
        (EXPERTS, PACKED, INT4), (OUT, "float-quantized", BLOCKS))),
    "int4_beside_float8": ("float_channel", LAYOUTS["packed_int4"], groups(
        (EXPERTS, "float-quantized", {"num_bits": 8, "type": "float"}), (OUT, PACKED, INT4))),
    "classes_last": ("packed_int4", LAYOUTS["packed_int8"], groups(
        ("Linear", PACKED, INT4), (OUT, PACKED, INT4 | {"num_bits": 8}))),
    "names_first": ("packed_int4", LAYOUTS["packed_int8"], groups(
        ("re:.*", PACKED, INT4),
        ([f"model.layers.{i}.self_attn.o_proj" for i in range(2)], PACKED,
         INT4 | {"num_bits": 8}))),
    "zero_points_beside": ("packed_int4", LAYOUTS["packed_uint4"], groups(
        (EXPERTS, PACKED, INT4), (OUT, PACKED, INT4 | {"symmetric": False}))),
    "dynamic": ("gptq_int4", LAYOUTS["gptq_int8"], gptq(
        dynamic={"-:.*lm_head.*": {}, r"+:.*\.o_proj.*": {"bits": 8}})),
    "dynamic_without_sign": ("gptq_int4", LAYOUTS["gptq_int8"], gptq(
        dynamic={r".*\.self_attn\..*": {"bits": 8, "sym": True}})),
    "auto_round": ("gptq_int4", LAYOUTS["gptq_int4"], auto_round()),
    "auto_round_asymmetric": ("gptq_uint4", LAYOUTS["gptq_uint4"], auto_round(sym=False)),
    "auto_round_as_they_are": ("gptq_v2", LAYOUTS["gptq_v2"], auto_round(
        sym=False, packing_format="auto_round:gptqmodel")),
    "auto_round_awq": ("awq", LAYOUTS["awq"], auto_round(
        sym=False, packing_format="auto_round:auto_awq")),
    "auto_round_mixed": ("gptq_int4", LAYOUTS["gptq_int8"], auto_round(extra_config={
        "model.layers.0.self_attn.o_proj": {"bits": 8}, r".*layers\.1\.self_attn.*": {"bits": 8},
        "lm_head": {"bits": 16, "data_type": "float"}})),
}  # fmt: skip


@pytest.mark.parametrize(("name", "beside", "config"), SEVERAL.values(), ids=SEVERAL)
def test_each_matrix_is_what_its_part_of_the_configuration_says(
    name: str, beside: Layout, config: dict[str, Any], tmp_path: Path
) -> None:
    want = write(tmp_path, LAYOUTS[name], beside=beside)
    configure(tmp_path, quantization_config=config)
    loaded = load(tmp_path)
    check(loaded, want)
    assert {stored_format(m).w_format for m in experts_of(loaded)} == {LAYOUTS[name].weights}


ELSEWHERE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptq": ("quantize_config.json", "gptq_uint4",
             {"bits": 4, "group_size": GROUP, "desc_act": False, "quant_method": None}),
    "gptq_symmetric": ("quantize_config.json", "gptq_int4", gptq(model_file_base_name="model")),
    "awq": ("quant_config.json", "awq",
            {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
    "auto_round": ("quantization_config.json", "gptq_int4", auto_round()),
}  # fmt: skip


@pytest.mark.parametrize(("file", "name", "said"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_configuration_in_a_file_of_its_own(
    file: str, name: str, said: dict[str, Any], tmp_path: Path
) -> None:
    want = write(tmp_path, LAYOUTS[name])
    configure(tmp_path, quantization_config=None)
    (tmp_path / file).write_text(json.dumps(said))
    check(load(tmp_path), want)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no_group": (
        groups(("re:.*self_attn.*", PACKED, INT4), (OUT, PACKED, INT4 | {"num_bits": 8})),
        r"model\.layers\.0\.mlp\.experts\.0\.\w+ is of no group of .*config\.json: none has a targ",
    ),
    "no_pattern": (
        groups(("re:[", PACKED, INT4), (OUT, PACKED, INT4 | {"num_bits": 8})),
        r"'\[' is no regular expression .*config\.json",
    ),
    "a_number": (
        groups(([3], PACKED, INT4), (OUT, PACKED, INT4 | {"num_bits": 8})),
        r"each of targets must be a name, got 3",
    ),
    "no_words": (
        groups((EXPERTS, PACKED, INT4 | {"num_bits": 3}), (OUT, PACKED, INT4)),
        r"bits must be 4 or 8, got 3; other widths straddle words .*config\.json",
    ),
    "another_packing": (
        auto_round(packing_format="auto_round:fp8"),
        r"auto-round with the packing 'auto_round:fp8' of int cannot be loaded: its layout is unk",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "message"), WRONG.values(), ids=WRONG)
def test_what_a_configuration_does_not_say(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, LAYOUTS["packed_int4"])
    configure(tmp_path, quantization_config=config)
    with pytest.raises((ValueError, TypeError), match=message):
        load(tmp_path)
