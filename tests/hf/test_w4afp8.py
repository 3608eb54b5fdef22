"""W4AFP8 checkpoints, as TensorRT-LLM makes them of DeepSeek: experts in pairs of int4, all else in
blocks of float8, and static scales of inputs of experts under other names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import moe_ops
from moe_ops.hf.stored import stored_format
from moe_ops.layer import MoELayer
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Tol, assert_close
from moe_ops.weights import load_checkpoint
from tests.hf.published import CONFIG, FILE, LAYOUTS, change, configure, save
from tests.hf.published import write as write_alike
from tests.hf.test_published import load
from tests.hf.test_quantize import decoded, experts_of, logits
from tests.hf.test_saved import check_same
from tests.hf.test_static_inputs import float8
from tests.weights.checkpoints import PROJECTIONS, pairs

TOL = Tol(2e-3, "codes of inputs, of sums in another order")
SUMS = Tol(1e-4, "float32 sums in another order through a whole model")
BLOCK = 128
SIZES: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 64, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "intermediate_size": 192, "moe_intermediate_size": 256,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "deepseek": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1,
            topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32,
            v_head_dim=32,
        )
    ),
    "qwen": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, head_dim=64)),
}  # fmt: skip
# Of gate and up, and of down, by experts; exact in bfloat16.
SCALES = [(0.0078125, 0.25), (0.005859375, 0.5), (0.00390625, 0.375), (0.0068359375, 0.125)]
INPUTS = "input_scales.safetensors"
ALGORITHMS = {
    "model.layers.0.self_attn.fused_a": {"quant_algo": "FP8_BLOCK_SCALES"},
    "model.layers.0.mlp.experts": {"quant_algo": "W4A8_AWQ"},
    "model.layers.1.mlp.experts": {"quant_algo": "W4A8_AWQ"},
}
MIXED = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
# Files beside the weights, and what config.json says.
SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sglang": ({}, {"quant_method": "w4afp8", "weight_block_size": [128, 128]}),
    "no_block": ({}, {"quant_method": "w4afp8"}),
    "tensorrt": (
        {"hf_quant_config.json": {"quantization": MIXED},
         "quant_cfg.json": {**MIXED, "quantized_layers": ALGORITHMS}}, {},
    ),
    "one_file": (
        {"hf_quant_config.json": {"quantization": {**MIXED, "quantized_layers": ALGORITHMS}}}, {},
    ),
}  # fmt: skip


@torch.no_grad()
def write(folder: Path, family: str = "deepseek", said: str = "sglang") -> PreTrainedModel:
    """Write a checkpoint in float32, and return the model of floats that it stands for."""
    torch.manual_seed(0)
    g, made = torch.Generator().manual_seed(0), pairs(BLOCK)
    model = FAMILIES[family]().float().eval().requires_grad_(False)
    entries: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def expert(base: str, e: int, shard: str, t: Tensor) -> None:
        found = made(g, *t.shape, shard)
        t.copy_(found.value / 8)
        name = f"{base}.{e}.{PROJECTIONS[shard]}"
        entries[f"{name}.weight"] = found.entries["weight"]
        entries[f"{name}.weight_scale_inv"] = found.entries["weight_scale_inv"] / 8
        scale = torch.tensor([SCALES[e][shard == "w2"]], dtype=torch.bfloat16)
        inputs[f"{base}.{e}.{shard}.input_scale"] = scale

    for name, t in model.state_dict().items():
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(t):
                for shard, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    expert(base, e, shard, half)
        elif name.endswith("experts.down_proj"):
            for e, one in enumerate(t):
                expert(base, e, "w2", one)
        elif name.endswith("_proj.weight") or name.endswith("_mqa.weight"):
            codes = (t * 64).to(torch.float8_e4m3fn)
            rows, columns = (-(-n // BLOCK) for n in t.shape)
            scale = torch.rand(rows, columns, generator=g) * 0.02 + 0.01
            each = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            t.copy_(codes.float() * each[: t.shape[0], : t.shape[1]])
            entries |= {name: codes, f"{base}.weight_scale_inv": scale}
        else:
            entries[name] = t.clone()
    save(folder, entries)
    save_file(inputs, folder / INPUTS, metadata={"format": "pt"})
    files, config = SAID[said]
    for file, text in files.items():
        (folder / file).write_text(json.dumps(text))
    quantization = {"quantization_config": config} if config else {}
    architectures = {"architectures": [type(model).__name__]}
    (folder / CONFIG).write_text(json.dumps(model.config.to_dict() | architectures | quantization))
    return model


def largest(column: int) -> float:
    return max(scales[column] for scales in SCALES)


@pytest.mark.parametrize(
    ("family", "said"), [("deepseek", said) for said in SAID] + [("qwen", "sglang")]
)
def test_codes_and_scales_are_the_checkpoints(family: str, said: str, tmp_path: Path) -> None:
    want = write(tmp_path, family, said)
    loaded = load(tmp_path)
    for module, plain in zip(experts_of(loaded), experts_of(want), strict=True):
        stored = stored_format(module)
        assert stored is not None
        assert (stored.w_format, stored.x_format) == ("int4:1x128", "float8_e4m3fn:tensor")
        assert stored.static_inputs
        for i, name in enumerate(("gate_up_proj", "down_proj")):
            torch.testing.assert_close(decoded(module, name), getattr(plain, name), rtol=0, atol=0)
            scale = getattr(module, f"{name}_input_scale")
            torch.testing.assert_close(scale, torch.tensor([largest(i)]), rtol=0, atol=0)
    for name, t in want.state_dict().items():
        if ".experts." not in name:
            torch.testing.assert_close(loaded.state_dict()[name], t, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_that_of_the_decoded_weights(family: str, tmp_path: Path) -> None:
    want = write(tmp_path, family)
    assert_close(logits(load(tmp_path, inputs="")), logits(want), SUMS)


@torch.no_grad()
@pytest.mark.parametrize("inputs", [None, "float8_e4m3fn:row"])
def test_inputs_are_rounded_as_by_hand(inputs: str | None, tmp_path: Path) -> None:
    write(tmp_path)
    module = experts_of(load(tmp_path, inputs=inputs))[0]
    w13, w2 = (decoded(module, p) for p in ("gate_up_proj", "down_proj"))

    def rounded(t: Tensor, column: int) -> Tensor:
        return float8(t, t.abs().amax() / 448 if inputs else torch.tensor(largest(column)))

    g = torch.Generator().manual_seed(1)
    x, weights_TK = torch.randn(5, 256, generator=g), torch.rand(5, 2, generator=g)
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3], [2, 1]])
    want = torch.zeros(5, 256)
    for t in range(5):
        for k in range(2):
            e = int(ids[t, k])
            gate, up = (w13[e] @ rounded(x[t], 0)).chunk(2)
            want[t] += weights_TK[t, k] * (w2[e] @ rounded(F.silu(gate) * up, 1))
    assert_close(module(x, ids, weights_TK), want, TOL)


def test_what_is_made_of_scales_of_inputs_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="moe_ops")
    write(tmp_path)
    load(tmp_path)
    said = [r.message for r in caplog.records if "from_checkpoint" in r.message]
    assert "in int4_w_fp8_a (int4:1x128 x static float8_e4m3fn:tensor)" in said[0]
    assert any(
        "each layer's experts share the largest of their static scales of inputs" in s for s in said
    )
    caplog.clear()
    load(tmp_path, inputs="")
    said = [r.message for r in caplog.records if "left out" in r.message]
    assert "12 static scales of inputs of experts are left out" in said[0]


def test_it_is_saved_and_comes_back(tmp_path: Path) -> None:
    write(tmp_path / "hub", "qwen")
    loaded = load(tmp_path / "hub")
    loaded.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    check_same(loaded, again)
    assert torch.equal(logits(again), logits(loaded))


def test_a_layer_is_loaded_under_both_names(tmp_path: Path) -> None:
    want = experts_of(write(tmp_path))[0]
    quant = QuantConfig.with_static_inputs("int4:1x128", "float8_e4m3fn:tensor")
    layer = MoELayer(4, 2, 256, 256, quant=quant, dtype=torch.float32)
    prefix = "model.layers.1.mlp"
    report = load_checkpoint({prefix: layer}, tmp_path, style="deepseek-w4afp8", progress=False)
    assert not [name for name in report.missing if ".w" in name or "scale" in name]
    assert layer.x_scale is not None
    assert layer.h_scale is not None
    assert (float(layer.x_scale), float(layer.h_scale)) == (largest(0), largest(1))
    plain = MoELayer(4, 2, 256, 256, dtype=torch.float32)
    with torch.no_grad():
        plain.w13_weight.copy_(want.gate_up_proj)
        plain.w2_weight.copy_(want.down_proj)
        x, chosen = torch.randn(9, 256), torch.randn(9, 4)
        rough = Tol(0.1, "inputs of three bits")
        assert_close(layer(x, chosen), plain(x, chosen), rough)


def test_integers_of_compressed_tensors_meet_float8_that_it_names(tmp_path: Path) -> None:
    layout = LAYOUTS["packed_int4"]
    write_alike(tmp_path, layout, outside=())
    given = "float8_e4m3fn:tensor"

    def add(entries: dict[str, Tensor]) -> None:
        for name in [n for n in entries if n.endswith("weight_packed")]:
            entries[name.replace("weight_packed", "input_scale")] = torch.tensor([0.5])

    change(tmp_path, add)
    stored = stored_format(experts_of(load(tmp_path))[0])
    assert stored is not None
    assert stored.x_format == ""  # of what they are, nothing says
    (group,) = layout.config["config_groups"].values()
    for dynamic, x_format in ((False, given), (True, "")):
        said = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": dynamic}
        groups = {"group_0": {**group, "input_activations": said}}
        configure(tmp_path, quantization_config={**layout.config, "config_groups": groups})
        stored = stored_format(experts_of(load(tmp_path))[0])
        assert stored is not None
        assert (stored.x_format, stored.static_inputs) == (x_format, not dynamic)


FIRST = "model.layers.1.mlp.experts.0"


def edited(edit: Callable[[dict[str, Tensor]], Any], file: str = FILE) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        entries = load_file(folder / file)
        edit(entries)
        save_file(entries, folder / file, metadata={"format": "pt"})

    return run


def put(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return edited(lambda entries: entries.update({name: make(entries[name]).contiguous()}))


def in_rows(entries: dict[str, Tensor]) -> None:
    """As ModelOpt packs them itself."""
    for name, t in entries.items():
        if t.dtype == torch.int8:
            entries[name] = t.view(torch.uint8).reshape(128, 256)


def factors(value: float) -> Callable[[Path], None]:
    name = f"{FIRST}.gate_proj.pre_quant_scale"
    return edited(lambda entries: entries.update({name: torch.full((256,), value)}))


def of_whole_model(folder: Path) -> None:
    configure(folder, quantization_config={"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"})


def in_two_ways(folder: Path) -> None:
    edited(lambda e: e.update({f"{FIRST}.w1.weight": e[f"{FIRST}.gate_proj.weight"].clone()}))(
        folder
    )


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "factors": (factors(0.5), r"gate_proj\.pre_quant_scale has factors of the columns .* than 1"),
    "of_whole_model": (of_whole_model, r"quant_algo W4A8_AWQ of a whole model packs rows in pairs"),
    "rows_in_pairs": (
        edited(in_rows), r"is uint8 \[128, 256\] with scales float32 \[256, 2\], which is no format"
    ),
    "columns_missing": (
        put(f"{FIRST}.down_proj.weight", lambda t: t[:, :64]), r"experts\.0\.down_proj\.weight"
    ),
    "scales_of_a_block": (
        put(f"{FIRST[:-1]}1.up_proj.weight_scale_inv", lambda t: t[::128]),
        r"1\.up_proj\.weight_scale_inv: expected the shape \[256, 2\], found \[2, 2\]",
    ),
    "an_input_missing": (
        edited(lambda e: e.pop("model.layers.1.mlp.experts.2.w2.input_scale"), INPUTS),
        r'h_scale\[2\]\.w2 is missing .*or give inputs=""',
    ),
    "in_two_ways": (in_two_ways, r"w1\.weight and .*name experts in two ways"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_read_is_refused_by_name(
    edit: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    edit(tmp_path)
    with pytest.raises((ValueError, TypeError), match=message):
        load(tmp_path)


def test_factors_of_one_are_none(tmp_path: Path) -> None:
    want = write(tmp_path, "qwen")
    factors(1.0)(tmp_path)
    assert_close(logits(load(tmp_path, inputs="")), logits(want), SUMS)


def test_factors_are_no_part_of_a_layer_either(tmp_path: Path) -> None:
    write(tmp_path)
    factors(0.5)(tmp_path)
    layer = MoELayer(4, 2, 256, 256, quant=QuantConfig(weights="int4:1x128"), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"pre_quant_scale has factors of the columns"):
        load_checkpoint(
            {"model.layers.1.mlp": layer}, tmp_path, style="deepseek-w4afp8", progress=False
        )


def test_quantize_model_makes_the_same_scheme() -> None:
    model = FAMILIES["qwen"]().float().eval()
    want = logits(model)
    moe_ops.quantize_model(
        model, "int4_w_fp8_a", weight_format="int4:1x128", input_format="float8_e4m3fn:row"
    )
    stored = stored_format(experts_of(model)[0])
    assert stored is not None
    assert (stored.w_format, stored.x_format) == ("int4:1x128", "float8_e4m3fn:row")
    assert_close(logits(model), want, Tol(0.3, "weights of four bits, inputs of three"))
