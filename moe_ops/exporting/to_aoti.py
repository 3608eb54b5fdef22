"""Programs as packages of AOTInductor: machine code, which C++ loads without Python."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch.export import ExportedProgram

from moe_ops.exporting.runtimes import Run


def write(program: ExportedProgram, file: Path) -> None:
    """Compile a program for this machine."""
    aoti_compile_and_package(program, package_path=str(file))


def load(file: Path) -> Run:
    """A function that runs a package."""
    package = aoti_load_package(str(file))

    def run(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = package(ids)
        return logits

    return run
