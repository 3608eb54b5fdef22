"""How fast layers load, against safetensors alone.

Writes a synthetic checkpoint, of Qwen3-30B-A3B's experts, and loads it in turn with
`load_checkpoint` and with safetensors alone: reading every tensor into new memory, as
`load_file` and a clone do; and copying it to memory that is there already, which is the least that
reading can be, and what layers are. A third time, for GPTQ, with the axes of each tensor exchanged
by torch's copy: its words lie the other way round than those of layers. The files are in the page
cache, unless the kernel is asked to drop them before each run (cold).
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.quant.config import QuantConfig
from moe_ops.weights import load_checkpoint
from moe_ops.weights.layouts import PLAIN, Coding, awq, gptq

WIDTH, ROWS = 2048, 768
PROJECTIONS = {"gate_proj": (ROWS, WIDTH), "up_proj": (ROWS, WIDTH), "down_proj": (WIDTH, ROWS)}
CODINGS: dict[str, tuple[str | None, Coding]] = {
    "bf16": (None, PLAIN),
    "fp8": ("float8_e4m3fn:128x128", PLAIN),
    "gptq": ("int4:1x128:float16", gptq()),
    "awq": ("uint4:1x128:float16", awq()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Rates in GiB/s, medians of alternating runs; ratios are medians of those of single runs."""

    coding: str
    gib: float
    entries: int
    ours: float
    new: float  # safetensors, into new memory
    there: float  # safetensors, into memory that is there
    ratio_new: float
    ratio_there: float
    turned: float | None  # safetensors, into memory that is there, with axes exchanged
    ratio_turned: float | None

    def __str__(self) -> str:
        turned = ""
        if self.turned is not None:
            turned = f", {self.turned:.2f} with axes exchanged ({self.ratio_turned:.0%})"
        return (
            f"{self.coding:5} {self.gib:.2f} GiB, {self.entries} entries: load_checkpoint "
            f"{self.ours:.2f} GiB/s; safetensors {self.new:.2f} GiB/s into new memory "
            f"({self.ratio_new:.0%}), {self.there:.2f} into memory that is there "
            f"({self.ratio_there:.0%}){turned}"
        )


def tensors(coding: str, rows: int, columns: int) -> dict[str, Tensor]:
    """One projection's entries by suffix; their numbers do not matter."""
    if coding == "bf16":
        return {"weight": torch.randn(rows, columns).bfloat16()}
    if coding == "fp8":
        return {
            "weight": torch.randn(rows, columns).to(torch.float8_e4m3fn),
            "weight_scale_inv": torch.rand(rows // 128, columns // 128),
        }
    scales = torch.rand(columns // 128, rows).half().clamp(min=2**-10)
    if coding == "awq":
        return {
            "qweight": _words(columns, rows // 8),
            "qzeros": _words(columns // 128, rows // 8),
            "scales": scales,
        }
    return {"qweight": _words(columns // 8, rows), "scales": scales}


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).int()


def write(folder: Path, coding: str, gib: float) -> tuple[list[Path], int]:
    """Files of one layer each, and the experts of a layer."""
    from safetensors.torch import save_file

    made = {name: tensors(coding, *shape) for name, shape in PROJECTIONS.items()}
    size = sum(t.nbytes for part in made.values() for t in part.values())
    layers, experts = 2, max(1, int(gib * 2**30 / size / 2))
    files = []
    for i in range(layers):
        prefix = f"model.layers.{i}.mlp.experts"
        files.append(folder / f"{coding}-{i}.safetensors")
        save_file(
            {
                f"{prefix}.{e}.{name}.{suffix}": t.clone()
                for e in range(experts)
                for name, part in made.items()
                for suffix, t in part.items()
            },
            files[-1],
        )
    return files, experts


def seconds(run: Callable[[], object], files: list[Path], cold: bool) -> float:
    for file in files if cold else []:
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def readers(files: list[Path]) -> tuple[dict[str, Tensor], tuple[Callable[[], None], ...]]:
    """What reads with safetensors alone: into new memory, which is kept in the first result, to
    memory that is there, and with axes exchanged.
    """
    from safetensors import safe_open

    buffers: dict[str, Tensor] = {}
    exchanged: dict[str, Tensor] = {}

    def new() -> None:
        buffers.clear()
        for file in files:
            with safe_open(file, framework="pt") as f:
                for name in f.offset_keys():
                    buffers[name] = f.get_tensor(name).clone()

    def there() -> None:
        for file in files:
            with safe_open(file, framework="pt") as f:
                for name in f.offset_keys():
                    buffers[name].copy_(f.get_tensor(name))

    def turned() -> None:
        for file in files:
            with safe_open(file, framework="pt") as f:
                for name in f.offset_keys():
                    t = f.get_tensor(name)
                    if name not in exchanged:
                        exchanged[name] = torch.zeros_like(t.T).contiguous()
                    exchanged[name].copy_(t.T)

    return buffers, (new, there, turned)


def measure(coding: str, gib: float, repeats: int, cold: bool, folder: Path) -> Loading:
    """Time one coding. Raises AssertionError if something was not loaded."""
    files, experts = write(folder, coding, gib)
    weights, layout = CODINGS[coding]
    quant = None if weights is None else QuantConfig(weights=weights)
    layers = {
        f"model.layers.{i}.mlp": MoELayer(
            experts, 1, WIDTH, ROWS, quant=quant, dtype=torch.bfloat16
        )
        for i in range(len(files))
    }
    buffers, (new, there, turned) = readers(files)

    def ours() -> None:
        report = load_checkpoint(layers, files, style="qwen", coding=layout, progress=False)
        if not report.complete:
            raise AssertionError(f"not timing what is wrong: {report}")

    runs = [ours, new, there]
    if coding == "gptq":
        turned()  # makes its memory
        runs.append(turned)
    times = [[seconds(run, files, cold) for run in runs] for _ in range(repeats)]
    size = sum(t.nbytes for t in buffers.values()) / 2**30
    rates = [size / statistics.median(t) for t in zip(*times, strict=True)]
    ratios = [statistics.median(t[i] / t[0] for t in times) for i in range(len(runs))]
    return Loading(
        coding=coding,
        gib=size,
        entries=len(buffers),
        ours=rates[0],
        new=rates[1],
        there=rates[2],
        ratio_new=ratios[1],
        ratio_there=ratios[2],
        turned=rates[3] if len(rates) > 3 else None,
        ratio_turned=ratios[3] if len(ratios) > 3 else None,
    )


def measure_all(
    codings: Iterable[str], gib: float, repeats: int, cold: bool, parent: Path | None
) -> list[Loading]:
    """Time and print codings, their files in a folder of their own that is removed."""
    found = []
    for coding in codings:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            found.append(measure(coding, gib, repeats, cold, Path(folder)))
        print(found[-1], flush=True)
    return found
