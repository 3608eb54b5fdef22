"""The runtimes whose files we write: what each needs, and where its code is."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.export import ExportedProgram

Run = Callable[[Tensor], Tensor]


class Writes(Protocol):
    """What a file of `FILES` has."""

    def write(self, program: ExportedProgram, file: Path) -> None:
        """Write a program into a file of the runtime."""
        ...

    def load(self, file: Path) -> Run:
        """What runs such a file: token ids to logits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """One runtime: `target` of `decompositions`, the file here with its code, its packages by the
    names of their modules, the suffix of its files, and whether sizes may vary in these."""

    target: str
    file: str
    packages: Mapping[str, str]
    suffix: str
    dynamic: bool = True

    def missing(self) -> list[str]:
        """What pip has to install."""
        lacks = (n for m, n in self.packages.items() if importlib.util.find_spec(m) is None)
        return list(dict.fromkeys(lacks))

    def code(self) -> Writes:
        """Its code, which imports its packages."""
        return importlib.import_module(f"moe_ops.exporting.{self.file}")


ONNX = {"onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"}
RUNTIMES = {
    "onnx": Runtime(target="onnx", file="to_onnx", packages=ONNX, suffix=".onnx"),
    "ort": Runtime(target="ort", file="to_onnx", packages=ONNX, suffix=".onnx"),
    "aoti": Runtime(target="aten", file="to_aoti", packages={}, suffix=".pt2"),
    "openvino": Runtime(
        target="portable", file="to_openvino", packages={"openvino": "openvino"}, suffix=".xml"
    ),
    "executorch": Runtime(
        target="portable",
        file="to_executorch",
        packages={"executorch": "executorch"},
        suffix=".pte",
        dynamic=False,
    ),
}
