"""What a configuration says of the matrices of a checkpoint, by their names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_ops.weights.configuration import naming
from moe_ops.weights.layouts import (
    PLAIN,
    Block,
    Coding,
    awq,
    compressed,
    gptq,
    int4_pairs,
    mxfp4_blocks,
)

QUANTIZED = "quantization_config"
FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class Said:
    """What a configuration says of a matrix: how it is laid out, and the rows and columns that
    share a scale if it is float8. `inputs`: the element that static scales of its input are for,
    where its own says nothing of it."""

    layout: str = ""  # "gptq", "gptq_v2", "awq", "compressed", "mxfp4", "pairs"; "" for plain
    bits: int = 4
    symmetric: bool = False
    block: Block = None
    inputs: str = ""

    @property
    def coding(self) -> Coding:
        """The coding of the matrix. Raises ValueError for a width that no op reads."""
        found = _coding(self.layout, self.bits, self.symmetric)
        return found if self.block is None else replace(found, block=self.block)


@dataclass(frozen=True, slots=True)
class Rule:
    """What is said of the matrices that a rule matches by name."""

    matches: Callable[[str], Any]
    said: Said


@dataclass(frozen=True, slots=True, kw_only=True)
class Codings:
    """What is said of each matrix: by the first rule that matches its name, else by `rest`, which
    is None where every matrix in codes has a rule. `file` says it, for errors."""

    rules: tuple[Rule, ...] = ()
    rest: Said | None = Said()
    file: Path | None = None

    def says(self, module: str) -> Said | None:
        """What is said of a matrix, by the name of its module, or None."""
        return next((rule.said for rule in self.rules if rule.matches(module)), self.rest)

    def said(self, module: str) -> Said:
        """What is said of a matrix, by the name of its module. Raises ValueError if nothing is."""
        found = self.says(module)
        if found is None:
            raise ValueError(
                f"{module} is of no group of {self.file or QUANTIZED}: none has a target that is "
                "its name; correct the targets of config_groups"
            )
        return found

    def of(self, module: str) -> Coding:
        """The coding of a matrix. Raises ValueError, naming the file, if there is none."""
        with naming(self.file or QUANTIZED):
            return self.said(module).coding

    def block(self, module: str) -> Block:
        return self.said(module).block

    def inputs(self, module: str) -> str:
        return self.said(module).inputs

    def one(self, modules: Iterable[str]) -> Coding:
        """The one coding of several matrices. Raises ValueError for two."""
        found: dict[Said, str] = {}
        for module in modules:
            found.setdefault(self.said(module), module)
        if len(found) > 1:
            a, b = list(found.items())[:2]
            raise ValueError(
                f"{a[1]} is {words(a[0])} and {b[1]} is {words(b[0])}, by {self.file}; load "
                "layers whose experts are coded alike in one call, and others in another"
            )
        with naming(self.file or QUANTIZED):
            return next(iter(found), Said()).coding


@functools.cache
def _coding(layout: str, bits: int, symmetric: bool) -> Coding:
    if layout in ("gptq", "gptq_v2"):
        return replace(gptq(bits, plus_one=layout == "gptq"), symmetric=symmetric)
    if layout == "compressed":
        return replace(compressed(bits), symmetric=symmetric)
    others = {"": lambda: PLAIN, "awq": awq, "mxfp4": mxfp4_blocks, "pairs": int4_pairs}
    return others[layout]()


def words(said: Said) -> str:
    return f"{said.layout or 'plain'} of {said.bits} bits" if said.layout else "in no words"
