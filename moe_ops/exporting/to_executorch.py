"""Programs as ExecuTorch's, on its portable kernels."""

from __future__ import annotations

from pathlib import Path

import torch
from executorch.exir import to_edge
from executorch.runtime import Runtime
from torch import Tensor
from torch.export import ExportedProgram

from moe_ops.exporting.runtimes import Run


def write(program: ExportedProgram, file: Path) -> None:
    """Write a program of fixed sizes."""
    file.write_bytes(to_edge(program).to_executorch().buffer)


def load(file: Path) -> Run:
    """A function that runs a program, of the sizes that it was exported for."""
    method = Runtime.get().load_program(file).load_method("forward")
    assert method is not None

    def run(ids: Tensor) -> Tensor:
        (logits,) = method.execute([ids])
        return torch.as_tensor(logits).clone()  # it lies in memory that the next call writes

    return run
