"""Codes outside the experts: float8 shared experts and gates are refused, floats are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PREFIX, store
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.weights import load_checkpoint

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
        match=rf"^{entry} in .*/model\.safetensors is {dtype}, codes .* dequantise it in the check",
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
