"""Scales of weights that are missing or no positive numbers are refused, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from moe_ops.weights.experts import load_expert
from tests.chosen import in_turn
from tests.weights.checkpoints import LAYOUTS, PREFIX, D, E, I, Layout, store, write

NAN, INF = float("nan"), float("inf")
EXPERT = f"{PREFIX}.experts.{E - 1}"  # the last, so that others were taken before
SCALES = ("scales", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")


def layer_of(layout: Layout, **more: Any) -> MoELayer:
    quant = QuantConfig(weights=layout.weights, inputs=layout.inputs, static_inputs=layout.static)
    return MoELayer(E, 2, D, I, quant=quant, dtype=torch.float32, **more)


def check_refused(folder: Path, layer: MoELayer, message: str) -> None:
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message) as raised:
        load_checkpoint({PREFIX: layer}, folder, style="qwen", progress=False)
    assert str(folder) in str(raised.value)
    for name, t in layer.state_dict().items():
        assert torch.equal(before[name].view(torch.uint8), t.view(torch.uint8)), name


def spoilt(t: Tensor, value: float) -> Tensor:
    t = t.clone()
    flat = t.reshape(-1)
    flat[-1] = 255 if t.dtype == torch.uint8 else torch.tensor(value).to(t.dtype)
    return flat.reshape(t.shape)


def scales_of(name: str) -> list[str]:
    made = LAYOUTS[name].write(torch.Generator().manual_seed(0), 64, 64, "w1")
    return [suffix for suffix in made.entries if suffix in SCALES]


OF_LAYOUTS = [(name, suffix) for name in LAYOUTS for suffix in scales_of(name)]


@pytest.mark.parametrize(("name", "suffix"), OF_LAYOUTS)
def test_scales_that_are_no_numbers_are_refused(name: str, suffix: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    entries = write(tmp_path, layout).entries
    entry = f"{EXPERT}.down_proj.{suffix}"
    entries[entry] = spoilt(entries[entry], NAN)
    store(tmp_path, entries, layout.config)
    said = "has no finite inverse" if suffix == "weight_global_scale" else "holds (nan|NaN), but a"
    check_refused(tmp_path, layer_of(layout), rf"^{entry}: .*{said}")


@in_turn(
    pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"]),
    pytest.mark.parametrize("value", [INF, 0.0, -0.5]),
    pytest.mark.parametrize("name", ["fp8_blocks", "gptq_int4", "float_channel"]),
)
def test_scales_that_are_not_above_zero_are_refused(
    name: str, value: float, projection: str, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    entries = write(tmp_path, layout).entries
    entry = next(n for n in entries if n.startswith(f"{EXPERT}.{projection}.") and "scale" in n)
    entries[entry] = spoilt(entries[entry], value)
    store(tmp_path, entries, layout.config)
    check_refused(tmp_path, layer_of(layout), rf"^{entry}: holds {value}, but a scale is above 0")


@pytest.mark.parametrize(("name", "suffix"), OF_LAYOUTS)
def test_codes_without_scales_are_refused(name: str, suffix: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    entries = write(tmp_path, layout).entries
    del entries[f"{EXPERT}.up_proj.{suffix}"]
    store(tmp_path, entries, layout.config)
    what = "global_scale" if suffix in ("weight_scale_2", "weight_global_scale") else "scale"
    check_refused(
        tmp_path, layer_of(layout),
        rf"^{EXPERT}\.up_proj\.\w+: no entry has the scales? of .* \(w13_{what} of expert 2, w3",
    )  # fmt: skip


def test_scales_of_shared_experts_are_checked_too(tmp_path: Path) -> None:
    layout = LAYOUTS["fp8_blocks"]
    made = write(tmp_path, layout)
    g = torch.Generator().manual_seed(1)
    for shard, projection in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        sizes = (D, 2 * I) if shard == "w2" else (2 * I, D)
        for suffix, t in layout.write(g, *sizes, shard).entries.items():
            made.entries[f"{PREFIX}.shared_experts.{projection}.{suffix}"] = t
    name = f"{PREFIX}.shared_experts.down_proj.weight_scale_inv"
    good = made.entries.pop(name)
    store(tmp_path, made.entries, layout.config)
    check_refused(
        tmp_path, layer_of(layout, shared_experts=2), r"shared_experts\.down_proj\.weight: no"
    )
    store(tmp_path, made.entries | {name: spoilt(good, NAN)}, layout.config)
    check_refused(tmp_path, layer_of(layout, shared_experts=2), rf"^{name}: holds nan")
    store(tmp_path, made.entries | {name: good}, layout.config)
    layer = layer_of(layout, shared_experts=2)
    assert load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False).complete


def test_one_tensor_is_checked_too() -> None:
    layout = LAYOUTS["fp8_blocks"]
    layer = layer_of(layout)
    before = layer.w2_scale.clone()
    with pytest.raises(ValueError, match=r"^mine: holds nan, but a scale is above 0"):
        load_expert(layer, "w2_scale", torch.full((2, 2), NAN), "mine", "w2", 0)
    assert torch.equal(layer.w2_scale, before)


@pytest.mark.parametrize(("element", "most"), [("uint4", 16), ("uint8", 255)])
def test_zero_points_that_kernels_do_not_take_are_refused(element: str, most: int) -> None:
    layer = MoELayer(
        num_experts=2, top_k=1, hidden_size=32, intermediate_size=32, quant=f"{element}:1x32"
    )
    assert layer.w2_zero is not None
    zeros = torch.full((32, 1), most, dtype=torch.uint8)
    load_expert(layer, "w2_zero", zeros, "mine", "w2", 0)
    assert torch.equal(layer.w2_zero[0], zeros)
    if most < 255:
        said = r"^mine: holds a zero point of 17, but those of uint4 are 0 to 16; complete"
        with pytest.raises(ValueError, match=said):
            load_expert(layer, "w2_zero", zeros + 1, "mine", "w2", 1)


def test_blocks_of_zeros_have_scales_of_zero(tmp_path: Path) -> None:
    layout = LAYOUTS["modelopt_nvfp4"]
    entries = write(tmp_path, layout).entries
    name = f"{EXPERT}.down_proj.weight_scale"
    entries[name] = spoilt(entries[name], 0.0)
    store(tmp_path, entries, layout.config)
    layer = layer_of(layout)
    assert load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False).complete
    assert float(layer.w2_scale[E - 1].flatten()[-1]) == 0


def test_tensors_that_are_given_are_checked_as_files_are() -> None:
    layout = LAYOUTS["fp8_blocks"]
    g = torch.Generator().manual_seed(0)
    entries: dict[str, Tensor] = {}
    for e in range(E):
        for shard, projection in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            made = layout.write(g, D, I, shard).entries
            entries |= {f"{PREFIX}.experts.{e}.{projection}.{n}": t for n, t in made.items()}
    name = f"{EXPERT}.down_proj.weight_scale_inv"
    lacking = {n: t for n, t in entries.items() if n != name}
    layer = layer_of(layout)
    before = layer.w13_scale.clone()
    for source, message in (
        (lacking, "down_proj.weight: no entry has the scales"),
        (entries | {name: spoilt(entries[name], NAN)}, f"{name}: holds nan"),
    ):
        with pytest.raises(ValueError, match=message):
            load_checkpoint({PREFIX: layer}, source, style="qwen", progress=False)
        assert torch.equal(layer.w13_scale, before)
        with pytest.raises(ValueError, match=message):
            load_checkpoint({PREFIX: layer_of(layout)}, source.items(), style="qwen")
    assert load_checkpoint({PREFIX: layer}, entries.items(), style="qwen").complete
