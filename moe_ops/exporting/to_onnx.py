"""Programs as ONNX files, run by ONNX Runtime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor
from torch.export import ExportedProgram

from moe_ops.exporting.runtimes import Run

# It counts the operators of packages that are not installed, which is no concern here.
TALKS = "torch.onnx._internal.exporter._registration"


def write(program: ExportedProgram, file: Path) -> None:
    """Write a program as ONNX; weights that are too large for it lie in a file beside it."""
    with _quiet():
        done = torch.onnx.export(program, dynamo=True, verbose=False, input_names=["input_ids"])
    assert done is not None
    done.save(str(file))


def load(file: Path) -> Run:
    """A function that runs a file on the CPU."""
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (name,) = (given.name for given in session.get_inputs())

    def run(ids: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: ids.numpy()})[0])

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger(TALKS)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Of its own way to copy what it is given.
            warnings.filterwarnings("ignore", ".*treespec", FutureWarning)
            yield
    finally:
        log.setLevel(before)
