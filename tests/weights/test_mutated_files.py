"""Files that are wrong by chance are loaded whole, or refused whole: ValueError or TypeError."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_ops.layer import MoELayer
from moe_ops.layer.options import Routing
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from tests.weights import mutations
from tests.weights import test_bitsandbytes as nf4
from tests.weights import test_order as orders
from tests.weights.checkpoints import (
    LAYOUTS,
    PREFIX,
    PROJECTIONS,
    D,
    E,
    I,
    store,
    write,
    write_gpt_oss,
)

FEW, MANY = 60, 500


@dataclass(frozen=True)
class Kind:
    """A kind of file: how a folder with one is made, which file is wrong, how, and the layer."""

    make: Callable[[Path], Any]
    layer: Callable[[], MoELayer]
    file: str = "model.safetensors"
    mutations: tuple[mutations.Mutation, ...] = mutations.SAFETENSORS
    style: str = "qwen"
    prefix: str = PREFIX


def layer_of(name: str) -> MoELayer:
    layout = LAYOUTS[name]
    quant = QuantConfig(weights=layout.weights, inputs=layout.inputs, static_inputs=layout.static)
    return MoELayer(E, 2, D, I, quant=quant, dtype=torch.float32)


def of_layout(name: str, **more: Any) -> Kind:
    return Kind(
        make=lambda folder: write(folder, LAYOUTS[name]), layer=lambda: layer_of(name), **more
    )


def indexed(folder: Path) -> None:
    """Two files and an index."""
    write(folder, LAYOUTS["packed_uint4"])
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    found = {}
    for i in range(2):
        part = dict(list(whole.items())[i::2])
        save_file(part, folder / f"{i}.safetensors")
        found |= dict.fromkeys(part, f"{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 9}, "weight_map": found})
    )


def with_shared(name: str) -> Kind:
    """Two shared experts side by side beside the others, of which the layer is one of two ranks."""
    layout = LAYOUTS[name]

    def make(folder: Path) -> None:
        entries, g = write(folder, layout).entries, torch.Generator().manual_seed(1)
        for shard, projection in PROJECTIONS.items():
            rows, columns = (D, 2 * I) if shard == "w2" else (2 * I, D)
            for suffix, t in layout.write(g, rows, columns, shard).entries.items():
                entries[f"{PREFIX}.shared_experts.{projection}.{suffix}"] = t
        store(folder, entries, layout.config)

    def layer() -> MoELayer:
        quant = QuantConfig(weights=layout.weights)
        config = ParallelConfig.of(tp=2, tp_rank=1)
        return MoELayer(
            E, 2, D, I, quant=quant, dtype=torch.float32, parallel=config, shared_experts=2
        )

    return Kind(make, layer)


def with_state(rng: random.Random, raw: bytes) -> bytes:
    """The JSON in one tensor of a file of bitsandbytes, kept at its length where that goes."""
    at = raw.index(b'{"quant_type"', 8 + int.from_bytes(raw[:8], "little"))
    end = raw.index(b"}", at) + 1
    found = rng.choice((mutations.changed, mutations.swapped))(rng, raw[at:end])
    return raw[:at] + found.ljust(end - at)[: end - at] + raw[end:]


def of_gguf(kind: str, quant: str | None = None) -> Kind:
    sizes = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), (E, 256, 256))

    def make(folder: Path) -> None:
        from tests.weights import test_gguf  # wants the package gguf

        folder.mkdir()
        test_gguf.write(folder / "model.gguf", dict.fromkeys(sizes, kind), sizes)

    def layer() -> MoELayer:
        return MoELayer(
            E, 2, 256, 256, quant=quant, dtype=torch.float32, internal_gate=True,
            routing=Routing(correction_bias=True, score="sigmoid"),
        )  # fmt: skip

    return Kind(make, layer, "model.gguf", mutations.BYTES, style="gguf", prefix="blk.1")


KINDS = {
    "gptq": of_layout("gptq_uint4"),
    "packed": of_layout("packed_int4"),
    "fp8": of_layout("fp8_blocks"),
    "modelopt_fp8": of_layout("modelopt_fp8"),
    "nvfp4": of_layout("compressed_nvfp4"),
    "mxfp4": Kind(
        write_gpt_oss, style="gpt-oss",
        layer=lambda: MoELayer(E, 2, D, I, quant="mxfp4_w4a16", bias=True, dtype=torch.float32),
    ),
    "gptq_ordered": Kind(
        lambda folder: orders.write(folder, "gptq_int4", input_order=True),
        layer=lambda: orders.layer_of("gptq_int4", ordered=True),
    ),
    "gptq_shared": with_shared("gptq_uint4"),
    "packed_shared": with_shared("packed_uint4"),
    "fp8_shared": with_shared("fp8_blocks"),
    "bitsandbytes": Kind(
        lambda folder: nf4.write(folder, nested=True),
        layer=lambda: MoELayer(E, 2, nf4.D, I, dtype=torch.float32),
        mutations=(*mutations.SAFETENSORS, with_state, with_state),
    ),
    "config": of_layout("gptq_uint4", file="config.json", mutations=mutations.JSON),
    "config_packed": of_layout("packed_int4", file="config.json", mutations=mutations.JSON),
    "index": Kind(
        indexed, layer=lambda: layer_of("packed_uint4"),
        file="model.safetensors.index.json", mutations=mutations.JSON,
    ),
    "gguf_q8_0": of_gguf("Q8_0", "int8:1x32:float16"),
    "gguf_q4_k": of_gguf("Q4_K"),
    "gguf_f16": of_gguf("F16"),
}  # fmt: skip


def filled(layer: MoELayer, byte: int) -> MoELayer:
    """A layer all of whose numbers are of these bytes: what nobody wrote, is seen."""
    for t in layer.state_dict().values():
        t.reshape(-1).view(torch.uint8).fill_(byte)
    return layer


def state(layer: MoELayer) -> list[bytes]:
    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in layer.state_dict().values()]


def outcome(kind: Kind, folder: Path) -> str:
    """Load twice: "loaded" whole, "reported" as not complete, or "refused"."""
    states, complete = [], []
    for byte in (0x11, 0x22):
        layer = filled(kind.layer(), byte)
        before = state(layer)
        try:
            report = load_checkpoint({kind.prefix: layer}, folder, style=kind.style, progress=False)
        except (ValueError, TypeError) as error:
            assert state(layer) == before, "the layer was changed"
            assert str(folder) in str(error), f"names no file: {error}"
            return "refused"
        states.append(state(layer))
        complete.append(report.complete)
    assert complete[0] == complete[1]
    if complete[0]:
        assert states[0] == states[1], "complete, but something was not written"
    return "loaded" if complete[0] else "reported"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "numbers",
    [range(FEW), pytest.param(range(FEW, MANY), marks=[pytest.mark.every, pytest.mark.slow])],
    ids=["few", "many"],
)
@pytest.mark.parametrize("name", KINDS)
def test_mutated_files(name: str, numbers: range, tmp_path: Path) -> None:
    if name.startswith("gguf"):
        pytest.importorskip("gguf")
    kind, folder = KINDS[name], tmp_path / name
    kind.make(folder)
    assert outcome(kind, folder) == "loaded"
    good, found = (folder / kind.file).read_bytes(), set()
    for number in numbers:
        rng = random.Random(f"{name} {number}")
        mutate = kind.mutations[number % len(kind.mutations)]
        (folder / kind.file).write_bytes(mutate(rng, good))
        try:
            found.add(outcome(kind, folder))
        except Exception as error:
            kept = shutil.copy(folder / kind.file, tmp_path / f"mutation-{number}")
            raise AssertionError(
                f"mutation {number} of {name} by {mutate.__qualname__}: "
                f"{type(error).__name__}: {error}; the file is {kept}"
            ) from error
    assert {"loaded", "refused"} <= found
