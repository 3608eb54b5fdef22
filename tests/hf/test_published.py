"""Published checkpoints into transformers' models: codes bit by bit, or an error by name."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

import moe_ops
from moe_ops.hf.stored import stored_format
from moe_ops.testing import Tol, assert_close
from tests.hf import published
from tests.hf.published import CONFIG, FILE, LAYOUTS, change, configure, write
from tests.hf.test_quantize import decoded, experts_of, gpt_oss, logits, stored_mxfp4
from tests.hf.test_saved import check_same
from tests.peak import Peak

TOL = Tol(1e-4, "float32 sums in another order through a whole model")
FIRST = "model.layers.0.mlp.experts.0"


def load(folder: Path, **more: Any) -> PreTrainedModel:
    return moe_ops.from_checkpoint(folder, progress=False, **more)


def check(loaded: PreTrainedModel, want: PreTrainedModel) -> None:
    """Weights are those that the codes stand for, to the bit, and so are the logits, nearly."""
    for module, plain in zip(experts_of(loaded), experts_of(want), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            coded = stored_format(module) is not None
            got = decoded(module, name) if coded else getattr(module, name)
            assert torch.equal(got, getattr(plain, name)), name
    assert_close(logits(loaded), logits(want), TOL)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_is_loaded_and_saved(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    if name in ("gptq_int4", "gptq_int8"):  # as published ones say it
        layout = replace(layout, config=layout.config | {"sym": True})
    beside = LAYOUTS["fp8_blocks"] if name == "w4afp8" else None
    want = write(tmp_path / "hub", layout, beside=beside)
    loaded = load(tmp_path / "hub", inputs="")
    check(loaded, want)
    found = {stored_format(m).w_format for m in experts_of(loaded)}
    assert found == {layout.weights}
    loaded.save_pretrained(tmp_path / "ours")
    check_same(loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "ours"))


OTHERS = {
    "mixtral_packed": ("mixtral", "packed_int4", ("o_proj", "q_proj")),
    "mixtral_gptq": ("mixtral", "gptq_uint4", ("o_proj",)),
    "deepseek_blocks": ("deepseek", "fp8_blocks", ("gate_proj", "up_proj", "down_proj", "o_proj")),
    "deepseek_awq": ("deepseek", "awq", ("shared_experts.gate_proj", "kv_b_proj", "lm_head")),
}


@pytest.mark.parametrize(("family", "name", "outside"), OTHERS.values(), ids=OTHERS)
def test_other_names_and_shared_experts(
    family: str, name: str, outside: tuple[str, ...], tmp_path: Path
) -> None:
    want = write(tmp_path, LAYOUTS[name], family, outside=outside, files=3)
    check(load(tmp_path, device_map={"": "cpu"}), want)


def test_what_is_left_in_floats_stays_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="moe_ops")
    want = write(tmp_path / "hub", LAYOUTS["modelopt_nvfp4"], ignored=("layers.0.", "lm_head"))
    loaded = load(tmp_path / "hub", inputs="")
    check(loaded, want)
    assert [stored_format(m) is None for m in experts_of(loaded)] == [True, False]
    said = [r.message for r in caplog.records if "from_checkpoint" in r.message]
    assert len(said) == 4
    assert "1 experts modules in nvfp4_w4a16 (nvfp4), 1 in floats" in said[0]
    assert "1 quantised matrices outside of experts are decoded to torch.float32" in said[1]
    assert "9 static scales of inputs of experts are left out: these inputs are torch.f" in said[2]
    assert "1 static scales of inputs of other matrices are left out: these inputs" in said[3]
    loaded.save_pretrained(tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / CONFIG).read_text())["quantization_config"]
    assert saved["kept"] == ["model.layers.0.mlp.experts"]
    check_same(loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "ours"))


def test_matrices_outside_of_experts_alone_make_a_model_of_floats(tmp_path: Path) -> None:
    want = write(tmp_path, LAYOUTS["float_channel"], ignored=(".experts.",))
    loaded = load(tmp_path)
    check(loaded, want)
    assert not hasattr(loaded.config, "quantization_config")


def test_gpt_oss_is_loaded_without_floats(tmp_path: Path) -> None:
    model = gpt_oss()
    tensors = stored_mxfp4(model)
    rest = {n: t for n, t in model.state_dict().items() if not n.endswith("_proj")}
    published.save(tmp_path, rest | tensors)
    config = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"]}
    (tmp_path / CONFIG).write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    moe_ops.hf.adopt_mxfp4(model, tensors)
    loaded = load(tmp_path)
    check_same(loaded, model)
    assert torch.equal(logits(loaded), logits(model))


def test_fused_experts_are_read_as_they_are(tmp_path: Path) -> None:
    """As transformers saves FP8 experts: all of a layer in one tensor."""
    want = write(tmp_path, LAYOUTS["fp8_blocks"], outside=())

    def fuse(entries: dict[str, Tensor]) -> None:
        for layer in range(2):
            base = f"model.layers.{layer}.mlp.experts"
            for end, to in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                gate, up, down = (
                    torch.stack([entries.pop(f"{base}.{e}.{p}.{end}") for e in range(3)])
                    for p in ("gate_proj", "up_proj", "down_proj")
                )
                entries[f"{base}.gate_up_proj{to}"] = torch.cat((gate, up), 1)
                entries[f"{base}.down_proj{to}"] = down

    change(tmp_path, fuse)
    check(load(tmp_path), want)


def test_a_dtype_is_for_the_rest_and_inputs_are_quantized_if_asked(tmp_path: Path) -> None:
    want = write(tmp_path, LAYOUTS["float_channel"])
    GenerationConfig(max_new_tokens=7).save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype=torch.bfloat16, inputs="float8_e4m3fn:row")
    assert {p.dtype for p in loaded.model.layers[0].self_attn.parameters()} == {torch.bfloat16}
    assert stored_format(experts_of(loaded)[0]).x_format == "float8_e4m3fn:row"
    assert loaded.generation_config.max_new_tokens == 7
    assert loaded.name_or_path == str(tmp_path)
    rough = Tol(0.1, "inputs of three bits, through two layers in bfloat16")
    assert_close(logits(loaded).float(), logits(want), rough)


def shuffled(shards: tuple[str, ...]) -> Callable[[dict[str, Tensor]], None]:
    """g_idx of projections in another order."""

    def edit(entries: dict[str, Tensor]) -> None:
        for name, t in entries.items():
            if name.endswith("g_idx") and any(f".{shard}." in name for shard in shards):
                entries[name] = t.flip(0).contiguous()

    return edit


def test_orders_of_inner_columns_go_into_rows(tmp_path: Path) -> None:
    """Columns whose groups are reversed: the values that they stand for follow the g_idx."""
    layout = LAYOUTS["gptq_int4"]

    def write_ordered(g: torch.Generator, rows: int, columns: int, shard: str) -> Any:
        made = layout.write(g, rows, columns, shard)
        if shard == "w2":
            made.entries["g_idx"] = made.entries["g_idx"].flip(0).contiguous()
            s, of = made.entries["scales"].T.float(), made.entries["g_idx"].long()
            run = s.repeat_interleave(columns // s.shape[1], 1)
            made.value = (made.value / run).round() * s[:, of]
        return made

    want = write(tmp_path, replace(layout, write=write_ordered), outside=())
    assert_close(logits(load(tmp_path)), logits(want), TOL)


def test_no_float_copy_of_experts_is_made(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["packed_int4"], outside=())
    load(tmp_path)  # what is imported and kept once
    gc.collect()
    with Peak() as peak:
        loaded = load(tmp_path)
    size = sum(t.nbytes for m in experts_of(loaded) for t in m.state_dict().values())
    floats = sum(2 * decoded(m, n).numel() for m in experts_of(loaded)
                 for n in ("gate_up_proj", "down_proj"))  # fmt: skip
    # Besides codes there is the state dict's format names and what transformers computes anew.
    assert size < peak.most < 1.2 * size < floats


def drop(*endings: str) -> Callable[[dict[str, Tensor]], None]:
    def edit(entries: dict[str, Tensor]) -> None:
        for name in [n for n in entries if n.endswith(endings)]:
            del entries[name]

    return edit


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda entries: entries.update({name: make(entries[name]).contiguous()})


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.full_like(t, value)


ENTRY = rf"{FIRST}\.gate_proj"
DAMAGED: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "codes_missing": ("packed_int4", drop(f"{FIRST}.gate_proj.weight_packed"),
                      r"model\.layers\.0\.mlp.* is missing among the experts of .*safetensors"),
    "an_expert_missing": (
        "float_channel", drop(*(f"0.mlp.experts.2.up_proj.weight{end}" for end in ("", "_scale"))),
        r"w13_weight\[2\]\.w3 is missing",
    ),
    "scale_missing": ("packed_int4", drop(f"{FIRST}.gate_proj.weight_scale"),
                      rf"codes without a scale.* \(in {ENTRY}\.weight_packed of .*{FILE}\)"),
    "scale_of_zero": ("packed_int4", put(f"{FIRST}.up_proj.weight_scale", filled(0.0)),
                      rf"{FIRST}\.up_proj\.weight_scale: holds 0\.0.*{FILE}"),
    "scale_nan": ("fp8_blocks", put(f"{FIRST}.up_proj.weight_scale_inv", filled(float("nan"))),
                  r"up_proj\.weight_scale_inv: holds nan"),
    "words_of_another_shape": (
        "awq", put(f"{FIRST[:-1]}1.down_proj.qweight", lambda t: t[:-8]),
        r"experts\.1\.down_proj\.qweight: expected the shape \[64, 8\], found \[56, 8\].*safetens",
    ),
    "groups_of_another_size": (
        "packed_int4", put(f"{FIRST[:-1]}1.down_proj.weight_scale", lambda t: t[:, :1]),
        r"experts\.1\.down_proj\.weight_scale: expected the shape",
    ),
    "floats_among_codes": (
        "float_channel", put(f"{FIRST}.down_proj.weight", lambda t: t.float()),
        r"down_proj\.weight",
    ),
    "zero_points_that_are_not_the_middle": (
        "gptq_sym", put(f"{FIRST}.up_proj.qzeros", filled(0)),
        r"up_proj\.qzeros: has zero points other than 8",
    ),
    "outside_scale_missing": (
        "float_channel", drop("layers.1.self_attn.o_proj.weight_scale"),
        r"codes without a scale.*in model\.layers\.1\.self_attn\.o_proj\.weight of",
    ),
    "outside_scale_wrong": (
        "awq", put("model.layers.1.self_attn.o_proj.scales", filled(float("inf"))),
        r"scales hold inf.*in model\.layers\.1\.self_attn\.o_proj\.qweight of",
    ),
    "outside_groups": (
        "awq", put("model.layers.1.self_attn.o_proj.qzeros", lambda t: t[:1]),
        r"has zero points \[64, 1\], but .*o_proj\.qweight of",
    ),
    "rest_missing": ("awq", drop("layers.1.self_attn.q_proj.weight"),
                     r"lacks model\.layers\.1\.self_attn\.q_proj\.weight; complete the download"),
    "rest_of_another_shape": (
        "awq", put("model.norm.weight", lambda t: t[:-1]),
        rf"model\.norm\.weight: expected the shape \[64\], found \[63\] \(in .*{FILE}\)",
    ),
    "act_order": ("gptq_int4", shuffled(("gate_proj", "up_proj", "down_proj")),
                  rf"{ENTRY}\.g_idx: was quantised in the order of its activations .*{FILE}"),
    "act_order_outside": ("gptq_int4", shuffled(("o_proj",)),
                          r"order of its activations, and only experts .*o_proj\.qweight of"),
    "unknown_experts": (
        "packed_int4",
        lambda e: e.update({n.replace("layers.1.", "layers.7."): t.clone() for n, t in e.items()}),
        r"model\.layers\.7\.mlp.*has no experts of this name \(in .*its experts are model\.layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_checkpoints_are_refused_by_name(
    name: str, edit: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name.replace("_sym", "_int4")]
    if name == "gptq_sym":
        layout = replace(layout, config=layout.config | {"sym": True})
    write(tmp_path, layout)
    change(tmp_path, edit)
    with pytest.raises((ValueError, TypeError), match=message):
        load(tmp_path)


def other_method(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "hqq"})


def other_class(folder: Path) -> None:
    configure(folder, architectures=["NoSuchModel"])


def two_formats(folder: Path) -> None:
    layout = LAYOUTS["float_channel"]

    def edit(entries: dict[str, Tensor]) -> None:
        g = torch.Generator().manual_seed(1)
        for name in [n for n in entries if ".1.mlp.experts." in n]:
            del entries[name]
        for e in range(3):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                for suffix, t in layout.write(g, 64, 64, "w1").entries.items():
                    entries[f"model.layers.1.mlp.experts.{e}.{projection}.{suffix}"] = t

    change(folder, edit)


def cut_off(folder: Path) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:-100])


def twice(folder: Path) -> None:
    save_file({f"{FIRST}.up_proj.weight_packed": torch.zeros(2)}, folder / "more.safetensors")


def no_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "another_method": (other_method, r"quant_method 'hqq' cannot be loaded.*config\.json"),
    "another_class": (other_class, r"config\.json names 'NoSuchModel', which is no model of tran"),
    "two_formats": (two_formats, r"is in int4:1x32:bfloat16, .* is in float8_e4m3fn:row: experts "),
    "cut_off": (cut_off, r"model\.safetensors cannot be read as safetensors .* complete the down"),
    "twice": (twice, r"up_proj\.weight_packed is in model\.safetensors too"),
    "no_config": (no_config, r"no config\.json in .*; give the folder of a checkpoint"),
}


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_loaded_is_said(
    edit: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write(tmp_path, LAYOUTS["packed_int4"], outside=())
    edit(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(tmp_path)


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "folder": ({"folder": 3}, "folder must be the folder of a checkpoint"),
    "dtype": ({"dtype": "bfloat16"}, "dtype must be a dtype or None"),
    "inputs": ({"inputs": 8}, "inputs must be the name of a format, .* got an int: 8"),
    "other_inputs": ({"inputs": "int8:row"}, "no scheme has int4:1x32:bfloat16 weights with int8"),
    "disk": ({"device_map": {"model": "cpu", "lm_head": "disk"}}, "device_map has 'disk'"),
}


@pytest.mark.parametrize(("given", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_are_checked(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["packed_int4"], outside=())
    with pytest.raises((ValueError, TypeError), match=message):
        moe_ops.from_checkpoint(**{"folder": tmp_path, "progress": False} | given)


def test_modules_are_those_of_quantize_model(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["packed_int4"])
    loaded = load(tmp_path)
    assert hasattr(loaded, "_moe_ops_state")  # of optimize
    module: nn.Module = experts_of(loaded)[0]
    assert not any(p.requires_grad for p in module.parameters())
    codes = module.gate_up_proj_codes
    assert torch.equal(loaded.half().model.layers[0].mlp.experts.gate_up_proj_codes, codes)
    with pytest.raises(ValueError, match="quantised already"):
        moe_ops.quantize_model(loaded, "fp8_w8a16")
