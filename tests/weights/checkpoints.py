"""Synthetic checkpoints in the exact layouts of quantisers, written from codes bit by bit.

Nothing here calls the code under test: every layout is packed from the integers by the definition
of its format, and the weights that it stands for are computed from the same integers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

E, D, I = 3, 64, 64  # noqa: E741
GROUP = 32
PREFIX = "model.layers.0.mlp"
PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Matrix:
    """One expert's projection: a checkpoint's entries by suffix, and what they stand for."""

    entries: dict[str, Tensor]
    value: Tensor  # float32 [rows, columns]


@dataclass(frozen=True)
class Layout:
    """A layout: how one matrix is written, its configuration, and the formats of the layer."""

    write: Callable[[torch.Generator, int, int, str], Matrix]
    config: dict[str, Any]
    weights: str
    inputs: str = ""
    static: bool = False
    extra: dict[str, Tensor] = field(default_factory=dict)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes along the last axis in int32 words, code order[i] in bits i * bits and up."""
    per = 32 // bits
    parts = codes.long().unflatten(-1, (-1, per))
    out = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for i, which in enumerate(order or range(per)):
        out |= parts[..., which] << (bits * i)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def grouped(t: Tensor) -> Tensor:
    return t.repeat_interleave(GROUP, -1)


def codes(g: torch.Generator, rows: int, columns: int, high: int) -> Tensor:
    return torch.randint(0, high, (rows, columns), generator=g)


def scales(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (torch.rand(shape, generator=g) * 0.02 + 0.001).to(dtype)


def integers(bits: int, *, symmetric: bool, kind: str, v2: bool = False) -> Any:
    """GPTQ, AWQ, or pack-quantized of compressed-tensors."""

    def write(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
        q = codes(g, rows, columns, 2**bits)
        groups = columns // GROUP
        zero = codes(g, rows, groups, 2**bits - 1) + 1
        if symmetric:
            zero = torch.full_like(zero, 2 ** (bits - 1))
        s = scales(g, rows, groups, dtype=torch.bfloat16 if kind == "packed" else torch.float16)
        value = (q - grouped(zero)).float() * grouped(s.float())
        if kind == "gptq":
            stored = zero if v2 else (zero - 1)
            entries = {
                "qweight": words(q, bits).T.contiguous(),
                "qzeros": words(stored.T.contiguous(), bits),
                "scales": s.T.contiguous(),
                "g_idx": (torch.arange(columns) // GROUP).int(),
            }
        elif kind == "awq":
            entries = {
                "qweight": words(q.T.contiguous(), 4, AWQ_ORDER),
                "qzeros": words(zero.T.contiguous(), 4, AWQ_ORDER),
                "scales": s.T.contiguous(),
            }
        else:
            entries = {
                "weight_packed": words(q, bits),
                "weight_scale": s,
                "weight_shape": torch.tensor([rows, columns]),
            }
            if not symmetric:
                packed = words(zero.T.contiguous(), bits).T.contiguous()
                entries["weight_zero_point"] = packed
        return Matrix(entries, value)

    return write


def fp8(kind: str, *, static: bool = False) -> Any:
    """float8 with a scale per tensor, per channel, or per block of 32 x 32."""

    def write(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
        w = torch.randn(rows, columns, generator=g).to(torch.float8_e4m3fn)
        if kind == "block":
            s = scales(g, rows // GROUP, columns // GROUP, dtype=torch.float32)
            return Matrix(
                {"weight": w, "weight_scale_inv": s},
                w.float() * grouped(s).repeat_interleave(GROUP, 0),
            )
        s = scales(g, *((rows, 1) if kind == "channel" else ()), dtype=torch.float32)
        entries = {"weight": w, "weight_scale": s}
        if static:
            entries["input_scale"] = torch.tensor(0.05 if shard == "w2" else 0.03)
        return Matrix(entries, w.float() * s)

    return write


def w4afp8(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
    """W4AFP8: two's complement of four bits, two in a byte, and one scale of inputs a matrix."""
    q = codes(g, rows, columns, 16) - 8
    s = scales(g, rows, columns // GROUP, dtype=torch.float32)
    entries = {
        "weight": nibbles(q & 15).view(torch.int8), "weight_scale_inv": s,
        "input_scale": torch.tensor([0.05 if shard == "w2" else 0.03]),
    }  # fmt: skip
    return Matrix(entries, q.float() * grouped(s))


def int8(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
    w = (codes(g, rows, columns, 255) - 127).to(torch.int8)
    s = scales(g, rows, 1, dtype=torch.float32)
    return Matrix({"weight": w, "weight_scale": s}, w.float() * s)


def e2m1(q: Tensor) -> Tensor:
    return torch.where(q >= 8, -1.0, 1.0) * E2M1[q % 8]


def nibbles(q: Tensor) -> Tensor:
    return (q[..., 0::2] | (q[..., 1::2] << 4)).to(torch.uint8)


def nvfp4(kind: str) -> Any:
    """NVFP4 of ModelOpt, whose second scale multiplies, or of compressed-tensors: it divides."""

    def write(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
        q = codes(g, rows, columns, 16)
        s = (torch.rand(rows, columns // 16, generator=g) * 4 + 0.1).to(torch.float8_e4m3fn)
        # One number per expert's gate and up: powers of two, whose inverses are exact.
        alpha = torch.tensor(2.0**-7 if shard == "w2" else 2.0**-6)
        value = e2m1(q) * s.float().repeat_interleave(16, -1) * alpha
        amax = torch.tensor(2.0**-9)
        if kind == "modelopt":
            entries = {"weight": nibbles(q), "weight_scale": s, "weight_scale_2": alpha}
            entries["input_scale"] = amax
        else:
            entries = {"weight_packed": nibbles(q), "weight_scale": s}
            entries["weight_global_scale"] = (1 / alpha).reshape(1)
            entries["input_global_scale"] = (1 / amax).reshape(1)
        return Matrix(entries, value)

    return write


def mxfp4(g: torch.Generator, rows: int, columns: int, shard: str) -> Matrix:
    """MXFP4 of compressed-tensors; gpt-oss's blocks are made of the same."""
    q = codes(g, rows, columns, 16)
    s = torch.randint(115, 124, (rows, columns // 32), generator=g).to(torch.uint8)
    value = e2m1(q) * torch.exp2(s.float() - 127).repeat_interleave(32, -1)
    return Matrix({"weight_packed": nibbles(q), "weight_scale": s}, value)


def packed_config(bits: int) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "strategy": "group", "group_size": GROUP}}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }  # fmt: skip


def compressed_config(format: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {}}


FP8 = "float8_e4m3fn"
LAYOUTS = {
    "gptq_int4": Layout(
        integers(4, symmetric=True, kind="gptq"), {"quant_method": "gptq", "bits": 4},
        "int4:1x32:float16",
    ),
    "gptq_uint4": Layout(
        integers(4, symmetric=False, kind="gptq"), {"quant_method": "gptq", "bits": 4},
        "uint4:1x32:float16",
    ),
    "gptq_v2": Layout(
        integers(4, symmetric=False, kind="gptq", v2=True),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, "uint4:1x32:float16",
    ),
    "gptq_int8": Layout(
        integers(8, symmetric=True, kind="gptq"), {"quant_method": "gptq", "bits": 8},
        "int8:1x32:float16",
    ),
    "awq": Layout(
        integers(4, symmetric=False, kind="awq"),
        {"quant_method": "awq", "bits": 4, "version": "gemm"}, "uint4:1x32:float16",
    ),
    "packed_int4": Layout(
        integers(4, symmetric=True, kind="packed"), packed_config(4), "int4:1x32:bfloat16"
    ),
    "packed_uint4": Layout(
        integers(4, symmetric=False, kind="packed"), packed_config(4), "uint4:1x32:bfloat16"
    ),
    "packed_int8": Layout(
        integers(8, symmetric=True, kind="packed"), packed_config(8), "int8:1x32:bfloat16"
    ),
    "float_channel": Layout(
        fp8("channel"), compressed_config("float-quantized"), f"{FP8}:row"
    ),
    "int_channel": Layout(int8, compressed_config("int-quantized"), "int8:row"),
    "compressed_nvfp4": Layout(
        nvfp4("compressed"), compressed_config("nvfp4-pack-quantized"), "nvfp4", "nvfp4", True
    ),
    "compressed_mxfp4": Layout(mxfp4, compressed_config("mxfp4-pack-quantized"), "mxfp4"),
    "modelopt_fp8": Layout(
        fp8("tensor", static=True), {"quant_method": "modelopt", "quant_algo": "FP8"},
        f"{FP8}:row", f"{FP8}:tensor", True,
    ),
    "modelopt_nvfp4": Layout(
        nvfp4("modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "nvfp4", "nvfp4", True,
    ),
    "w4afp8": Layout(
        w4afp8, {"quant_method": "w4afp8", "weight_block_size": [32, 32]}, "int4:1x32",
        f"{FP8}:tensor", True,
    ),
    "fp8_blocks": Layout(
        fp8("block"), {"quant_method": "fp8", "weight_block_size": [32, 32]}, f"{FP8}:32x32"
    ),
}  # fmt: skip


@dataclass
class Checkpoint:
    """A checkpoint on disk, and the weights that it stands for: w1, w3 [E, I, D], w2 [E, D, I]."""

    folder: Path
    values: dict[str, Tensor]
    entries: dict[str, Tensor]


def write(folder: Path, layout: Layout, D: int = D, I: int = I) -> Checkpoint:  # noqa: E741
    """All experts of one layer in a layout, under the names of Qwen."""
    g = torch.Generator().manual_seed(0)
    entries: dict[str, Tensor] = {}
    values: dict[str, list[Tensor]] = {shard: [] for shard in PROJECTIONS}
    for e in range(E):
        for shard, projection in PROJECTIONS.items():
            rows, columns = (D, I) if shard == "w2" else (I, D)
            made = layout.write(g, rows, columns, shard)
            values[shard].append(made.value)
            for suffix, t in made.entries.items():
                entries[f"{PREFIX}.experts.{e}.{projection}.{suffix}"] = t
    store(folder, entries, layout.config)
    return Checkpoint(folder, {s: torch.stack(v) for s, v in values.items()}, entries)


def write_gpt_oss(folder: Path) -> Checkpoint:
    """gpt-oss: MXFP4 blocks of all experts, rows of gate and up alternating, and biases."""
    g = torch.Generator().manual_seed(0)
    values: dict[str, list[Tensor]] = {s: [] for s in ("w1", "w3", "w2", "b1", "b3", "b2")}
    entries: dict[str, list[Tensor]] = {}
    for _ in range(E):
        for name, rows, columns in (("gate_up_proj", 2 * I, D), ("down_proj", D, I)):
            made = mxfp4(g, rows, columns, "")
            blocks = made.entries["weight_packed"].reshape(rows, columns // 32, 16)
            bias = torch.randn(rows, generator=g)
            entries.setdefault(f"{name}_blocks", []).append(blocks)
            entries.setdefault(f"{name}_scales", []).append(made.entries["weight_scale"])
            entries.setdefault(f"{name}_bias", []).append(bias)
            if rows == 2 * I:
                for shard, b, first in (("w1", "b1", 0), ("w3", "b3", 1)):
                    values[shard].append(made.value[first::2])
                    values[b].append(bias[first::2])
            else:
                values["w2"].append(made.value)
                values["b2"].append(bias)
    stacked = {f"{PREFIX}.experts.{n}": torch.stack(t) for n, t in entries.items()}
    store(folder, stacked, {"quant_method": "mxfp4"})
    return Checkpoint(folder, {s: torch.stack(v) for s, v in values.items()}, stacked)


def store(folder: Path, entries: dict[str, Tensor], config: dict[str, Any] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(entries, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
