"""Published checkpoints whose configuration says several things, or says them in another file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from moe_ops.hf.stored import stored_format
from tests.hf.published import FILE, LAYOUTS, change, configure, write
from tests.hf.test_published import check, load
from tests.hf.test_quantize import experts_of
from tests.hf.test_saved import check_same
from tests.weights.checkpoints import GROUP, Layout, Matrix, scales

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


def test_blocks_of_a_group(tmp_path: Path) -> None:
    """compressed-tensors says blocks in a group, where others say them once for all."""
    want = write(tmp_path, blocks)
    configure(tmp_path, quantization_config=groups(("Linear", "float-quantized", BLOCKS)))
    loaded = load(tmp_path)
    check(loaded, want)
    assert stored_format(experts_of(loaded)[0]).w_format == "float8_e4m3fn:32x32"


def write_partial(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
    """float8 in blocks, of which the last ones are not full."""
    w = torch.randn(rows, columns, generator=g).to(torch.float8_e4m3fn)
    s = scales(g, -(-rows // GROUP), -(-columns // GROUP), dtype=torch.float32)
    whole = s.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)[:rows, :columns]
    return Matrix({"weight": w, "weight_scale_inv": s}, w.float() * whole)


def test_blocks_that_gate_and_up_do_not_fill(tmp_path: Path) -> None:
    """Of 48 rows, 32 and 16 have a scale: blocks of 16 rows say the same."""
    layout = replace(LAYOUTS["fp8_blocks"], write=write_partial)
    want = write(tmp_path / "hub", layout, "qwen_48")
    loaded = load(tmp_path / "hub")
    check(loaded, want)
    assert stored_format(experts_of(loaded)[0]).w_format == "float8_e4m3fn:16x32"
    loaded.save_pretrained(tmp_path / "ours")
    check_same(loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "ours"))


def changed(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    entry = f"model.layers.1.mlp.experts.2.{name}"
    return lambda entries: entries.update({entry: make(entries[entry]).contiguous()})


AMONG: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "int8": ("float_channel", changed("up_proj.weight", lambda t: t.float().to(torch.int8)),
             r"2\.up_proj\.weight: is int8, but the layer's tensor is float8_e4m3fn"),
    "scales": ("packed_int4", changed("up_proj.weight_scale", lambda t: t.float() * 1.001),
               r"2\.up_proj\.weight_scale: has float32 scales that bfloat16 would round"),
    "shape": ("packed_int4", changed("up_proj.weight_shape", lambda t: t + 1),
              r"2\.up_proj\.weight_shape: expected \[64, 64\], found \[65, 65\]"),
    "zero_points": (
        "packed_int4",
        lambda e: e.update({"model.layers.1.mlp.experts.2.up_proj.weight_zero_point":
                            torch.zeros(8, 2, dtype=torch.int32)}),
        r"2\.up_proj\.weight_zero_point: has zero points other than 8, but the layer's int4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "message"), AMONG.values(), ids=AMONG)
def test_advice_is_for_who_loads_a_model(
    name: str, edit: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    """Not for who made a layer, as there is none whose format could be another."""
    write(tmp_path, LAYOUTS[name])
    change(tmp_path, edit)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        load(tmp_path)
    said = str(error.value)
    assert "the experts are not all coded in one way, or not as config.json says" in said
    assert FILE in said
    assert not re.search(r"give (the layer|it)|make (the layer|it)|MoELayer|QuantConfig", said)


def test_zero_points_that_are_missing(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["packed_uint4"])
    asymmetric = groups(("Linear", PACKED, INT4 | {"symmetric": False}))
    configure(tmp_path, quantization_config=asymmetric | {"format": PACKED})
    change(tmp_path, lambda e: [e.pop(n) for n in list(e) if n.endswith("zero_point")])
    with pytest.raises(
        ValueError, match=r"has no zero points, but config\.json says that it is not"
    ):
        load(tmp_path)


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
    "no_targets": (
        groups(([], PACKED, INT4), ([], PACKED, INT4 | {"num_bits": 8})),
        r"compressed of 4 bits and compressed of 8 bits, and of no matrix which; give groups targ",
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
