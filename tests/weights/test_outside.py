"""Codes outside the experts: float8 shared experts and gates are decoded, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.weights import load_checkpoint
from tests.weights.checkpoints import PREFIX, store

E, D, I = 2, 16, 8  # noqa: E741
FP8 = torch.float8_e4m3fn


class Shared(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up_proj = nn.Linear(D, D, bias=False)
        self.up_proj.weight = nn.Parameter(torch.zeros(D, D).to(dtype), requires_grad=False)


def layer_of(dtype: torch.dtype = torch.float32) -> MoELayer:
    return MoELayer(
        E, 1, D, I, dtype=torch.float32, internal_gate=True, shared_experts=Shared(dtype)
    )


def entries(**others: Tensor) -> dict[str, Tensor]:
    shapes = {"gate_proj": (I, D), "up_proj": (I, D), "down_proj": (D, I)}
    found = {
        f"{PREFIX}.experts.{e}.{p}.weight": torch.randn(s)
        for e in range(E)
        for p, s in shapes.items()
    }
    found[f"{PREFIX}.gate.weight"] = torch.randn(E, D)
    found[f"{PREFIX}.shared_experts.up_proj.weight"] = torch.randn(D, D)
    return found | {f"{PREFIX}.{n.replace('__', '.')}.weight": t for n, t in others.items()}


def load(folder: Path, layer: MoELayer) -> Any:
    return load_checkpoint({PREFIX: layer}, folder, style="deepseek", progress=False)


OUTSIDE = {"shared_experts__up_proj": (D, D), "gate": (E, D)}


GATE = f"{PREFIX}.gate.weight"
UP = f"{PREFIX}.shared_experts.up_proj.weight"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [12, 8]}
# By name: the scale's ending, its tensor, what config.json says, and the scale of each value of UP.
EACH = torch.rand(D, 1) + 0.5
BLOCK = torch.rand(2, 2) + 0.5
OF_BLOCKS = BLOCK.repeat_interleave(12, 0)[:D].repeat_interleave(8, 1)
POWERS = torch.tensor([[126, 128], [127, 120]], dtype=torch.uint8)
OF_POWERS = torch.exp2(POWERS.float() - 127).repeat_interleave(12, 0)[:D].repeat_interleave(8, 1)
DECODED: dict[str, tuple[str, Tensor, Any, Tensor]] = {
    "blocks": ("_scale_inv", BLOCK, BLOCKS, OF_BLOCKS),
    "powers": ("_scale_inv", POWERS.view(torch.float8_e8m0fnu), BLOCKS, OF_POWERS),
    "powers_as_bytes": ("_scale_inv", POWERS, BLOCKS, OF_POWERS),
    "tensor": ("_scale", torch.tensor(0.25), {"quant_method": "modelopt"}, torch.tensor(0.25)),
    "channels": ("_scale", EACH, None, EACH),
    "channels_flat": ("_scale", EACH.flatten().bfloat16(), None, EACH.bfloat16().float()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("end", "scale", "config", "each"), DECODED.values(), ids=DECODED)
def test_float8_with_scales_is_decoded(
    end: str, scale: Tensor, config: Any, each: Tensor, dtype: torch.dtype, tmp_path: Path
) -> None:
    codes = (torch.randn(D, D) * 50).to(FP8)
    have = entries(shared_experts__up_proj=codes)
    store(tmp_path / "a", have, config)
    store(tmp_path / "b", {UP + end: scale})  # in another file, and of a later name
    files = [tmp_path / n / "model.safetensors" for n in "ab"]
    layer = layer_of(dtype)
    report = load_checkpoint({PREFIX: layer}, files, style="deepseek", progress=False)
    assert report.complete, str(report)
    assert UP + end in report.loaded and UP in report.loaded
    assert torch.equal(layer.shared_experts.up_proj.weight, (codes.float() * each).to(dtype))
    assert torch.equal(layer.gate.weight, have[GATE])


def with_scale(value: float) -> Tensor:
    scale = torch.ones(2, 2)
    scale[1, 0] = value
    return scale


UNFIT: dict[str, tuple[Tensor, Any, str]] = {
    "nan": (with_scale(float("nan")), BLOCKS, "holds nan, but a scale is above 0"),
    "infinite": (with_scale(float("inf")), BLOCKS, "holds inf, but a scale is above 0"),
    "zero": (with_scale(0.0), BLOCKS, r"holds 0\.0, but a scale is above 0"),
    "negative": (with_scale(-2.0), BLOCKS, r"holds -2\.0, but a scale is above 0"),
    "nan_power": (torch.full((2, 2), 255, dtype=torch.uint8), BLOCKS, "holds NaN, but a scale"),
    "blocks": (torch.ones(2, 3), BLOCKS, r"is \[2, 3\], .* \[16, 16\], .* blocks of 12 x 8"),
    "unsaid": (torch.ones(2, 2), None, r"is \[2, 2\], .* says no blocks of scales, and else"),
    "codes": (torch.ones(2, 2).to(FP8), BLOCKS, "is torch.float8_e4m3fn, but a scale is a float"),
    "size": (torch.ones(2, 2), {"weight_block_size": [128]}, r"must be two numbers, .*config"),
    "empty": (torch.ones(2, 2), {"weight_block_size": [0, 8]}, "must be above 0, got .*config"),
}  # fmt: skip


@pytest.mark.parametrize(("scale", "config", "message"), UNFIT.values(), ids=UNFIT)
def test_scales_that_do_not_fit_are_refused_before_a_weight_is_changed(
    scale: Tensor, config: Any, message: str, tmp_path: Path
) -> None:
    codes = torch.full((D, D), 448.0).to(FP8)
    have = entries(shared_experts__up_proj=codes) | {f"{UP}_scale_inv": scale}
    if config is not None and "quant_method" not in config:
        config = {"quant_method": "fp8", **config}
    store(tmp_path, have, config)
    layer = layer_of()
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        load(tmp_path, layer)
    assert "config" in message or f"{UP}_scale_inv" in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())


def test_a_layer_without_a_prefix_refuses_too(tmp_path: Path) -> None:
    store(tmp_path, {"gate.weight": torch.full((E, D), 448.0).to(FP8)})
    with pytest.raises(ValueError, match=r"^gate\.weight in .* is torch\.float8_e4m3fn, codes"):
        load_checkpoint({"": layer_of()}, tmp_path, style="deepseek", progress=False)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
@pytest.mark.parametrize(("name", "shape"), OUTSIDE.items())
def test_float8_outside_the_experts_is_refused_before_a_weight_is_changed(
    name: str, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    store(tmp_path, entries(**{name: torch.full(shape, 448.0).to(dtype)}))
    layer = layer_of()
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    entry = f"{PREFIX}.{name.replace('__', '.')}.weight"
    with pytest.raises(
        ValueError,
        match=rf"^{entry} in .*/model\.safetensors is {dtype}, codes without a scale, "
        rf"which {entry}_scale_inv or {entry}_scale would be; give all files",
    ):
        load(tmp_path, layer)
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())


def test_float8_goes_into_float8_and_floats_into_floats(tmp_path: Path) -> None:
    codes = torch.full((D, D), 448.0).to(FP8)
    store(tmp_path / "codes", entries(shared_experts__up_proj=codes))
    layer = layer_of(FP8)
    assert load(tmp_path / "codes", layer).complete
    assert torch.equal(layer.shared_experts.up_proj.weight.float(), codes.float())
    weight = torch.randn(D, D)
    store(tmp_path / "half", entries(shared_experts__up_proj=weight.bfloat16()))
    layer = layer_of()
    assert load(tmp_path / "half", layer).complete
    assert torch.equal(layer.shared_experts.up_proj.weight, weight.bfloat16().float())


def test_float8_that_no_layer_takes_is_no_concern(tmp_path: Path) -> None:
    codes = torch.full((D, D), 448.0).to(FP8)
    store(tmp_path, entries(other=codes) | {"model.layers.1.mlp.gate.weight": codes.clone()})
    assert load(tmp_path, layer_of()).unexpected == (f"{PREFIX}.other.weight",)
