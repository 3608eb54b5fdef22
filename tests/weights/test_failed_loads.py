"""A load that fails leaves layers as they were, wherever in the checkpoint the fault is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_ops import experts
from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.quant.config import QuantConfig
from moe_ops.registry.layouts import Layout
from moe_ops.weights import load_checkpoint
from tests.chosen import in_turn
from tests.weights.checkpoints import LAYOUTS, PREFIX, D, E, I, store, write

FAULTS = {
    "shape": lambda t: torch.cat((t.reshape(-1), t.reshape(-1))),
    "dtype": lambda t: t.to(torch.complex64) if t.is_floating_point() else t.bool(),
}


def state(layer: MoELayer) -> dict[str, bytes]:
    return {
        n: bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        for n, t in layer.state_dict().items()
    }


def layer_of(name: str, **more: Any) -> MoELayer:
    layout = LAYOUTS[name]
    quant = QuantConfig(weights=layout.weights, inputs=layout.inputs, static_inputs=layout.static)
    return MoELayer(
        E, 2, D, I, quant=quant, dtype=torch.float32, internal_gate=True,
        routing=Routing(score="sigmoid", correction_bias=True), **more,
    )  # fmt: skip


def others() -> dict[str, Tensor]:
    return {
        f"{PREFIX}.gate.weight": torch.randn(E, D),
        f"{PREFIX}.gate.e_score_correction_bias": torch.randn(E),
    }


def check_fails(layers: dict[str, MoELayer], folder: Path, entry: str, file: Path) -> None:
    before = {prefix: state(layer) for prefix, layer in layers.items()}
    with pytest.raises((ValueError, TypeError)) as error:
        load_checkpoint(layers, folder, style="deepseek", progress=False)
    assert str(error.value).startswith(entry) and str(file) in str(error.value)
    assert {prefix: state(layer) for prefix, layer in layers.items()} == before


@in_turn(pytest.mark.parametrize("fault", FAULTS), pytest.mark.parametrize("name", LAYOUTS))
def test_a_fault_in_the_last_entry_of_the_last_file(name: str, fault: str, tmp_path: Path) -> None:
    """Each kind of entry of an expert in turn; the rest, and another layer, stand before it."""
    made = write(tmp_path, LAYOUTS[name]).entries
    whole, last = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    (tmp_path / "model.safetensors").unlink()
    of_other = {n.replace("layers.0", "layers.1"): t.clone() for n, t in made.items()}
    start = f"{PREFIX}.experts.{E - 1}.down_proj."
    kinds = [n for n in made if n.startswith(start) and not n.endswith("input_scale")]
    for entry in kinds:
        rest = {n: t for n, t in made.items() if n != entry}
        save_file(rest | of_other | others(), whole)
        save_file({entry: FAULTS[fault](made[entry])}, last)
        layers = {PREFIX: layer_of(name), PREFIX.replace("0", "1"): layer_of(name)}
        check_fails(layers, tmp_path, entry, last)
    save_file({kinds[-1]: made[kinds[-1]]}, last)
    assert not load_checkpoint(layers, tmp_path, style="deepseek", progress=False).unexpected
    assert state(layers[PREFIX]) != state(layer_of(name))


def test_a_fault_outside_the_experts(tmp_path: Path) -> None:
    made = write(tmp_path, LAYOUTS["gptq_int4"]).entries
    for entry in others():
        for fault in FAULTS.values():
            store(tmp_path, made | others() | {entry: fault(others()[entry])})
            check_fails(
                {PREFIX: layer_of("gptq_int4")}, tmp_path, entry, tmp_path / "model.safetensors"
            )


def test_a_prepared_layer_is_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flip(t: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: x.flip(1) for n, x in t.items() if n == "w13_EFD"}

    monkeypatch.setitem(experts.layouts, "flip", Layout(name="flip", prepare=flip, restore=flip))
    made = write(tmp_path, LAYOUTS["fp8_blocks"]).entries
    layer = layer_of("fp8_blocks")
    load_checkpoint({PREFIX: layer}, tmp_path, style="deepseek", progress=False)
    layer.prepare_weights("flip")
    entry = f"{PREFIX}.experts.0.up_proj.weight"
    made[entry] = made[entry][:-1]
    store(tmp_path, made)
    check_fails({PREFIX: layer}, tmp_path, entry, tmp_path / "model.safetensors")
    assert layer.layout == "flip"


def test_a_tensor_of_a_dtype_that_torch_lacks(tmp_path: Path) -> None:
    """Of a header of bytes that no writer for torch makes."""
    write(tmp_path, LAYOUTS["fp8_blocks"])
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    at = raw.index(b'"dtype":"F8_E4M3"')
    file.write_bytes(raw[:at] + b'"dtype":"F8_E8M7"' + raw[at + 17 :])
    layer = layer_of("fp8_blocks")
    before = state(layer)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        load_checkpoint({PREFIX: layer}, tmp_path, style="deepseek", progress=False)
    assert state(layer) == before
