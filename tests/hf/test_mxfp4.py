"""`adopt_mxfp4` from a folder, and what it refuses before experts are changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM

import moe_ops
from moe_ops.hf import adopt_mxfp4
from moe_ops.hf.stored import stored_format
from moe_ops.testing import Tol, assert_close
from tests.hf.test_quantize import experts_of, gpt_oss, logits, stored_mxfp4


def test_the_folder_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    model, other = gpt_oss(), gpt_oss()
    tensors = stored_mxfp4(model)
    for layer in range(2):
        part = {n: t for n, t in tensors.items() if f"layers.{layer}." in n}
        save_file(part, tmp_path / f"model-{layer}.safetensors")
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "rest.safetensors")
    assert adopt_mxfp4(model, tmp_path) == adopt_mxfp4(other, tensors) == 2
    assert torch.equal(logits(model), logits(other))
    again = gpt_oss().to("meta")
    assert adopt_mxfp4(again, str(tmp_path)) == 2
    assert not experts_of(again)[0].down_proj_codes.is_meta


def test_a_published_model_is_loaded_adopted_and_saved(tmp_path: Path) -> None:
    """transformers decodes the experts where it has no kernels for them, as on a CPU."""
    model = gpt_oss()
    model.save_pretrained(tmp_path / "hub", save_original_format=False)
    file, config = (tmp_path / "hub" / name for name in ("model.safetensors", "config.json"))
    endings = ("experts.gate_up_proj", "experts.down_proj")
    rest = {n: t for n, t in load_file(file).items() if not n.endswith(endings)}
    save_file(rest | stored_mxfp4(model), file, metadata={"format": "pt"})
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "self_attn", "router"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))
    loaded = GptOssForCausalLM.from_pretrained(tmp_path / "hub", dtype=torch.float32)
    want = logits(loaded)
    assert adopt_mxfp4(loaded, tmp_path / "hub") == 2
    assert_close(logits(loaded), want, Tol(0.02, "older releases decode to bfloat16"))
    loaded.save_pretrained(tmp_path / "ours")
    again = GptOssForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(logits(again), logits(loaded))


def test_what_cannot_be_right_is_refused_before_experts_are_changed(tmp_path: Path) -> None:
    model = moe_ops.optimize(gpt_oss())
    want = logits(model)
    with pytest.raises(FileNotFoundError, match="give the folder of a gpt-oss checkpoint"):
        adopt_mxfp4(model, tmp_path)
    with pytest.raises(TypeError, match="tensors must be a folder, or tensors by their names"):
        adopt_mxfp4(model, 3)
    tensors = stored_mxfp4(model)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][0, 0, 0] = 255
    with pytest.raises(ValueError, match=rf"{name} holds NaN; complete the download"):
        adopt_mxfp4(model, tensors)
    assert not any(stored_format(m) for m in experts_of(model))
    assert torch.equal(logits(model), want)
