"""Headers of GGUF files that lie, or that few programs write: refused with what to do, or read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.testing import F32
from moe_ops.weights import gguf_formats, load_checkpoint
from tests.weights.gguf_writer import Written, of_floats, write_gguf

E, D, I = 2, 8, 4  # noqa: E741
PREFIX = "blk.1"
SHAPES = {
    "ffn_gate_inp": (E, D), "ffn_gate_exps": (E, I, D), "ffn_up_exps": (E, I, D),
    "ffn_down_exps": (E, D, I),
}  # fmt: skip
GATE, DOWN = f"{PREFIX}.ffn_gate_inp.weight", f"{PREFIX}.ffn_down_exps.weight"


@pytest.fixture(autouse=True)
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)


def floats(dtype: type = np.float32) -> dict[str, np.ndarray]:
    g = np.random.default_rng(0)
    return {
        f"{PREFIX}.{name}.weight": g.standard_normal(shape).astype(dtype)
        for name, shape in SHAPES.items()
    }


def written(dtype: type = np.float32) -> dict[str, Written]:
    return {name: of_floats(t) for name, t in floats(dtype).items()}


def layer() -> MoELayer:
    return MoELayer(E, 2, D, I, dtype=F32, routing=Routing(), internal_gate=True)


def load(into: MoELayer, file: Path) -> None:
    report = load_checkpoint({PREFIX: into}, file, style="gguf", progress=False)
    assert report.complete, str(report)


@pytest.mark.parametrize("alignment", [1, 2, 64])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_tensors_may_begin_at_any_byte(dtype: type, alignment: int, tmp_path: Path) -> None:
    file, found = tmp_path / "model.gguf", layer()
    odd = {"a": Written("I8", (3,), b"abc")}
    write_gguf(file, odd | written(dtype), alignment=alignment)
    load(found, file)
    want = floats(dtype)
    assert torch.equal(found.w2_weight, torch.from_numpy(want[DOWN]).float())
    assert torch.equal(found.gate.weight, torch.from_numpy(want[GATE]).float())


LIES = {
    "inside": ({}, {DOWN: 32}, r"ffn_\w+\.weight: begins at byte \d+, inside .*, which has 64"),
    "together": ({}, {DOWN: 0}, r"ffn_\w+\.weight: begins at byte (\d+), inside .*byte \1 on"),
    "no_values": ({GATE: Written("F32", (0, 2**63), b"")}, {}, r"inp.weight: .* more than 2\^63"),
    "no_rows": ({DOWN: Written("F32", (2**40, 2**40, 0), b"")}, {}, r"exps.weight: .* than 2\^63"),
}  # fmt: skip


@pytest.mark.parametrize(("tensors", "offsets", "why"), LIES.values(), ids=LIES)
def test_places_and_sizes_that_no_file_has(
    tensors: dict[str, Written], offsets: dict[str, int], why: str, tmp_path: Path
) -> None:
    file, found = tmp_path / "model.gguf", layer()
    write_gguf(file, written() | tensors, offsets=offsets)
    before = found.w13_weight.clone()
    with pytest.raises(ValueError, match=rf"model\.gguf cannot be read as GGUF \(.*{why}"):
        load(found, file)
    assert torch.equal(found.w13_weight, before)


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (b"\0\0\0\3", r"is big-endian; convert it to little-endian"),
        (b"\1\0\0\0", r"has the version 1, but 2 and 3 are read"),
    ],
    ids=["big_endian", "first"],
)
def test_a_version_that_is_not_read(version: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, written())
    raw = file.read_bytes()
    file.write_bytes(raw[:4] + version + raw[8:])
    with pytest.raises(ValueError, match=rf"model\.gguf cannot be read as GGUF \({why}"):
        gguf_formats(file)


def test_the_second_version_is_read(tmp_path: Path) -> None:
    file, found = tmp_path / "model.gguf", layer()
    write_gguf(file, written())
    raw = file.read_bytes()
    file.write_bytes(raw[:4] + b"\2\0\0\0" + raw[8:])
    load(found, file)
    assert torch.equal(found.w2_weight, torch.from_numpy(floats()[DOWN]))


def test_values_of_keys_may_be_no_text(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, written())
    file.write_bytes(file.read_bytes().replace(b"qwen3moe", b"qwen\xff\xfe\xfd\xfc"))
    assert gguf_formats(file) == {PREFIX: None}


@pytest.mark.parametrize(("kind", "name"), [("I8", DOWN), ("F64", GATE)])
def test_what_nobody_decodes_is_no_matter_of_a_package(
    kind: str, name: str, tmp_path: Path
) -> None:
    file, right = tmp_path / "model.gguf", floats()[name]
    raw = right.astype({"I8": np.int8, "F64": np.float64}[kind]).tobytes()
    write_gguf(file, written() | {name: Written(kind, right.shape, raw)})
    with pytest.raises(ValueError, match=rf"{kind} is no type of weights; convert the .*{name}"):
        load(layer(), file)


def test_formats_of_a_folder_are_those_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no GGUF files in .*; give a folder with some"):
        gguf_formats(tmp_path)
    for layer in range(2):
        names = {name.replace(PREFIX, f"blk.{layer}"): t for name, t in written().items()}
        write_gguf(tmp_path / f"model-0000{layer + 1}-of-00002.gguf", names)
    assert gguf_formats(tmp_path) == gguf_formats(str(tmp_path)) == {"blk.0": None, "blk.1": None}
