"""Weights of bitsandbytes, written by the definition of its blocks and read as they decode."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.elements.nf4 import NF4
from moe_ops.quant.formats import Format
from moe_ops.quant.packing import dequantize
from moe_ops.weights import load_checkpoint
from moe_ops.weights.bitsandbytes import decoders
from tests.peak import Peak
from tests.weights.checkpoints import PREFIX, PROJECTIONS, E, I, store

D = 72  # blocks of 64 go across rows
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SPLITS = {
    "one": [ParallelConfig()],
    "tp2": [ParallelConfig.of(tp=2, tp_rank=r) for r in range(2)],
    "ep3": [ParallelConfig.of(tp=3, tp_rank=r, expert_parallel=True) for r in range(3)],
}


def matrix(g: torch.Generator, rows: int, columns: int, nested: bool, kind: str = "nf4") -> Any:
    """Entries by suffix, and the weight that they stand for, value by value."""
    n = rows * columns
    blocks = -(-n // 64)
    q = torch.randint(0, 16, (n,), generator=g)
    table = torch.randn(16, generator=g)
    state = {
        "quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]
    }  # fmt: skip
    absmax = torch.rand(blocks, generator=g) + 0.1
    entries = {"weight": ((q[0::2] << 4) | q[1::2]).to(torch.uint8)[:, None]}
    if nested:
        codes = torch.randint(0, 256, (blocks,), generator=g)
        second, scale = torch.randn(256, generator=g), torch.rand(-(-blocks // 256), generator=g)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
        absmax = torch.stack([second[c] * scale[i // 256] + 0.25 for i, c in enumerate(codes)])
        entries["weight.absmax"] = codes.to(torch.uint8)
        entries["weight.nested_absmax"], entries["weight.nested_quant_map"] = scale, second
    else:
        entries["weight.absmax"] = absmax
    entries["weight.quant_map"] = table
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    entries[f"weight.quant_state.bitsandbytes__{kind}"] = told
    value = table[q] * absmax[torch.arange(n) // 64]
    return entries, value.bfloat16().view(rows, columns)


def write(folder: Path, nested: bool) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def made(shard: str, e: int) -> tuple[dict[str, Tensor], Tensor]:
        sizes = (D, I) if shard == "w2" else (I, D)
        return matrix(g, *sizes, nested, "fp4" if e else "nf4")

    return write_layer(folder, made)


def write_layer(
    folder: Path, made: Callable[[str, int], tuple[dict[str, Tensor], Tensor]]
) -> dict[str, Tensor]:
    """A layer of matrices that are made for each shard and expert, and what these stand for."""
    entries, values = {}, {}
    for shard, projection in PROJECTIONS.items():
        of_experts = [made(shard, e) for e in range(E)]
        values[shard] = torch.stack([value for _, value in of_experts])
        for e, (parts, _) in enumerate(of_experts):
            for suffix, t in parts.items():
                entries[f"{PREFIX}.experts.{e}.{projection}.{suffix}"] = t
    store(folder, entries, CONFIG)
    return values


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("nested", [False, True], ids=["absmax", "nested"])
def test_layers_hold_what_is_decoded(nested: bool, split: str, tmp_path: Path) -> None:
    v = write(tmp_path, nested)
    for config in SPLITS[split]:
        layer = MoELayer(E, 2, D, I, dtype=torch.float32, parallel=config)
        report = load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
        assert report.complete and len(report.loaded) + len(report.elsewhere) == 3 * E
        s = layer.sizes
        ids = [layer.placement.ids_of(config.ep_rank)[i] for i in range(s.E)]
        cut = slice(s.first, s.first + s.used)
        gate, up = layer.w13_weight.chunk(2, 1)
        assert torch.equal(gate, v["w1"][ids][:, cut].float())
        assert torch.equal(up, v["w3"][ids][:, cut].float())
        assert torch.equal(layer.w2_weight, v["w2"][ids][:, :, cut].float())


def test_one_weight_is_decoded_at_a_time(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    size, entries = 512, {}
    for e in range(E):
        for projection in PROJECTIONS.values():
            made, _ = matrix(g, size, size, nested=False)
            for suffix, t in made.items():
                entries[f"{PREFIX}.experts.{e}.{projection}.{suffix}"] = t
    store(tmp_path, entries, CONFIG)
    layer = MoELayer(E, 2, size, size, dtype=torch.bfloat16)
    gc.collect()
    with Peak() as peak:
        load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
    assert peak.most <= 2 * layer.w2_weight[0].nbytes


def test_a_part_that_was_saved_by_its_rank_is_taken_whole(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    entries, value = matrix(g, I // 2, D, nested=False)
    store(tmp_path, {f"{PREFIX}.experts.0.up_proj.{n}": t for n, t in entries.items()}, CONFIG)
    config = ParallelConfig.of(tp=2, tp_rank=1)
    layer = MoELayer(E, 2, D, I, dtype=torch.float32, parallel=config)
    load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", sharded=True, progress=False)
    assert torch.equal(layer.w13_weight[0, I // 2 :], value.float())
    with pytest.raises(ValueError, match=r"up_proj.weight: expected the shape \[64, 72\], found"):
        load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)


@pytest.mark.parametrize("nested", [False, True], ids=["absmax", "nested"])
def test_bitsandbytes_decodes_alike(nested: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for kind in ("nf4", "fp4"):
        w = torch.randn(48, D, generator=torch.Generator().manual_seed(1)).bfloat16()
        packed, state = functional.quantize_4bit(
            w, blocksize=64, quant_type=kind, compress_statistics=nested
        )
        entries = {f"weight.{n}": t for n, t in state.as_dict(packed=True).items()}
        entries["weight"] = packed
        found, used = decoders(set(entries), entries.__getitem__)
        assert used | {"weight"} == entries.keys()
        want = functional.dequantize_4bit(packed, state)
        torch.testing.assert_close(found["weight"](), want, rtol=2**-7, atol=0)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    entries, _ = matrix(g, I, D, nested=False)
    name = f"{PREFIX}.experts.0.up_proj"
    layer = MoELayer(E, 2, D, I, dtype=torch.float32)

    def load(parts: dict[str, Tensor], into: MoELayer = layer) -> None:
        store(tmp_path, {f"{name}.{n}": t for n, t in parts.items()}, CONFIG)
        load_checkpoint({PREFIX: into}, tmp_path, style="qwen", progress=False)

    with pytest.raises(
        ValueError, match="absmax is of bitsandbytes, of which weights of 4 bits ar"
    ):
        load({n: t for n, t in entries.items() if "quant_state" not in n and n != "weight"})
    with pytest.raises(ValueError, match="SCB is of bitsandbytes"):
        load({"SCB": torch.ones(I)})
    short = entries | {"weight.absmax": torch.ones(3)}
    with pytest.raises(
        ValueError, match=r"up_proj.weight: 2304 torch.uint8 codes and scales \[3\] are"
    ):
        load(short)
    quant = QuantConfig(weights="int8:row")
    with pytest.raises(TypeError, match="is bfloat16, but the layer's tensor is int8"):
        load(entries, MoELayer(E, 2, D, I, quant=quant, dtype=torch.float32))


STATES: dict[str, tuple[Any, str]] = {
    "no_json": (b"{", "its quant_state is no JSON"),
    "list": ([], "its quant_state must be an object of names and values"),
    "deep": (b"[" * 100_000, "its quant_state is no JSON"),
    "no_shape": ({"shape": None}, "the shape of its quant_state must be sizes of axes, got None"),
    "size": ({"shape": [I, -D]}, "each size of its shape must be an integer above 0, got -72"),
    "huge": ({"shape": [2**30, 2**30]}, r"are not those of \[1073741824, 1073741824\]"),
    "block": ({"blocksize": 0}, "blocksize must be an integer above 0, got 0"),
    "odd": ({"blocksize": 63}, "blocksize must be even"),
    "dtype": ({"dtype": "int8"}, "the dtype of its quant_state must be in"),
    "nested": ({"nested_blocksize": "256"}, "nested_blocksize must be an integer above 0"),
    "offset": ({"nested_offset": float("nan")}, "nested_offset of its quant_state must be a numb"),
}


@pytest.mark.parametrize(("change", "message"), STATES.values(), ids=STATES)
def test_a_state_that_is_wrong(change: Any, message: str, tmp_path: Path) -> None:
    entries, _ = matrix(torch.Generator().manual_seed(0), I, D, nested=True)
    key = "weight.quant_state.bitsandbytes__nf4"
    told = json.loads(bytes(entries[key].tolist()))
    raw = change if isinstance(change, bytes) else json.dumps(
        told | change if isinstance(change, dict) else change
    ).encode()  # fmt: skip
    entries[key] = torch.tensor(list(raw), dtype=torch.uint8)
    check_spoiled(entries, message, tmp_path)


PARTS: dict[str, tuple[dict[str, Tensor], str]] = {
    "table": ({"weight.quant_map": torch.ones(15)}, r"quant_map is \[15\] .* has to be 16 floats"),
    "nested_table": ({"weight.nested_quant_map": torch.ones(9)}, r"nested_quant_map is \[9\]"),
    "nested_scales": (
        {"weight.nested_absmax": torch.ones(9)},
        r"nested_absmax is \[9\]",
    ),
    "axis": ({"weight.absmax": torch.ones(72, 1).byte()}, r"scales \[72, 1\] are not those"),
    "absmax": ({"weight.absmax": torch.ones(72)}, "absmax is torch.float32, but scales of scales"),
    "codes": ({"weight": torch.ones(2304, 1)}, r"2304 torch.float32 codes .* store 4-bit codes as"),
}


@pytest.mark.parametrize(("change", "message"), PARTS.values(), ids=PARTS)
def test_a_part_that_is_wrong(change: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    entries, _ = matrix(torch.Generator().manual_seed(0), I, D, nested=True)
    check_spoiled(entries | change, message, tmp_path)


def check_spoiled(entries: dict[str, Tensor], message: str, folder: Path) -> None:
    """The weight of up is refused by name and file, and gate, which is right, is not written."""
    good, _ = matrix(torch.Generator().manual_seed(0), I, D, nested=True)
    start, projections = f"{PREFIX}.experts.0", {"gate_proj": good, "up_proj": entries}
    store(
        folder,
        {f"{start}.{p}.{n}": t.clone() for p, of in projections.items() for n, t in of.items()},
        CONFIG,
    )
    layer = MoELayer(E, 2, D, I, dtype=torch.float32)
    before = layer.w13_weight.clone()
    where = rf"^{start}\.up_proj\.weight: "
    with pytest.raises((ValueError, TypeError), match=f"{where}.*{message}") as error:
        load_checkpoint({PREFIX: layer}, folder, style="qwen", progress=False)
    assert str(folder) in str(error.value)
    assert torch.equal(layer.w13_weight, before)


def test_shared_experts_in_slots_are_decoded_and_taken_apart(tmp_path: Path) -> None:
    write(tmp_path, nested=True)
    g = torch.Generator().manual_seed(5)
    entries, values = load_file(tmp_path / "model.safetensors"), {}
    for shard, projection in PROJECTIONS.items():
        made, value = matrix(g, *((D, 2 * I) if shard == "w2" else (2 * I, D)), nested=True)
        values[shard] = value.float().chunk(2, 1 if shard == "w2" else 0)
        for suffix, t in made.items():
            entries[f"{PREFIX}.shared_experts.{projection}.{suffix}"] = t
    store(tmp_path, entries, CONFIG)
    layer = MoELayer(E, 2, D, I, dtype=torch.float32, shared_experts=2)
    report = load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
    assert report.complete, str(report)
    for s in range(2):
        want = torch.cat((values["w1"][s], values["w3"][s]))
        assert torch.equal(layer.w13_weight[E + s], want)
        assert torch.equal(layer.w2_weight[E + s], values["w2"][s])


def nf4_matrix(g: torch.Generator, rows: int, columns: int, nested: bool) -> Any:
    """Entries whose table is that of NF4, and the value of each code in float32."""
    entries, _ = matrix(g, rows, columns, nested)
    entries["weight.quant_map"] = torch.tensor(NF4.table)
    q = torch.stack((entries["weight"][:, 0] >> 4, entries["weight"][:, 0] & 15), 1).flatten()
    absmax = entries["weight.absmax"]
    if nested:
        scale = entries["weight.nested_absmax"].repeat_interleave(256)[: len(absmax)]
        entries["weight.nested_quant_map"] = entries["weight.nested_quant_map"].abs()
        absmax = entries["weight.nested_quant_map"][absmax.int()] * scale + 0.25
    value = entries["weight.quant_map"][q.int()] * absmax.repeat_interleave(64)
    return entries, value.view(rows, columns)


WIDE = {"w1": (128, 64), "w2": (64, 128), "w3": (128, 64)}


def write_nf4(folder: Path, nested: bool) -> dict[str, Tensor]:
    """A layer of the sizes of WIDE, and what its weights stand for in float32."""
    g = torch.Generator().manual_seed(0)
    return write_layer(folder, lambda shard, _: nf4_matrix(g, *WIDE[shard], nested))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("nested", [False, True], ids=["absmax", "nested"])
def test_layers_in_nf4_hold_its_codes(nested: bool, split: str, tmp_path: Path) -> None:
    v = write_nf4(tmp_path, nested)
    for config in SPLITS[split]:
        layer = MoELayer(E, 2, 64, 128, quant=QuantConfig(weights="nf4"), parallel=config)
        report = load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
        assert report.complete, str(report)
        s = layer.sizes
        ids = [layer.placement.ids_of(config.ep_rank)[i] for i in range(s.E)]
        cut, format = slice(s.first, s.first + s.used), Format.of("nf4")
        gate, up = dequantize(layer.w13_weight, layer.w13_scale, format).chunk(2, 1)
        assert torch.equal(gate, v["w1"][ids][:, cut])
        assert torch.equal(up, v["w3"][ids][:, cut])
        w2 = dequantize(layer.w2_weight, layer.w2_scale, format)
        assert torch.equal(w2, v["w2"][ids][:, :, cut])


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    write_nf4(tmp_path, nested=False)
    entries = load_file(tmp_path / "model.safetensors")
    entries[f"{PREFIX}.experts.1.up_proj.weight.absmax"][5] = float("nan")
    store(tmp_path, entries, CONFIG)
    layer = MoELayer(E, 2, 64, 128, quant=QuantConfig(weights="nf4"))
    before = layer.w13_weight.clone()
    with pytest.raises(ValueError, match=r"1.up_proj.weight: its absmax holds nan, but a scale is"):
        load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
    assert torch.equal(layer.w13_weight, before)


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_nf4(tmp_path, nested=True)
    layer = MoELayer(E, 2, 64, 128, quant=QuantConfig(weights="int4:1x64"))
    said = r"bitsandbytes NF4 holds nf4, but the layer has int4:1x64; give the layer that \(in "
    with pytest.raises(ValueError, match=said):
        load_checkpoint({PREFIX: layer}, tmp_path, style="qwen", progress=False)
