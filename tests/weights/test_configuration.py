"""The JSON files of a checkpoint: each fault is refused, with the file and what in it is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ops.layer import MoELayer
from moe_ops.weights import load_checkpoint
from tests.weights.checkpoints import PREFIX, store

E, D, I = 2, 16, 8  # noqa: E741
INDEX = "model.safetensors.index.json"
GROUPS = "config_groups"
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}

INDICES: dict[str, tuple[Any, str]] = {
    "no_weight_map": ({}, "weight_map must be an object of names and values, got None"),
    "list": ([], "the file must be an object"),
    "list_of_files": ({"weight_map": ["a"]}, r"weight_map must be an object .* got \['a'\]"),
    "empty": ({"weight_map": {}}, "weight_map is empty"),
    "number": ({"weight_map": {"a": 3}}, "a: must name a file, got 3"),
    "missing": ({"weight_map": {"a": "b.safetensors"}}, "a: names the file 'b.safetensors', whi"),
    "above": ({"weight_map": {"a": "../x/model.safetensors"}}, "not inside the checkpoint's"),
    "above_later": ({"weight_map": {"a": "x/../../y.safetensors"}}, "not inside the checkpoint's"),
    "absolute": ({"weight_map": {"a": "/etc/x.safetensors"}}, "not inside the checkpoint's"),
    "drive": ({"weight_map": {"a": "C:\\x.safetensors"}}, "not inside the checkpoint's"),
    "above_elsewhere": ({"weight_map": {"a": "..\\x.safetensors"}}, "not inside the checkpoint's"),
    "zero_byte": ({"weight_map": {"a": "a\0.safetensors"}}, "not inside the checkpoint's"),
    "long": ({"weight_map": {"a": "a" * 9999 + ".safetensors"}}, "which does not exist"),
}
CONFIGS: dict[str, tuple[Any, str]] = {
    "list": ([1], r"the file must be an object of names and values, got \[1\]"),
    "quantisation_list": ({"quantization_config": [1]}, "quantization_config must be an object"),
    "method": ({"quantization_config": {"quant_method": 4}}, "quant_method must be a name, got 4"),
    "bits_text": ({"quantization_config": {"quant_method": "gptq", "bits": "4"}}, "bits must be a"),
    "bits_flag": ({"quantization_config": {"quant_method": "gptq", "bits": True}}, "bits must be"),
    "bits_3": ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "bits must be 4 or 8"),
    "version": ({"quantization_config": {"quant_method": "awq", "version": 3}}, "version must be"),
    "groups": ({"quantization_config": {**PACKED, GROUPS: [3]}}, "config_groups must be an object"),
    "group": ({"quantization_config": {**PACKED, GROUPS: {"a": 3}}}, r"config_groups\.a must be"),
    "no_weights": ({"quantization_config": {**PACKED, GROUPS: {"a": {}}}}, "weights must be an ob"),
}


def check_refused(folder: Path, name: str, message: str) -> None:
    layer = MoELayer(E, 1, D, I)
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=message) as error:
        load_checkpoint({PREFIX: layer}, folder, style="qwen", progress=False)
    assert str(folder / name) in str(error.value)
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder beside which there is another checkpoint."""
    for name in ("here", "x"):
        store(tmp_path / name, {f"{PREFIX}.experts.0.up_proj.weight": torch.randn(I, D)})
    return tmp_path / "here"


@pytest.mark.parametrize(("found", "message"), INDICES.values(), ids=INDICES)
def test_an_index_that_is_wrong(found: Any, message: str, folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps(found))
    check_refused(folder, INDEX, message)


@pytest.mark.parametrize(("found", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_that_is_wrong(found: Any, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(found))
    check_refused(folder, "config.json", message)


def test_modelopt_says_it_in_a_file_of_its_own(folder: Path) -> None:
    (folder / "hf_quant_config.json").write_text("[]")
    check_refused(folder, "hf_quant_config.json", "the file must be an object")


@pytest.mark.parametrize("name", [INDEX, "config.json"])
@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff\xfe", b""], ids=["deep", "bytes", "empty"])
def test_what_is_no_json(name: str, text: bytes, folder: Path) -> None:
    (folder / name).write_bytes(text)
    check_refused(folder, name, r"is no JSON \(")


def test_links_and_folders_inside_are_followed(folder: Path) -> None:
    (folder / "parts").mkdir()
    (folder / "parts" / "a.safetensors").symlink_to(folder.parent / "x" / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "parts/a.safetensors"}}))
    layer = MoELayer(E, 1, D, I)
    report = load_checkpoint({PREFIX: layer}, folder, style="qwen", progress=False)
    assert report.loaded == (f"{PREFIX}.experts.0.up_proj.weight",)
