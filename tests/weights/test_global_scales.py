"""Scales of gate and up that differ: the weights are those of the checkpoint, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.ops.activate import Activation
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from tests.chosen import in_turn
from tests.weights.checkpoints import LAYOUTS, PREFIX, Layout, store, write
from tests.weights.test_quantized_checkpoints import SPLITS, check_values, layer_of

NVFP4 = {"modelopt_nvfp4": "weight_scale_2", "compressed_nvfp4": "weight_global_scale"}
HALF = {"gate_proj": "w1", "up_proj": "w3"}
FP8 = "float8_e4m3fn"


def load(source: Any, layer: Any) -> Any:
    return load_checkpoint({PREFIX: layer}, source, style="qwen", progress=False)


def other_global(
    folder: Path, name: str, projection: str, ratio: float, coarse: bool = False
) -> dict[str, Tensor]:
    """A checkpoint in which one half of expert 1 has another global scale; what it stands for.

    coarse: the scales of its blocks have two bits only, so that some more ratios are exact.
    """
    made = write(folder, LAYOUTS[name])
    entries, half = made.entries, made.values[HALF[projection]]
    start = f"{PREFIX}.experts.1.{projection}"
    if coarse:
        before = entries[f"{start}.weight_scale"].float()
        after = torch.exp2(before.log2().round())
        entries[f"{start}.weight_scale"] = after.to(torch.float8_e4m3fn)
        half[1] *= (after / before).repeat_interleave(16, -1)
    entries[f"{start}.{NVFP4[name]}"] *= ratio if name == "modelopt_nvfp4" else 1 / ratio
    half[1] *= ratio
    store(folder, entries, LAYOUTS[name].config)
    return made.values


@in_turn(
    pytest.mark.parametrize("split", ["one", "tp2", "ep2_uneven"]),
    pytest.mark.parametrize("ratio", [2.0, 0.5, 0.25]),
    pytest.mark.parametrize("projection", HALF),
    pytest.mark.parametrize("name", NVFP4),
)
def test_global_scales_a_power_of_two_apart(
    name: str, projection: str, ratio: float, split: str, tmp_path: Path
) -> None:
    values = other_global(tmp_path, name, projection, ratio)
    for config in SPLITS[split]:
        layer = layer_of(LAYOUTS[name], config)
        report = load(tmp_path, layer)
        assert report.complete, str(report)
        check_values(layer, values)


def test_rows_of_gate_and_up_that_alternate(tmp_path: Path) -> None:
    values = other_global(tmp_path, "modelopt_nvfp4", "up_proj", 4.0)
    activation = Activation(kind="silu", interleaved=True)
    layer = layer_of(LAYOUTS["modelopt_nvfp4"], ParallelConfig(), activation=activation)
    assert load(tmp_path, layer).complete
    check_values(layer, values)


def test_other_ratios_where_they_are_exact(tmp_path: Path) -> None:
    """Scales of blocks that are powers of two go with 1.5, and others do not."""
    values = other_global(tmp_path, "modelopt_nvfp4", "gate_proj", 1.5, coarse=True)
    layer = layer_of(LAYOUTS["modelopt_nvfp4"], ParallelConfig())
    assert load(tmp_path, layer).complete
    check_values(layer, values)


@pytest.mark.parametrize("ratio", [1.1, 1.5, 2.0**20, 2.0**-20])
def test_weights_that_would_change_are_refused(ratio: float, tmp_path: Path) -> None:
    """By the entry; the layer, and the other expert's scales in it, stay."""
    other_global(tmp_path, "modelopt_nvfp4", "up_proj", ratio)
    layer = layer_of(LAYOUTS["modelopt_nvfp4"], ParallelConfig())
    before = {n: t.clone().view(torch.uint8) for n, t in layer.state_dict().items() if t.dim()}
    with pytest.raises(
        ValueError,
        match=r"experts\.1\.up_proj\.weight_scale_2: expert 1 has .*without rounding; make the "
        r"layer with QuantConfig\(two_global_scales=True\), or quantise gate and up with one",
    ) as error:
        load(tmp_path, layer)
    assert str(tmp_path) in str(error.value)
    after = layer.state_dict()
    assert all(torch.equal(t, after[n].view(torch.uint8)) for n, t in before.items())


@pytest.mark.parametrize("split", ["one", "tp2", "ep2_uneven"])
@pytest.mark.parametrize("name", NVFP4)
def test_a_layer_of_two_global_scales_takes_any(name: str, split: str, tmp_path: Path) -> None:
    values = other_global(tmp_path, name, "up_proj", 1.1)
    for config in SPLITS[split]:
        layer = layer_of(LAYOUTS[name], config, two_global_scales=True)
        report = load(tmp_path, layer)
        assert report.complete, str(report)
        assert layer.w13_global_scale.shape == (layer.sizes.E, 2)
        check_values(layer, values)


@torch.no_grad()
@pytest.mark.parametrize("split", ["one", "tp2", "ep2_uneven"])
def test_outputs_are_those_of_both_scales(split: str, tmp_path: Path) -> None:
    values = other_global(tmp_path, "modelopt_nvfp4", "up_proj", 1.1)
    weights_alone = replace(LAYOUTS["modelopt_nvfp4"], inputs="", static=False)
    layers = [layer_of(weights_alone, c, two_global_scales=True) for c in SPLITS[split]]
    x, logits = torch.randn(9, 64), torch.randn(9, 3)
    plain = MoELayer(3, 2, 64, 64, dtype=torch.float32)
    plain.w13_weight.copy_(torch.cat((values["w1"], values["w3"]), 1))
    plain.w2_weight.copy_(values["w2"])
    for layer in layers:
        load(tmp_path, layer)
    want, got = plain(x, logits), torch.stack([layer(x, logits) for layer in layers]).sum(0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def test_two_global_scales_of_rows_that_alternate_and_of_a_stream(tmp_path: Path) -> None:
    values = other_global(tmp_path, "modelopt_nvfp4", "gate_proj", 0.7)
    layout, activation = LAYOUTS["modelopt_nvfp4"], Activation(kind="silu", interleaved=True)
    entries = load_file(tmp_path / "model.safetensors")
    for source in (tmp_path, entries, iter(entries.items())):
        layer = layer_of(layout, ParallelConfig(), activation=activation, two_global_scales=True)
        assert load(source, layer).complete
        check_values(layer, values)


def test_two_global_scales_that_all_experts_have_in_one_tensor(tmp_path: Path) -> None:
    values = other_global(tmp_path, "modelopt_nvfp4", "up_proj", 1.1)
    entries = load_file(tmp_path / "model.safetensors")
    names = {"weight": "", "weight_scale": "_scale", "weight_scale_2": "_weight_scale_2",
             "input_scale": "_input_scale"}  # fmt: skip
    fused: dict[str, Tensor] = {}
    for suffix, to in names.items():
        gate, up, down = (
            torch.stack([entries[f"{PREFIX}.experts.{e}.{p}.{suffix}"] for e in range(3)])
            for p in ("gate_proj", "up_proj", "down_proj")
        )
        both = torch.cat((gate, up), 1) if gate.dim() > 1 else torch.stack((gate, up), 1)
        fused[f"{PREFIX}.experts.gate_up_proj{to}"] = both
        fused[f"{PREFIX}.experts.down_proj{to}"] = down
    layer = layer_of(LAYOUTS["modelopt_nvfp4"], ParallelConfig(), two_global_scales=True)
    report = load_checkpoint({PREFIX: layer}, fused, style="transformers", progress=False)
    assert report.complete, str(report)
    check_values(layer, values)


def test_a_layer_says_why_it_has_no_two_global_scales() -> None:
    with pytest.raises(ValueError, match="two_global_scales goes with weights that have global sc"):
        QuantConfig(weights="mxfp4", two_global_scales=True)
    ungated = Activation(kind="relu2", gated=False)
    quant = QuantConfig(weights="nvfp4", two_global_scales=True)
    with pytest.raises(ValueError, match="two_global_scales are those of gate and up, and these"):
        MoELayer(2, 1, 64, 64, quant=quant, activation=ungated)
    assert "two global scales" in str(quant)


def test_a_stream_has_equal_global_scales(tmp_path: Path) -> None:
    """Scales of blocks are written before the other global scale is known."""
    other_global(tmp_path, "modelopt_nvfp4", "up_proj", 2.0)
    entries = load_file(tmp_path / "model.safetensors")
    layer = layer_of(LAYOUTS["modelopt_nvfp4"], ParallelConfig())
    assert load(entries, layer).complete
    with pytest.raises(ValueError, match=r"weight_scale_2: expert 1 has .* must serve both"):
        load(iter(entries.items()), layer)


@pytest.mark.parametrize("split", ["one", "tp2"])
def test_scales_of_tensors_become_scales_of_rows(split: str, tmp_path: Path) -> None:
    layout = LAYOUTS["modelopt_fp8"]
    values = write(tmp_path, layout).values  # whose gate and up have scales of their own
    for config in SPLITS[split]:
        layer = layer_of(layout, config)
        assert load(tmp_path, layer).complete
        check_values(layer, values)
    whole = Layout(layout.write, layout.config, f"{FP8}:tensor", layout.inputs, layout.static)
    with pytest.raises(ValueError, match=r"one number must serve both; give the layer a format w"):
        load(tmp_path, layer_of(whole, ParallelConfig()))
