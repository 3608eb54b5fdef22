"""Quantised models through save_pretrained and from_pretrained: every bit, or an error by name."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers import auto

import moe_ops
from moe_ops import Layout
from moe_ops.hf import adopt_mxfp4
from moe_ops.hf.pretrained import MoeOpsConfig
from moe_ops.hf.stored import stored_format
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import Tol, assert_close
from tests.chosen import one_in
from tests.hf import families
from tests.hf.test_quantize import experts_of, gpt_oss, logits, qwen, stored_mxfp4
from tests.hf.test_quantized_state import EVERY, quantized

ROOT = Path(__file__).parents[2]
EXPERTS = "model.layers.0.mlp.experts"
FILE = "model.safetensors"
# Of weights and inputs, what is used most; of tiny models' widths.
USED = {
    "fp8_w8a8": ("float8_e4m3fn:row", "float8_e4m3fn:row"),
    "fp8_w8a16": (None, None),
    "int8_w8a8": (None, None),
    "int8_w8a16": (None, None),
    "int4_w4a16": ("uint4:1x32:bfloat16", None),
    "mxfp4_w4a16": (None, None),
    "mxfp4_w_mxfp8_a": (None, None),
    "mxfp8": (None, None),
    "nvfp4_w4a16": (None, None),
}
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "moe_latent_size")
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_vl_moe")


def bits(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def check_same(one: nn.Module, other: nn.Module) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name, t in a.items():
        assert (t.dtype, t.shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(bits(t), bits(b[name])), name
    for m, n in zip(experts_of(one), experts_of(other), strict=True):
        assert stored_format(m) == stored_format(n)


@one_in(2, pytest.mark.parametrize("scheme", EVERY))
def test_every_scheme_comes_back_bit_by_bit(scheme: str, tmp_path: Path) -> None:
    model = quantized(scheme)
    model.save_pretrained(tmp_path / "one", max_shard_size="20KB")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 3
    loaded = type(model).from_pretrained(tmp_path / "one")
    check_same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float32)
    check_same(model, again)
    assert torch.equal(logits(again), logits(model))


def other_families() -> list[Any]:
    """Of every family one scheme, and of every scheme one family; the rest with all tests."""
    return [
        pytest.param(f, s, marks=[] if i in (0, j % 6) and 0 in (i, j) else [pytest.mark.every])
        for i, f in enumerate(FAMILIES)
        for j, s in enumerate(USED)
        if i or j
    ]


@pytest.mark.parametrize(("family", "scheme"), other_families())
def test_families_come_back_bit_by_bit(
    family: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WIDTHS:
        monkeypatch.setitem(families.SIZES, name, 64)  # which every group divides
    tiny = families.build(family)
    weights, inputs = USED[scheme]
    report = moe_ops.quantize_model(
        tiny.model, scheme, weight_format=weights, input_format=inputs, progress=False
    )
    assert report.modules and not report.kept
    tiny.model.save_pretrained(tmp_path, max_shard_size="200KB")
    loaded = type(tiny.model).from_pretrained(tmp_path)
    check_same(tiny.model, loaded)
    assert torch.equal(
        families.run(replace(tiny, model=loaded), tiny.inputs), families.run(tiny, tiny.inputs)
    )


def test_what_is_loaded_is_what_quantize_model_made(tmp_path: Path) -> None:
    model = quantized("fp8_w8a16")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map={"": "cpu"})
    assert not any(p.requires_grad for m in experts_of(loaded) for p in m.parameters())
    assert hasattr(loaded, "_moe_ops_state")  # of optimize
    with pytest.raises(ValueError, match="quantised already"):
        moe_ops.quantize_model(loaded, "fp8_w8a16")
    twin = copy.deepcopy(loaded).half()
    codes = [m.gate_up_proj_codes for m in experts_of(twin)]
    assert all(c.dtype == torch.float8_e4m3fn for c in codes)
    assert loaded.to(torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    twin.save_pretrained(tmp_path / "half")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "moe_ops", "weights": "float8_e4m3fn:row", "inputs": "", "kept": [],
    }  # fmt: skip
    half = type(model).from_pretrained(tmp_path / "half")
    assert half.lm_head.weight.dtype == torch.float16
    check_same(twin, half)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "auto"])
def test_a_dtype_is_for_the_rest(dtype: Any, tmp_path: Path) -> None:
    model = quantized("int4_w4a16")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else dtype
    assert loaded.lm_head.weight.dtype == wanted
    check_same(model.to(wanted), loaded)


def test_models_in_models_are_saved_and_loaded_too(tmp_path: Path) -> None:
    model = quantized()
    model.save_pretrained(tmp_path / "head")
    check_same(AutoModel.from_pretrained(tmp_path / "head"), model.model)
    model.model.save_pretrained(tmp_path / "base")
    check_same(AutoModel.from_pretrained(tmp_path / "base"), model.model)
    headed = type(model).from_pretrained(tmp_path / "base")
    check_same(headed.model, model.model)


def test_other_files_hold_the_state_dict_too(tmp_path: Path) -> None:
    model = quantized("nvfp4_w4a16")
    save_file(model.state_dict(), tmp_path / FILE)
    other = quantized("nvfp4_w4a16", seed=1)
    other.load_state_dict(load_file(tmp_path / FILE))
    check_same(model, other)
    model.config.save_pretrained(tmp_path / "bin")
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    check_same(model, type(model).from_pretrained(tmp_path / "bin"))
    given = type(model).from_pretrained(
        None, config=model.config, state_dict=copy.deepcopy(model.state_dict())
    )
    check_same(model, given)


def test_files_of_the_format_before_zip_files_load(tmp_path: Path) -> None:
    model = quantized("int8_w8a16")
    model.config.save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(model.state_dict(), file, _use_new_zipfile_serialization=False)
    # Of such files transformers does not find out the dtype.
    check_same(model, type(model).from_pretrained(tmp_path, dtype=model.dtype))


def test_prepared_weights_are_saved_as_they_were_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = Layout(name="test.turned", prepare=upside_down, restore=upside_down)
    monkeypatch.setitem(moe_ops.experts.layouts, turned.name, turned)
    model = quantized("int8_w8a16")
    want = copy.deepcopy(model)
    assert moe_ops.prepare(model, turned.name).bytes_rewritten
    model.save_pretrained(tmp_path)
    check_same(want, type(model).from_pretrained(tmp_path))


def upside_down(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The rows of the first weight in reverse."""
    return {"w13_EFD": tensors["w13_EFD"].flip(1)}


@pytest.mark.parametrize("layers", [1, 2])
def test_adopted_experts_are_saved_and_the_others_kept(layers: int, tmp_path: Path) -> None:
    model = gpt_oss()
    tensors = stored_mxfp4(model)
    some = {n: t for n, t in tensors.items() if int(n.split(".")[2]) < layers}
    assert adopt_mxfp4(model, some) == layers
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    check_same(model, loaded)
    assert torch.equal(logits(loaded), logits(model))
    kept = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kept"]
    assert kept == ["model.layers.1.mlp.experts"][: 2 - layers]
    inner = AutoModel.from_pretrained(tmp_path)
    check_same(inner, model.model)


def test_what_from_pretrained_cannot_do_is_refused(tmp_path: Path) -> None:
    model = qwen()
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(
        ValueError, match=r"leave quantization_config out, and call moe_ops\.quanti"
    ):
        type(model).from_pretrained(
            tmp_path / "plain", quantization_config=MoeOpsConfig(weights="int8:row")
        )
    quantized().save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="device_map has 'disk'"):
        type(model).from_pretrained(tmp_path / "ours", device_map={"model": 0, "lm_head": "disk"})


def test_a_model_that_another_method_quantized_is_not_saved(tmp_path: Path) -> None:
    model = qwen()
    model.config.quantization_config = {"quant_method": "awq"}
    moe_ops.quantize_model(model, "int8_w8a16", progress=False)
    for one in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(
            ValueError, match=r"hold quantised weights beside what awq quantised, .* torch\.save\("
        ):
            one.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_scheme_is_tried() -> None:
    assert set(EVERY) == set(SCHEMES) - {"none"} and set(USED) < set(EVERY)


def test_without_moe_ops_transformers_says_that_it_does_not_know_the_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = quantized("mxfp8_w8a16")
    model.save_pretrained(tmp_path)
    for known in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(known, "moe_ops")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    with pytest.raises(RuntimeError, match="mismatch"):
        type(model).from_pretrained(tmp_path)
    assert "Unknown quantization type, got moe_ops" in caplog.text


FRESH = """
import sys, torch, moe_ops
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert not {"moe_ops.compiler", "moe_ops.passes"} & sys.modules.keys()
with torch.inference_mode(), moe_ops.using("reference"):
    logits = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits
torch.save((logits, model.state_dict()), sys.argv[2])
"""


@pytest.mark.slow
def test_a_fresh_process_that_imports_moe_ops_loads_it(tmp_path: Path) -> None:
    model = quantized("mxfp8_w8a16")
    model.save_pretrained(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", FRESH, str(tmp_path), str(tmp_path / "found.pt")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, state = torch.load(tmp_path / "found.pt")
    saved = model.state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(bits(t), bits(saved[name])) for name, t in state.items())
    with moe_ops.using("reference"):  # for which nothing is compiled
        want = logits(model)
    assert_close(found, want, Tol(1e-5, "float32 sums of another number of threads"))


def test_a_model_that_was_pickled_whole_finds_the_config_by_its_old_name() -> None:
    made = pickle.dumps(MoeOpsConfig, protocol=0)
    old = made.replace(b"moe_ops.hf.pretrained", b"moe_ops.pretrained")
    assert old != made and pickle.loads(old) is MoeOpsConfig
