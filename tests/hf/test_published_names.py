"""Which entries of a published checkpoint a model takes: by what its class ignores, by what ties
its weights, and by the names that quantisers give to experts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    DeepseekV3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from moe_ops.hf.stored import stored_format
from moe_ops.testing import assert_close
from tests.chosen import in_turn
from tests.hf.published import CONFIG, FILE, LAYOUTS, SIZES, change, configure, write
from tests.hf.test_published import TOL, check, load
from tests.hf.test_quantize import experts_of, logits
from tests.hf.test_saved import check_same
from tests.weights.checkpoints import Layout

MTP = "model.layers.61."  # what DeepseekV3ForCausalLM ignores


def copied(to: str, damage: bool = True) -> Callable[[dict[str, Tensor]], None]:
    """Layer 1 once more under another prefix, with scales that no weight can have."""

    def edit(entries: dict[str, Tensor]) -> None:
        for name, t in list(entries.items()):
            if name.startswith("model.layers.1."):
                t = torch.full_like(t, float("nan")) if damage and "scale" in name else t.clone()
                entries[name.replace("model.layers.1.", to)] = t

    return edit


@pytest.mark.parametrize("to", [MTP, "layers.61.", "model.layers.2."], ids=["name", "base", "next"])
def test_what_the_class_ignores_is_left_out_before_it_is_judged(
    to: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by its name in the base model, and layers that config.json says predict more tokens."""
    want = write(tmp_path, LAYOUTS["fp8_blocks"], "deepseek", outside=("o_proj", "gate_proj"))
    change(tmp_path, copied(to))
    with caplog.at_level(logging.INFO, logger="moe_ops"):
        check(load(tmp_path), want)
    assert "entries are left out, as DeepseekV3ForCausalLM ignores them" in caplog.text


def test_codes_of_another_format_are_left_out_too(tmp_path: Path) -> None:
    want = write(tmp_path, LAYOUTS["packed_int4"], "deepseek")
    change(tmp_path, lambda e: e.update({
        f"{MTP}mlp.experts.0.gate_proj.weight": torch.zeros(64, 64, dtype=torch.int64),
        f"{MTP}mlp.experts.0.gate_proj.quant_state.bitsandbytes__nf4": torch.zeros(3),
        f"{MTP}self_attn.o_proj.weight": torch.zeros(64, 64, dtype=torch.int8),
    }))  # fmt: skip
    check(load(tmp_path), want)


def test_what_the_model_has_is_loaded_though_a_pattern_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layer 46 of a model of 92 layers, whose smaller sister has 46."""
    pattern = [r"model\.layers\.1.*"]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", pattern)
    want = write(tmp_path, LAYOUTS["packed_int4"], "deepseek")
    change(tmp_path, copied("model.layers.17."))
    check(load(tmp_path), want)


def test_experts_that_no_pattern_matches_are_refused(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["packed_int4"], "deepseek")
    change(tmp_path, copied("model.layers.7.", damage=False))
    with pytest.raises(ValueError, match=r"model\.layers\.7\.mlp.*has no experts of this name"):
        load(tmp_path)


def test_matrices_that_the_model_lacks_are_not_decoded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="moe_ops")
    want = write(tmp_path, LAYOUTS["float_channel"])
    scales = torch.full((64, 1), float("nan"))
    change(tmp_path, lambda e: e.update({
        "model.extra.weight": torch.zeros(64, 64).to(torch.float8_e4m3fn),
        "model.extra.weight_scale": scales,
    }))  # fmt: skip
    check(load(tmp_path), want)
    assert "model.extra.weight of" in caplog.text
    assert "Qwen3MoeForCausalLM has nothing of this name" in caplog.text


def test_buffers_that_are_computed_now_are_left_out(tmp_path: Path) -> None:
    want = write(tmp_path, LAYOUTS["packed_int4"])
    change(tmp_path, lambda e: e.update({
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(16) for i in range(2)
    }))  # fmt: skip
    check(load(tmp_path), want)


def test_a_head_that_is_tied_and_entries_that_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = write(tmp_path, LAYOUTS["packed_int4"], "deepseek")
    configure(tmp_path, tie_word_embeddings=True)
    missing = ["kv_a_layernorm"]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_missing", missing)

    def edit(entries: dict[str, Tensor]) -> None:
        for name in [n for n in entries if n == "lm_head.weight" or "kv_a_layernorm" in n]:
            del entries[name]

    change(tmp_path, edit)
    loaded = load(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    want.lm_head.weight.copy_(want.model.embed_tokens.weight)  # norms begin with ones in both
    check(loaded, want)


def test_experts_that_are_tied_get_the_same_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of an encoder and a decoder are, of which a checkpoint has one."""
    tied = {
        f"model.layers.1.mlp.experts.{p}": f"model.layers.0.mlp.experts.{p}"
        for p in ("gate_up_proj", "down_proj")
    }
    monkeypatch.setattr(Qwen3MoeForCausalLM, "_tied_weights_keys", tied)
    want = write(tmp_path / "hub", LAYOUTS["packed_int4"])
    configure(tmp_path / "hub", tie_word_embeddings=True)

    def edit(entries: dict[str, Tensor]) -> None:
        for name in [n for n in entries if "layers.1.mlp.experts" in n]:
            del entries[name]

    change(tmp_path / "hub", edit)
    for name in ("gate_up_proj", "down_proj"):
        first, second = (getattr(m, name) for m in experts_of(want))
        second.copy_(first)
    loaded = load(tmp_path / "hub")
    check(loaded, want)
    loaded.save_pretrained(tmp_path / "ours")
    check_same(loaded, Qwen3MoeForCausalLM.from_pretrained(tmp_path / "ours"))


def vision() -> PreTrainedModel:
    text = SIZES | {
        "num_hidden_layers": 1, "num_experts": 3, "moe_intermediate_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]},
    }  # fmt: skip
    eyes = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
        "out_hidden_size": 64, "patch_size": 4, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    return Qwen3VLMoeForConditionalGeneration(
        Qwen3VLMoeConfig(
            text_config=text, vision_config=eyes, image_token_id=60, video_token_id=61,
            vision_start_token_id=62, vision_end_token_id=63,
        )
    )  # fmt: skip


def gpt_oss() -> PreTrainedModel:
    sizes = SIZES | {"num_hidden_layers": 1}
    return GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=3))


def gemma() -> PreTrainedModel:
    sizes = {k: v for k, v in SIZES.items() if k != "num_experts_per_tok"}
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            **sizes | {"num_hidden_layers": 1}, enable_moe_block=True, num_experts=3,
            top_k_experts=2, moe_intermediate_size=64, hidden_size_per_layer_input=0,
            global_head_dim=32,
        )
    )  # fmt: skip


def qwen() -> PreTrainedModel:
    """Whose own checkpoints have single experts, gate and up apart."""
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=3, moe_intermediate_size=64))


STACKED: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_moe": qwen,
    "qwen3_vl_moe": vision, "gpt_oss": gpt_oss, "gemma4": gemma,
}  # fmt: skip
FUSED = (("gate_up_proj", 0, "gate_up_proj"), ("down_proj", 0, "down_proj"))
SHARDS = {"gate_up_proj": "w1", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
PROJECTIONS = (("gate_up_proj", 0, "gate_proj"), ("gate_up_proj", 1, "up_proj"),
               ("down_proj", 0, "down_proj"))  # fmt: skip


def _projections(module: nn.Module, fused: bool) -> tuple[tuple[str, int, str], ...]:
    """Of each projection in the files: the module's weight that has it, which half, its name."""
    if not module.has_gate:
        return ("up_proj", 0, "up_proj"), ("down_proj", 0, "down_proj")
    return FUSED if fused else PROJECTIONS


@torch.no_grad()
def write_each(
    folder: Path, model: PreTrainedModel, layout: Layout | None, fused: bool = False
) -> None:
    """Write a model with one tensor for each expert, in a layout or as they are, gate and up in one
    if `fused`; the model gets the weights that the codes stand for."""
    g = torch.Generator().manual_seed(0)
    entries = {n: t.clone() for n, t in model.state_dict().items()}
    for name, module in model.named_modules():
        if not hasattr(module, "has_gate"):
            continue
        if any(key.startswith(f"{name}.") for key in model.all_tied_weights_keys):
            continue  # it has those of another module, and the names of that are written
        for whole, half, projection in _projections(module, fused):
            entries.pop(f"{name}.{whole}", None)
            entries.pop(f"{name}.{whole}_bias", None)
            for e in range(module.down_proj.shape[0]):
                w = getattr(module, whole)[e]
                w = w.T if module.is_transposed else w
                bias = getattr(module, f"{whole}_bias")[e] if module.has_bias else None
                if projection == "gate_up_proj":
                    pass
                elif whole == "gate_up_proj" and module.is_concatenated:
                    w, bias = w.chunk(2)[half], bias if bias is None else bias.chunk(2)[half]
                elif whole == "gate_up_proj":
                    w, bias = w[half::2], bias if bias is None else bias[half::2]
                base = f"{name}.{e}.{projection}"
                if bias is not None:
                    bias.copy_(torch.randn(bias.shape, generator=g))
                    entries[f"{base}.bias"] = bias.clone()
                if layout is None:
                    entries[f"{base}.weight"] = w.contiguous().clone()
                    continue
                made = layout.write(g, *w.shape, SHARDS[projection])
                w.copy_(made.value)
                entries |= {f"{base}.{suffix}": t for suffix, t in made.entries.items()}
    folder.mkdir(exist_ok=True)
    save_file(entries, folder / FILE, metadata={"format": "pt"})
    said: dict[str, Any] = {"architectures": [type(model).__name__]}
    if layout is not None:
        said["quantization_config"] = layout.config
    (folder / CONFIG).write_text(json.dumps(model.config.to_dict() | said))


@in_turn(
    pytest.mark.parametrize("fused", [False, True], ids=["gate and up", "fused"]),
    pytest.mark.parametrize("family", STACKED),
    pytest.mark.parametrize("name", ["packed_int4", "modelopt_nvfp4", "floats"]),
)
def test_one_tensor_each_for_families_that_have_one_for_all(
    family: str, name: str, fused: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    want = STACKED[family]().float().eval().requires_grad_(False)
    layout = None if name == "floats" else LAYOUTS[name]
    write_each(tmp_path / "hub", want, layout, fused)
    loaded = load(tmp_path / "hub", inputs="")
    assert (stored_format(experts_of(loaded)[0]) is None) == (layout is None)
    for attribute in ("gate_up_proj_bias", "down_proj_bias"):
        bias = getattr(experts_of(want)[0], attribute, None)
        if bias is not None:
            assert torch.equal(getattr(experts_of(loaded)[0], attribute), bias)
    assert_close(logits(loaded), logits(want), TOL)
    if layout is not None:
        loaded.save_pretrained(tmp_path / "ours")
        again = type(want).from_pretrained(tmp_path / "ours")
        assert torch.equal(logits(again), logits(loaded))
    else:
        same = experts_of(loaded)[0].gate_up_proj
        assert torch.equal(same, experts_of(want)[0].gate_up_proj)


def test_single_experts_in_floats_are_checked(tmp_path: Path) -> None:
    write_each(tmp_path, vision().float(), None)
    name = "model.language_model.layers.0.mlp.experts.1.up_proj.weight"
    whole = load_file(tmp_path / FILE)
    change(tmp_path, lambda e: e.update({name: e[name][:-1].clone()}))
    with pytest.raises(
        ValueError, match=r"1\.up_proj\.weight: expected the shape \[64, 64\], found"
    ):
        load(tmp_path)
    change(tmp_path, lambda e: [e.pop(name)])
    with pytest.raises(ValueError, match=r"no weight of w3 of expert 1.*complete the download"):
        load(tmp_path)
    save_file(whole | {name.replace(".weight", ".bias"): torch.zeros(64)}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"1\.up_proj\.bias is no part of Qwen3VLMoeTextExperts"):
        load(tmp_path)


def test_biases_of_experts_in_codes_that_the_model_lacks(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["packed_int4"])
    name = "model.layers.0.mlp.experts.0.up_proj.bias"
    change(tmp_path, lambda e: e.update({name: torch.zeros(64)}))
    with pytest.raises(ValueError, match=r"Qwen3MoeExperts has no biases, but experts of this"):
        load(tmp_path)


def test_a_configuration_of_the_text_model(tmp_path: Path) -> None:
    want = vision().float().eval().requires_grad_(False)
    write_each(tmp_path, want, LAYOUTS["packed_int4"])
    found = json.loads((tmp_path / CONFIG).read_text())
    found["text_config"]["quantization_config"] = found.pop("quantization_config")
    (tmp_path / CONFIG).write_text(json.dumps(found))
    assert_close(logits(load(tmp_path)), logits(want), TOL)
