"""Adapters of experts in files, between peft and ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_ops
from moe_ops.testing import F32, TOL, assert_close
from tests.hf.adapters.models import TARGETS, in_floats, logits, peft, wrapped
from tests.hf.adapters.test_added import FAMILIES, coded
from tests.hf.test_quantize import qwen

MODEL = TOL["model", F32]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_what_peft_saved_loads_onto_codes_and_goes_back(
    make: Any, target: tuple[str, ...], tmp_path: Path
) -> None:
    first, second = tmp_path / "peft", tmp_path / "ours"
    theirs = wrapped(make(), target=target, use_rslora=True)
    theirs.save_pretrained(first)
    model = coded(make)
    kept = {n for n, p in model.named_parameters() if p.is_floating_point() and "lm_head" in n}
    model.lm_head.requires_grad_(True)
    assert moe_ops.load_adapter(model, first) == 2
    assert {n for n, p in model.named_parameters() if p.requires_grad} == kept
    stock = peft.PeftModel.from_pretrained(in_floats(model, make()), first).eval()
    assert_close(logits(model), logits(stock), MODEL)
    moe_ops.save_adapter(model, second)
    ours, given = (load_file(f / "adapter_model.safetensors") for f in (second, first))
    assert ours.keys() == given.keys()
    assert all(torch.equal(ours[key], given[key]) for key in ours)
    back = peft.PeftModel.from_pretrained(make(), second).eval()
    assert torch.equal(logits(back), logits(theirs))


def test_an_adapter_is_loaded_under_another_name_and_trained_further(tmp_path: Path) -> None:
    wrapped(qwen()).save_pretrained(tmp_path)
    model = qwen()
    moe_ops.load_adapter(model, tmp_path, "one")
    moe_ops.load_adapter(model, str(tmp_path), "two", trainable=True)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 8 and all(".two." in name for name in trained)
    moe_ops.save_adapter(model, tmp_path / "further", "two")
    assert json.loads((tmp_path / "further/adapter_config.json").read_text())["r"] == 4


def test_what_is_of_other_layers_is_left_out_if_asked(tmp_path: Path) -> None:
    theirs = wrapped(qwen(), target_modules=["q_proj"])
    theirs.save_pretrained(tmp_path)
    model = qwen()
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.weight, too, wh"):
        moe_ops.load_adapter(model, tmp_path)
    assert not any("expert_adapters" in name for name, _ in model.named_modules())
    assert moe_ops.load_adapter(model, tmp_path, experts_only=True) == 2


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def of_another_size(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(k for k in tensors if "lora_A" in k)
    save_file({**tensors, key: torch.zeros(24, 8)}, file)


def lacking(part: str) -> Callable[[Path], None]:
    def drop(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file({k: t for k, t in load_file(file).items() if part not in k}, file)

    return drop


@pytest.mark.parametrize("part", ["1.mlp.experts.lora_B", "1.mlp.experts.base_layer"])
@pytest.mark.parametrize("experts_only", [False, True])
def test_no_part_of_an_adapter_is_left_out(part: str, experts_only: bool, tmp_path: Path) -> None:
    wrapped(qwen()).save_pretrained(tmp_path)
    lacking(part)(tmp_path)
    model = qwen()
    with pytest.raises(ValueError, match=r"lora_A\.weight is there, but not .*, of the same expe"):
        moe_ops.load_adapter(model, tmp_path, experts_only=experts_only)
    assert not any("expert_adapters" in name for name, _ in model.named_modules())


def test_an_adapter_of_16_bits_is_trained_further_in_32(tmp_path: Path) -> None:
    model = qwen()
    moe_ops.add_adapter(model, 2)
    moe_ops.save_adapter(model.to(torch.bfloat16), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    assert {t.dtype for t in load_file(file).values()} == {torch.bfloat16}
    other = qwen().to(torch.bfloat16)
    moe_ops.load_adapter(other, tmp_path, trainable=True)
    found = {p.dtype for p in other.parameters() if p.requires_grad}
    assert found == {torch.float32}


BAD: dict[str, tuple[Callable[[Path], Any], Any, str]] = {
    "no_config": (without("adapter_config.json"), FileNotFoundError, "no adapter_config.json; g"),
    "no_weights": (without("adapter_model.safetensors"), FileNotFoundError, "has no adapter_mode"),
    "another_kind": (edited(peft_type="LOHA"), ValueError, "has peft_type='LOHA', which adapters"),
    "dora": (edited(use_dora=True), ValueError, "has use_dora=True, which adapters of experts ha"),
    "patterns": (edited(rank_pattern={"x": 2}), ValueError, "has rank_pattern={'x': 2}, which ad"),
    "no_alpha": (edited(lora_alpha=None), ValueError, "has lora_alpha=None; give an adapter that"),
    "modules": (edited(target_parameters=None), ValueError, "has target_parameters=None; give an"),
    "others": (edited(target_parameters=["x.y"]), ValueError, "has nothing for the experts of Qw"),
    "sizes": (of_another_size, ValueError, r"is \[24, 8\], but model\.layers\.0\.mlp\.experts ha"),
}


@pytest.mark.parametrize(("damage", "kind", "message"), BAD.values(), ids=BAD)
def test_a_folder_that_cannot_be(
    damage: Callable[[Path], Any], kind: Any, message: str, tmp_path: Path
) -> None:
    wrapped(qwen()).save_pretrained(tmp_path)
    damage(tmp_path)
    model = qwen()
    with pytest.raises(kind, match=message):
        moe_ops.load_adapter(model, tmp_path)
    assert not any("expert_adapters" in name for name, _ in model.named_modules())


def test_a_name_that_the_model_lacks_is_not_saved(tmp_path: Path) -> None:
    model = qwen()
    moe_ops.add_adapter(model, 2)
    with pytest.raises(ValueError, match="the experts have no adapter 'x'; there are default"):
        moe_ops.save_adapter(model, tmp_path, "x")
