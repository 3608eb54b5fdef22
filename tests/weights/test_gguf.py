"""GGUF files: layers hold what the package gguf decodes, in a format where one is exact."""

from __future__ import annotations

import gc
import logging
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
from moe_ops.weights import gguf_formats, load_checkpoint
from tests.peak import Peak

gguf = pytest.importorskip("gguf")

E, D, I = 3, 64, 128  # noqa: E741
PREFIX = "blk.1"
SHAPES = {"ffn_gate_exps": (E, I, D), "ffn_up_exps": (E, I, D), "ffn_down_exps": (E, D, I)}
EXACT = {"Q8_0": "int8:1x32:float16", "Q4_0": "int4:1x32:float16", "MXFP4": "mxfp4"}
SPLITS = {
    "one": [ParallelConfig()],
    "tp2": [ParallelConfig.of(tp=2, tp_rank=r) for r in range(2)],
    "ep3": [ParallelConfig.of(tp=3, tp_rank=r, expert_parallel=True) for r in range(3)],
}


def kind_of(name: str) -> Any:
    return gguf.GGMLQuantizationType[name]


def blocks(kind: str, shape: tuple[int, ...], g: np.random.Generator) -> np.ndarray:
    """A tensor of a type; K-quants, which gguf does not make, of random bits but for scales."""
    values, size = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    w = g.standard_normal(shape, dtype=np.float32)
    if not kind.endswith("_K"):
        return gguf.quants.quantize(w, kind_of(kind))
    raw = g.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    half = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for first in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]:
        raw[..., first : first + 2] = half
    return raw.reshape(*shape[:-1], -1)


def write(file: Path, kinds: dict[str, str], sizes: dict[str, tuple[int, ...]] = SHAPES) -> Any:
    """A file, and what its tensors stand for by name."""
    g = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "qwen3moe")
    found: dict[str, Tensor] = {}
    for name, shape in {**sizes, "ffn_gate_inp": (E, sizes["ffn_gate_exps"][-1])}.items():
        kind = kinds.get(name, "F32")
        t = blocks(kind, shape, g)
        floating = kind in ("F32", "F16")
        writer.add_tensor(
            f"{PREFIX}.{name}.weight", t, raw_dtype=None if floating else kind_of(kind)
        )
        found[name] = torch.from_numpy(
            gguf.quants.dequantize(t, kind_of(kind)).reshape(shape).copy()
        )
    writer.add_tensor(f"{PREFIX}.exp_probs_b.bias", np.arange(E, dtype=np.float32))
    writer.add_tensor("blk.0.ffn_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def layer_of(file: Path, width: tuple[int, int] = (D, I), **more: Any) -> MoELayer:
    formats = gguf_formats(file)
    assert list(formats) == [PREFIX]
    return MoELayer(
        E, 2, *width, **{"quant": formats[PREFIX], "dtype": torch.float32, **more},
        routing=Routing(correction_bias=True, score="sigmoid"), internal_gate=True,
    )  # fmt: skip


def load(layer: MoELayer, file: Path) -> Any:
    return load_checkpoint({PREFIX: layer}, file, style="gguf", progress=False)


def held(layer: MoELayer, w: str) -> Tensor:
    if layer.quant is None:
        return getattr(layer, f"{w}_weight")
    tensors = (getattr(layer, f"{w}_{what}") for what in ("weight", "scale"))
    return packing.dequantize(*tensors, layer.quant.format)


def check(layer: MoELayer, want: dict[str, Tensor]) -> None:
    s = layer.sizes
    ids = [layer.placement.ids_of(layer.parallel.ep_rank)[i] for i in range(s.E)]
    cut = slice(s.first, s.first + s.used)
    gate, up = held(layer, "w13").chunk(2, 1)
    assert torch.equal(gate, want["ffn_gate_exps"][ids][:, cut])
    assert torch.equal(up, want["ffn_up_exps"][ids][:, cut])
    assert torch.equal(held(layer, "w2"), want["ffn_down_exps"][ids][:, :, cut])
    assert torch.equal(layer.gate.weight, want["ffn_gate_inp"])
    assert layer.correction_bias.tolist() == list(range(E))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *EXACT, "Q4_1", "Q5_0"])
def test_a_layer_holds_what_gguf_decodes(kind: str, split: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    want = write(file, dict.fromkeys(SHAPES, kind))
    formats = gguf_formats(file)[PREFIX]
    assert (formats.weights if formats else None) == EXACT.get(kind)
    for config in SPLITS[split]:
        layer = layer_of(file, parallel=config)
        report = load(layer, file)
        assert report.complete, str(report)
        assert len(report.loaded) == 5
        check(layer, want)


def test_types_may_differ_and_are_decoded_with_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "model.gguf"
    shapes = {
        "ffn_gate_exps": (E, I, 256),
        "ffn_up_exps": (E, I, 256),
        "ffn_down_exps": (E, 256, I),
    }
    kinds = {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "Q8_0"}
    want = write(file, kinds | {"ffn_gate_inp": "Q8_0"}, shapes)
    assert gguf_formats(file) == {PREFIX: None}
    layer = layer_of(tmp_path / "model.gguf", (256, I))
    with caplog.at_level(logging.INFO, "moe_ops"):
        assert load(layer, tmp_path).complete  # a folder of GGUF files
    check(layer, want)
    lines = [r.getMessage() for r in caplog.records if "decoded" in r.getMessage()]
    assert len(lines) == 3
    assert f"{PREFIX}.ffn_gate_exps.weight is GGUF Q4_K: decoded to torch.float32" in lines[0]


def test_decoded_weights_are_rounded_once(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    want = write(file, dict.fromkeys(SHAPES, "Q8_0"))
    layer = layer_of(file, quant=None, dtype=torch.bfloat16)
    load(layer, file)
    assert torch.equal(layer.w2_weight, want["ffn_down_exps"].bfloat16())


HEADERS = {
    "empty": (lambda raw: b"", "is empty"),
    "magic": (lambda raw: b"GGML" + raw[4:], "starts with b'GGML'"),
    "version": (lambda raw: raw[:4] + b"\x09" + raw[5:], "the version 9"),
    "cut_header": (lambda raw: raw[:100], "past the file's end|ends inside its header"),
    "cut_data": (lambda raw: raw[:-64], r"blk.*: has \d+ bytes from byte \d+ on, past the file"),
    "count": (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], "begins at byte|ends inside"),
    "key": (lambda raw: raw[:24] + b"\xff" * 8 + raw[32:], "key 0 has 18446744073709551615 bytes"),
    "type": (lambda raw: raw.replace(b"\x08\0\0\0\x08", b"\x63\0\0\0\x08", 1), "unknown type 99"),
}


@pytest.mark.parametrize(("spoil", "why"), HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_wrong(spoil: Any, why: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, dict.fromkeys(SHAPES, "F16"))
    layer = layer_of(file)
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    file.write_bytes(spoil(file.read_bytes()))
    for read in (gguf_formats, lambda f: load(layer, f)):
        with pytest.raises(ValueError, match=rf"model\.gguf cannot be read as GGUF \(.*({why})"):
            read(file)
    assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())


def test_a_long_array_of_nothing_is_not_counted(tmp_path: Path) -> None:
    """A count that one wrong bit makes 2^40: refused at once."""
    key, size = b"tokenizer.ggml.scores", (21).to_bytes(8, "little")
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little")
    for kind, kept in ((6, b""), (8, b"\0" * 8)):
        array = b"".join((
            head, (1).to_bytes(8, "little"), size, key, (9).to_bytes(4, "little"),
            kind.to_bytes(4, "little"), (2**40).to_bytes(8, "little"), kept,
        ))  # fmt: skip
        (tmp_path / "a.gguf").write_bytes(array)
        with pytest.raises(ValueError, match=r"a\.gguf cannot be read as GGUF \("):
            gguf_formats(tmp_path / "a.gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4", "F16"])
def test_no_more_memory_than_one_tensor_is_needed(kind: str, tmp_path: Path) -> None:
    file, size = tmp_path / "model.gguf", 512
    write(file, dict.fromkeys(SHAPES, kind), dict.fromkeys(SHAPES, (E, size, size)))
    layer = layer_of(file, (size, size))
    gc.collect()
    with Peak() as peak:
        assert load(layer, file).complete
    assert peak.most <= layer.w2_weight.nbytes  # of all experts


BAD = {
    "other_format": ("Q4_0", "int8:1x32:float16", r"GGUF Q4_0 holds int4:1x32:float16, but the l"),
    "no_format": ("Q5_0", "int8:1x32:float16", r"GGUF Q5_0 is in no format of the ops.*quant=N"),
    "floats": ("F16", "int8:1x32:float16", r"is float16, but the layer's tensor is int8; give the"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "format", "message"), BAD.values(), ids=BAD)
def test_layers_of_another_format_are_refused(
    kind: str, format: str, message: str, tmp_path: Path
) -> None:
    from moe_ops.quant.config import QuantConfig

    file = tmp_path / "model.gguf"
    write(file, dict.fromkeys(SHAPES, kind))
    with pytest.raises((ValueError, TypeError), match=rf"^blk.1.ffn_gate_exps.weight: {message}"):
        load(layer_of(file, quant=QuantConfig(weights=format)), file)


@pytest.mark.parametrize(
    ("tp", "more"),
    [(2, {}), (3, {"intermediate_multiple": 1}), (8, {})],
    ids=["tp2", "tp3_uneven", "tp8"],
)
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0", "Q8_0"])
def test_ranks_may_hold_parts_of_blocks_that_are_decoded(
    kind: str, tp: int, more: dict[str, int], tmp_path: Path
) -> None:
    """A row of w2 has one block of a K-quant: rows are decoded, then cut."""
    file = tmp_path / "model.gguf"
    shapes = dict.fromkeys(SHAPES, (E, 256, 256))
    want = write(file, dict.fromkeys(SHAPES, kind), shapes)
    for rank in range(tp):
        config = ParallelConfig.of(tp=tp, tp_rank=rank)
        layer = layer_of(file, (256, 256), quant=None, parallel=config, **more)
        report = load(layer, file)
        assert report.complete, str(report)
        s = layer.sizes
        cut = slice(s.first, s.first + s.used)
        gate, up = layer.w13_weight.chunk(2, 1)
        assert torch.equal(gate[:, : s.used], want["ffn_gate_exps"][:, cut])
        assert torch.equal(up[:, : s.used], want["ffn_up_exps"][:, cut])
        assert torch.equal(layer.w2_weight[..., : s.used], want["ffn_down_exps"][..., cut])


def test_ranks_hold_whole_groups_of_what_stays_quantized(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, dict.fromkeys(SHAPES, "Q8_0"))
    with pytest.raises(ValueError, match=r"w2 has 16 columns, which do not fill int8:1x32:float16"):
        layer_of(file, parallel=ParallelConfig.of(tp=8, tp_rank=1))


def test_scales_that_are_no_numbers_are_refused_before_a_weight_is_changed(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, dict.fromkeys(SHAPES, "Q8_0"))
    layer = layer_of(file)
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    reader = gguf.GGUFReader(file, "r+")
    down = next(t for t in reader.tensors if "ffn_down_exps" in t.name)
    for value, said in ((np.nan, "nan"), (-np.inf, "-inf")):
        down.data[-1, -1, -34:-32] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
        reader.data.flush()
        with pytest.raises(
            ValueError, match=rf"ffn_down_exps\.weight: holds {said}, but a scale is finite"
        ):
            load(layer, file)
        assert all(torch.equal(before[n], t) for n, t in layer.state_dict().items())
    down.data[-1, -1, -34:-32] = np.frombuffer(np.float16(-1).tobytes(), np.uint8)
    reader.data.flush()
    assert load(layer, file).complete
