"""What limits each kernel of a layer: hardware counters, by Nsight Compute (`ncu`).

`ncu` runs every kernel alone, after emptying the caches, some dozen times for its counters. So
a kernel takes longer than among others, where launches overlap; its shares are what to read.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ops.bench.formats import parse
from moe_ops.bench.inputs import make_routed, make_weights
from moe_ops.bench.tables import aligned
from moe_ops.ops import moe
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import LAYERS

RANGE = "thread Domain:Push/Pop_Range"  # the column of the NVTX range begins so
OF_PEAK = "avg.pct_of_peak_sustained_elapsed"
# A field of `Kernel`, the counter behind it, and what one unit of the field is of the counter's.
METRICS: dict[str, tuple[str, float]] = {
    "us": ("gpu__time_duration.sum", 1e3),
    "read_mb": ("dram__bytes_read.sum", 1e6),
    "memory": (f"dram__throughput.{OF_PEAK}", 1.0),
    "l2": (f"lts__throughput.{OF_PEAK}", 1.0),
    "tensor": (f"sm__pipe_tensor_cycles_active.{OF_PEAK}", 1.0),
    "issue": (f"sm__inst_issued.{OF_PEAK}", 1.0),
    "ghz": ("sm__cycles_elapsed.avg.per_second", 1e9),
    "registers": ("launch__registers_per_thread", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One launch. Shares in % of what the device can sustain: of memory's rate, of the L2 cache's,
    of the cycles in which the matrix units could work, and in which instructions could issue.
    """

    layer: str
    tokens: int
    name: str
    grid: str
    us: float
    read_mb: float
    memory: float
    l2: float
    tensor: float
    issue: float
    ghz: float
    registers: float


def measure(layers: Sequence[str], tokens: Iterable[int], format: str = "") -> list[Kernel]:
    """The kernels of one call of `moe` for each layer and number of tokens, in order; weights and
    inputs are in `format`, as `formats.parse` reads it, or in bfloat16.

    Raises RuntimeError without a GPU or without `ncu`, and with what it said if it fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None or not torch.cuda.is_available():
        missing = "Nsight Compute's `ncu` on the PATH" if ncu is None else "a CUDA GPU"
        raise RuntimeError(f"counters are read with {missing}, which there is not")
    counters = ",".join(counter for counter, _ in METRICS.values())
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--clock-control", "none", "--profile-from-start", "off", "--nvtx", "--csv",
            "--page", "raw", "--metrics", counters, "--log-file", str(log),
            sys.executable, "-m", "moe_ops.bench.counters", ",".join(layers),
            ",".join(map(str, tokens)), format,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            said = log.read_text() if log.exists() else ""
            raise RuntimeError(f"ncu ended with {done.returncode}\n{said}{done.stderr}")
        return kernels_of(log.read_text())


def kernels_of(log: str) -> list[Kernel]:
    """What `ncu --csv --page raw` wrote, its remarks before the table left out."""
    lines = [line for line in log.splitlines() if line.startswith('"')]
    head, _, *rows = csv.reader(lines)  # the second line names units
    cell = next(i for i, column in enumerate(head) if column.startswith(RANGE))
    found = []
    for row in rows:
        of = dict(zip(head, row, strict=True))
        # "<default domain>:NAME:none:...", as the column says.
        layer, tokens = row[cell].split(":")[1].split("@")
        values = {
            field: float(of[counter].replace(",", "")) / unit
            for field, (counter, unit) in METRICS.items()
        }
        found.append(
            Kernel(
                layer=layer, tokens=int(tokens), name=of["Kernel Name"], grid=of["Grid Size"],
                **values,
            )
        )  # fmt: skip
    return found


def table(kernels: Iterable[Kernel]) -> str:
    head = ["layer", "tokens", "kernel", "grid", "µs", "MB read", "memory %", "L2 %"]
    rows = [[*head, "matrix units %", "issue %", "GHz", "registers"]]
    for k in kernels:
        row = [k.layer, str(k.tokens), k.name, k.grid, f"{k.us:.1f}", f"{k.read_mb:.1f}"]
        row += [f"{k.memory:.0f}", f"{k.l2:.0f}", f"{k.tensor:.0f}", f"{k.issue:.0f}"]
        rows.append([*row, f"{k.ghz:.2f}", f"{k.registers:.0f}"])
    return aligned(rows)


@torch.inference_mode()
def run(layers: Iterable[str], tokens: Sequence[int], quant: QuantConfig | None) -> None:
    """What `ncu` watches: each call once, in a range of its name, after one that compiles."""
    g = torch.Generator(device="cuda").manual_seed(0)
    for name in layers:
        case = LAYERS[name]
        weights = make_weights(case, torch.bfloat16, g, quant)
        given = {"renormalize": True, **weights.keywords}
        for T in tokens:
            routed = make_routed(case, T, "uniform", torch.bfloat16, g)
            args = (routed.x_TD, routed.logits_TE, weights.w13_EFD, weights.w2_EDI, case.K)
            moe(*args, **given)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda.nvtx.range_push(f"{name}@{T}")
            moe(*args, **given)
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()
            torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    names, numbers, text = sys.argv[1:]
    run(names.split(","), [int(word) for word in numbers.split(",")], parse(text) if text else None)
