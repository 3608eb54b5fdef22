"""GGUF files of K quants without the package gguf: layers hold their blocks, or what they stand for
to the bit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant import packing
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import F32, TOL, assert_close
from moe_ops.weights import gguf_formats, load_checkpoint
from tests.quant.blocks import HALVES, SIZES, any_ggml, specified
from tests.weights.gguf_writer import Written, of_floats, write_gguf

E, D, I = 2, 256, 512  # noqa: E741
PREFIX = "blk.1"
SHAPES = {"ffn_gate_exps": (E, I, D), "ffn_up_exps": (E, I, D), "ffn_down_exps": (E, D, I)}
KINDS = ("Q4_K", "Q5_K", "Q6_K")


@pytest.fixture(autouse=True)
def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)


def blocks(kind: str, name: str) -> np.ndarray:
    experts, rows, columns = SHAPES[name]
    return any_ggml(kind, experts * rows, columns, seed=list(SHAPES).index(name))


def write(file: Path, kinds: dict[str, str]) -> dict[str, Tensor]:
    """A file, and what its tensors stand for by name."""
    router = np.random.default_rng(9).standard_normal((E, D)).astype(np.float32)
    tensors = {f"{PREFIX}.ffn_gate_inp.weight": of_floats(router)}
    found = {"ffn_gate_inp": torch.from_numpy(router)}
    for name, kind in kinds.items():
        raw = blocks(kind, name)
        tensors[f"{PREFIX}.{name}.weight"] = Written(kind, SHAPES[name], raw.tobytes())
        found[name] = specified(raw, kind).reshape(SHAPES[name])
    write_gguf(file, tensors)
    return found


def layer_of(quant: QuantConfig | None, **more: Any) -> MoELayer:
    return MoELayer(
        E, 2, D, I, quant=quant, dtype=F32, routing=Routing(), internal_gate=True, **more
    )


def load(layer: MoELayer, file: Path) -> None:
    report = load_checkpoint({PREFIX: layer}, file, style="gguf", progress=False)
    assert report.complete, str(report)


def held(layer: MoELayer, w: str) -> Tensor:
    assert layer.quant is not None
    values, scale = (getattr(layer, f"{w}_{what}") for what in ("weight", "scale"))
    assert torch.equal(scale, torch.ones_like(scale))
    return packing.dequantize(values, scale, layer.quant.format)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_holds_the_blocks_of_a_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    want = write(file, dict.fromkeys(SHAPES, kind))
    quant = gguf_formats(file)[PREFIX]
    assert quant == QuantConfig(weights=kind.lower())
    layer = layer_of(quant)
    load(layer, file)
    assert layer.w13_weight.nbytes == 2 * E * I * D // 256 * SIZES[kind]
    both = torch.cat((want["ffn_gate_exps"], want["ffn_up_exps"]), 1)
    assert torch.equal(held(layer, "w13"), both)
    assert torch.equal(held(layer, "w2"), want["ffn_down_exps"])
    floats = layer_of(None)
    load(floats, file)
    assert torch.equal(floats.w13_weight, both)
    if kind == "Q4_K":  # whose kernel other tests need, too
        x = torch.randn(3, D)
        with torch.no_grad():
            assert_close(layer(x), floats(x), TOL["experts", F32], kind)


def test_ranks_hold_whole_blocks(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    want = write(file, dict.fromkeys(SHAPES, "Q5_K"))
    quant = gguf_formats(file)[PREFIX]
    for rank in range(2):
        layer = layer_of(quant, parallel=ParallelConfig.of(tp=2, tp_rank=rank))
        load(layer, file)
        cut = slice(rank * I // 2, (rank + 1) * I // 2)
        assert torch.equal(held(layer, "w2"), want["ffn_down_exps"][..., cut])
        assert torch.equal(held(layer, "w13")[:, : I // 2], want["ffn_gate_exps"][:, cut])
        expert = layer_of(
            quant, parallel=ParallelConfig.of(tp=2, tp_rank=rank, expert_parallel=True)
        )
        load(expert, file)
        assert torch.equal(held(expert, "w2"), want["ffn_down_exps"][rank : rank + 1])
    with pytest.raises(ValueError, match=r"w2 has 128 columns, but q5_k is packed in 256s; pad"):
        layer_of(quant, parallel=ParallelConfig.of(tp=4, tp_rank=1))


def test_experts_of_several_types_are_decoded(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    want = write(file, dict(zip(SHAPES, KINDS, strict=True)))
    assert gguf_formats(file) == {PREFIX: None}
    layer = layer_of(None)
    load(layer, file)
    assert torch.equal(layer.w2_weight, want["ffn_down_exps"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_no_number_is_refused_before_a_weight_is_changed(
    kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write(file, dict.fromkeys(SHAPES, kind))
    layer = layer_of(gguf_formats(file)[PREFIX])
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    last = len(file.read_bytes()) - SIZES[kind] + HALVES[kind][0]
    spoiled = bytearray(file.read_bytes())
    spoiled[last : last + 2] = np.float16(np.inf).tobytes()
    file.write_bytes(spoiled)
    with pytest.raises(ValueError, match=r"ffn_down_exps\.weight: holds inf, but a scale is above"):
        load(layer, file)
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())


def test_what_comes_twice_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    want = write(file, dict.fromkeys(SHAPES, "Q4_K"))
    again = tmp_path / "again.gguf"
    name = f"{PREFIX}.ffn_down_exps.weight"
    raw = any_ggml("Q4_K", E * D, I, seed=9)
    write_gguf(again, {name: Written("Q4_K", SHAPES["ffn_down_exps"], raw.tobytes())})
    layer = layer_of(gguf_formats(file)[PREFIX])
    report = load_checkpoint({PREFIX: layer}, [file, again], style="gguf", progress=False)
    assert not report.complete and list(report.twice) == [name]
    assert torch.equal(held(layer, "w2"), want["ffn_down_exps"])


def test_a_layer_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, dict.fromkeys(SHAPES, "Q4_K"))
    with pytest.raises(ValueError, match=r"GGUF Q4_K holds q4_k, but the layer has q6_k; give the"):
        load(layer_of(QuantConfig(weights="q6_k")), file)


def test_the_package_is_asked_for_where_it_alone_decodes(tmp_path: Path) -> None:
    file, size = tmp_path / "model.gguf", E * I * D // 32 * 22
    write_gguf(file, {f"{PREFIX}.ffn_up_exps.weight": Written("Q5_0", (E, I, D), bytes(size))})
    assert gguf_formats(file) == {PREFIX: None}
    with pytest.raises(ImportError, match=r"decoding Q5_0 needs the package gguf; .*ops\[gguf\]'"):
        load_checkpoint({PREFIX: layer_of(None)}, file, style="gguf", progress=False)


def test_a_layer_is_loaded_beside_others_that_want_the_package(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    want = write(file, dict.fromkeys(SHAPES, "Q4_K"))
    other = tmp_path / "others.gguf"
    size = E * I * D // 32 * 22
    write_gguf(other, {"blk.0.ffn_up_exps.weight": Written("Q5_0", (E, I, D), bytes(size))})
    assert gguf_formats(tmp_path) == {PREFIX: QuantConfig(weights="q4_k"), "blk.0": None}
    layer = layer_of(QuantConfig(weights="q4_k"))
    load(layer, tmp_path)
    assert torch.equal(held(layer, "w2"), want["ffn_down_exps"])
