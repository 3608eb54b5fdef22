"""Programs as OpenVINO's intermediate representation."""

from __future__ import annotations

from pathlib import Path

import openvino
import torch
from torch import Tensor
from torch.export import ExportedProgram

from moe_ops.exporting.runtimes import Run


def write(program: ExportedProgram, file: Path) -> None:
    """Write a program as FILE.xml, with its weights, in float32, in FILE.bin beside it."""
    openvino.save_model(openvino.convert_model(program), str(file), compress_to_fp16=False)


def load(file: Path) -> Run:
    """A function that runs a file on the CPU, in float32 where the CPU could do with less."""
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(file), "CPU", exact)

    def run(ids: Tensor) -> Tensor:
        return torch.from_numpy(compiled([ids.numpy()])[0].copy())

    return run
