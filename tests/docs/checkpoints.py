"""The tables of docs/FORMATS.md that say what of a checkpoint can be loaded, found by loading it.

Every cell is a load of a small checkpoint that the tests of `moe_ops.weights` write: "works" if the
layers, or the ranks together, hold the weights that it stands for, else what the load raised.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from tests.docs import transformers_models as models
from tests.two_scales import dequantize

WRITERS = Path(__file__).resolve().parents[1] / "weights"
RANKS = {
    "`MoELayer`": [ParallelConfig()],
    "tensor parallel": [ParallelConfig.of(tp=2, tp_rank=r) for r in range(2)],
    "expert parallel": [ParallelConfig.of(tp=2, tp_rank=r, expert_parallel=True) for r in range(2)],
}
HEAD = ("checkpoint", "`quant` of the layer", "HF model", *RANKS)
WORKS, SAME, MODEL = "works", "the same", "refused: no reader"
Values = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of checkpoint: what writes it and says what it stands for, and the layer's format."""

    name: str
    write: Callable[[Path], Values]
    quant: QuantConfig | None = None
    style: str = "qwen"
    prefix: str = "model.layers.0.mlp"
    sizes: tuple[int, int] = (64, 64)
    bias: bool = False
    # Why a model of transformers cannot have it; None, or that it returns None: it can.
    model: Callable[[], str | None] | None = None

    @property
    def row(self) -> tuple[str, ...]:
        first, *others = map(self._cell, RANKS.values())
        model = self._of_model()
        rest = (SAME if cell == first != WORKS else cell for cell in others)
        layer = SAME if first == model != WORKS else first
        return (self.name, spelled(self.quant), model, layer, *rest)

    def _of_model(self) -> str:
        if self.model is None:
            return MODEL
        try:
            reason = self.model()
        except (ValueError, TypeError) as error:
            reason = reason_of(error)
        return WORKS if reason is None else f"refused: {reason}"

    def _cell(self, ranks: list[ParallelConfig]) -> str:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "checkpoint"
            folder.mkdir()
            values = self.write(folder)
            layers = [self._layer(self.quant, config) for config in ranks]
            try:
                reports = [
                    load_checkpoint({self.prefix: x}, folder, style=self.style, progress=False)
                    for x in layers
                ]
            except (ValueError, TypeError) as error:
                return f"refused: {reason_of(error)}"
        assert not any(report.missing or report.twice for report in reports), reports
        if layers[0].input_order is None:
            for layer in layers:
                check_weights(layer, values)
        else:
            check_sum(layers, self._layer(None, ParallelConfig()), values)
        return WORKS

    def _layer(self, quant: QuantConfig | None, config: ParallelConfig) -> MoELayer:
        return MoELayer(
            3, 2, *self.sizes, quant=quant, bias=self.bias, parallel=config, dtype=torch.float32
        )  # fmt: skip


def check_weights(layer: MoELayer, values: Values) -> None:
    """The weights of a rank are its part of the values."""
    s, ids = layer.sizes, list(layer.placement.ids_of(layer.parallel.ep_rank))
    cut = slice(s.first, s.first + s.used)
    w13 = torch.cat((values["w1"][ids][:, cut], values["w3"][ids][:, cut]), 1)
    for name, want in (("w13", w13), ("w2", values["w2"][ids][..., cut])):
        torch.testing.assert_close(held(layer, name), want.float(), rtol=1e-6, atol=0)


@torch.no_grad()
def check_sum(layers: list[MoELayer], plain: MoELayer, values: Values) -> None:
    """The outputs of all ranks, with columns in any order, add up to those of the values."""
    plain.w13_weight.copy_(torch.cat((values["w1"], values["w3"]), 1))
    plain.w2_weight.copy_(values["w2"])
    x, logits = torch.randn(9, plain.sizes.hidden_size), torch.randn(9, 3)
    want, got = plain(x, logits), torch.stack([layer(x, logits) for layer in layers]).sum(0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))


def held(layer: MoELayer, name: str) -> Tensor:
    """What a weight of a layer stands for."""
    weight: Tensor = getattr(layer, f"{name}_weight").detach()
    if layer.quant is None:
        return weight
    scale, zero, second = (getattr(layer, f"{name}_{w}") for w in ("scale", "zero", "global_scale"))
    return dequantize(weight, scale, layer.quant.format, zero, second)


def reason_of(error: Exception) -> str:
    """An error without the names of its files and entries, which are those of one example."""
    text = re.sub(r" \(in [^()]*\)$", "", str(error))
    text = re.sub(r"^(blk|model)\.[\w.]+:? ", "", text)
    return re.sub(r"(blk|model)\.[\w.]+", "another entry", text)


def spelled(quant: QuantConfig | None) -> str:
    if quant is None:
        return "`None`"
    flags = ("static_inputs", "ordered_input", "per_expert_order", "two_global_scales")
    named = [f"`{f}`" for f in flags if getattr(quant, f)]
    formats = [f"`{f}`" for f in (quant.weights, quant.inputs) if f]
    return ", ".join((" with ".join(formats), *named))


@contextmanager
def writers(*names: str) -> Iterator[list[ModuleType]]:
    """Modules of tests/weights, which import each other by their names alone."""
    sys.path.insert(0, str(WRITERS))
    sys.path.insert(0, str(WRITERS.parent))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        del sys.path[:2]


def of_layout(name: str, key: str, **more: Any) -> Kind:
    """A kind that tests/weights/checkpoints.py writes."""
    with writers("checkpoints") as (made,):
        layout = made.LAYOUTS[key]
    quant = QuantConfig(weights=layout.weights, inputs=layout.inputs, static_inputs=layout.static)
    return Kind(name=name, write=lambda f: made.write(f, layout).values, quant=quant, **more)


def of_nf4(write: Callable[[Path, bool], Values]) -> Kind:
    """NF4 of bitsandbytes, in a layer of the same codes."""
    quant = QuantConfig(weights="nf4")
    return Kind(
        name="bitsandbytes, NF4", write=lambda f: write(f, True), quant=quant, sizes=(64, 128)
    )


def changed(
    kind: Kind,
    name: str,
    change: Callable[[dict[str, Tensor]], None],
    value: Callable[[Values], None],
) -> Kind:
    """The same with other entries, and what they stand for."""

    def write(folder: Path) -> Values:
        from safetensors.torch import load_file, save_file

        values = kind.write(folder)
        entries = load_file(folder / "model.safetensors")
        change(entries)
        value(values)
        save_file(entries, folder / "model.safetensors")
        return values

    return Kind(name=name, write=write, quant=kind.quant)


def plain(folder: Path) -> Values:
    with writers("checkpoints") as (made,):
        values = {s: torch.randn(3, 64, 64).bfloat16() for s in made.PROJECTIONS}
        made.store(
            folder,
            {
                f"{made.PREFIX}.experts.{e}.{p}.weight": values[s][e].clone()
                for e in range(3)
                for s, p in made.PROJECTIONS.items()
            },
        )
    return values


def ordered(alike: bool) -> Callable[[Path], Values]:
    def write(folder: Path) -> Values:
        with writers("test_order") as (made,):
            found: Values = made.write(folder, "gptq_int4", input_order=True, alike=alike)
            return found

    return write


def other_ratio(entries: dict[str, Tensor]) -> None:
    """Scales of experts' up projections that no scales of blocks make up for."""
    for name, t in entries.items():
        if name.endswith("up_proj.weight_scale_2"):
            t.mul_(1.1)


def other_values(values: Values) -> None:
    values["w3"] *= 1.1


def configured(config: dict[str, Any]) -> Callable[[Path], Values]:
    """A checkpoint whose configuration says this, with weights of another one."""

    def write(folder: Path) -> Values:
        with writers("checkpoints") as (made,):
            found: Values = made.write(folder, made.LAYOUTS["gptq_int4"]).values
            made.store(folder, {"a": torch.ones(1)}, config)
            return found

    return write


def kinds() -> list[Kind]:
    """Those of safetensors files."""
    with writers("checkpoints", "test_bitsandbytes") as (made, nf4):
        width = (nf4.D, nf4.I)
        gpt_oss = made.write_gpt_oss
        bits = functools.partial(nf4.write, nested=True)
    int4, act = "int4:1x32:float16", "GPTQ in the order of activations"
    order = QuantConfig(weights=int4, ordered_input=True)
    each = QuantConfig(weights=int4, ordered_input=True, per_expert_order=True)
    nvfp4 = of_layout("NVFP4 of ModelOpt", "modelopt_nvfp4")
    tensor = QuantConfig(
        weights="float8_e4m3fn:tensor", inputs="float8_e4m3fn:tensor", static_inputs=True
    )
    apart = changed(
        nvfp4, "the same, gate and up with other second scales", other_ratio, other_values
    )
    assert nvfp4.quant is not None
    two = replace(nvfp4.quant, two_global_scales=True)
    per_row = of_layout("FP8, one scale a matrix (ModelOpt), its inputs' too", "modelopt_fp8")
    found = [
        Kind(name="16 or 32 bits", write=plain, model=models.floats),
        of_layout("GPTQ, 4 bits, symmetric", "gptq_int4"),
        of_layout("GPTQ, 4 bits, zero points", "gptq_uint4"),
        of_layout("GPTQ, 8 bits", "gptq_int8"),
        Kind(name=act, write=ordered(True), quant=order),
        Kind(name=f"{act}, one for each expert", write=ordered(False), quant=each),
        Kind(name="the same", write=ordered(False), quant=order),
        of_layout("AWQ", "awq"),
        of_layout("compressed-tensors, packed, 4 bits", "packed_int4"),
        of_layout("the same with zero points", "packed_uint4"),
        of_layout("compressed-tensors, packed, 8 bits", "packed_int8"),
        of_layout("compressed-tensors, FP8 by channels", "float_channel"),
        of_layout("compressed-tensors, int8 by channels", "int_channel"),
        of_layout("compressed-tensors, NVFP4", "compressed_nvfp4"),
        of_layout("compressed-tensors, MXFP4", "compressed_mxfp4"),
        per_row,
        Kind(name="the same", write=per_row.write, quant=tensor),
        nvfp4,
        Kind(name=apart.name, write=apart.write, quant=two),
        Kind(name="the same", write=apart.write, quant=nvfp4.quant),
        of_layout("FP8 in blocks", "fp8_blocks"),
        of_layout("W4AFP8", "w4afp8"),
        Kind(
            name="MXFP4 of gpt-oss", write=lambda f: gpt_oss(f).values, style="gpt-oss",
            quant=QuantConfig(weights="mxfp4"), bias=True, model=models.mxfp4,
        ),
        of_nf4(nf4.write_nf4),
        Kind(name="the same, and FP4, in blocks across rows", write=bits, sizes=width),
        Kind(
            name="bitsandbytes, 8 bits",
            write=configured({"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ),
        Kind(
            name="GPTQ, 3 bits", write=configured({"quant_method": "gptq", "bits": 3}),
            quant=QuantConfig(weights=int4),
        ),
        Kind(name="HQQ, Quark, and others", write=configured({"quant_method": "hqq"})),
    ]  # fmt: skip
    return [kind if kind.model else replace(kind, model=of_model(kind.write)) for kind in found]


def of_model(write: Callable[[Path], Values]) -> Callable[[], str | None]:
    """Whether a model of transformers has the experts that are written, by `from_checkpoint`."""

    def load() -> str | None:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "checkpoint"
            folder.mkdir()
            return models.published(folder, write(folder))

    return load


def gguf_kinds() -> list[Kind]:
    """Those of GGUF files, which the package gguf writes."""
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    shards = dict(zip(("w1", "w3", "w2"), names, strict=True))
    with writers("test_gguf") as (made,):
        formats, prefix, write_file = made.EXACT, made.PREFIX, made.write

    def of_type(kind: str, quant: str | None = None, wide: int = 256) -> Kind:
        def write(folder: Path) -> Values:
            sizes = dict(zip(names, [(3, wide, 256)] * 2 + [(3, 256, wide)], strict=True))
            found = write_file(folder / "model.gguf", dict.fromkeys(names, kind), sizes)
            return {shard: found[name] for shard, name in shards.items()}

        return Kind(
            name=f"GGUF {kind}", write=write, style="gguf", prefix=prefix, sizes=(256, wide),
            quant=None if quant is None else QuantConfig(weights=quant),
        )  # fmt: skip

    return [
        of_type("F16"),
        *(of_type(kind, format) for kind, format in formats.items()),
        # Each of two ranks has whole blocks.
        *(of_type(f"Q{n}_K", f"q{n}_k", wide=512) for n in (4, 5, 6)),
        *(of_type(kind) for kind in ("Q8_0", "Q5_0", "Q4_K", "Q6_K")),
        of_type("Q4_K", "int4:1x32:float16"),
    ]
