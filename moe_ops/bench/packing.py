"""How long `quantize_model` takes per gigabyte of bfloat16 weights, for every weight format."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_ops.bench.weights import matrices
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.schemes import SCHEMES
from moe_ops.testing import Case

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Seconds for the experts of one layer, `gigabytes` of bfloat16 before."""

    weight_format: str
    gigabytes: float
    seconds: float

    @property
    def seconds_per_gb(self) -> float:
        return self.seconds / self.gigabytes


def weight_formats() -> list[str]:
    """The weight formats of all schemes, each once."""
    found = [w for info in SCHEMES.values() for w in info.weight_formats if w]
    return list(dict.fromkeys(found))


def experts_in(case: Case, gigabytes: float) -> int:
    """How many bfloat16 experts of the case's sizes make that much, one at least."""
    return max(1, round(gigabytes * GB / (2 * 3 * case.I * case.D)))


def make_model(case: Case, E: int) -> Any:
    """A Qwen3-MoE model of one layer whose E experts have memory; the rest is on "meta".

    All experts hold the same generated values: what a value is does not change the time.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=case.D,
        num_hidden_layers=1,
        num_experts=E,
        num_experts_per_tok=1,
        moe_intermediate_size=case.I,
    )
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    module = model.model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(module, name).shape
        one = matrices(tuple(shape[1:]), generator).bfloat16()
        setattr(module, name, nn.Parameter(one.expand(shape).contiguous(), requires_grad=False))
    return model


def measure(
    case: Case, gigabytes: float, repeats: int, formats: Sequence[str] = ()
) -> list[Packing]:
    """The fastest of so many runs for each format (all, if none is named), the runs interleaved."""
    E = experts_in(case, gigabytes)
    best: dict[str, Packing] = {}
    for i in range(repeats):
        for w in formats or weight_formats():
            found = quantize(case, E, w)
            sys.stderr.write(f"{w}, run {i + 1} of {repeats}: {found.seconds:.2f} s\n")
            best[w] = min(best.get(w, found), found, key=lambda p: p.seconds)
    return list(best.values())


def quantize(case: Case, E: int, weight_format: str) -> Packing:
    """Time `quantize_model` on fresh weights."""
    from moe_ops.hf import quantize_model

    model = make_model(case, E)
    start = time.perf_counter()
    report = quantize_model(model, QuantConfig(weights=weight_format), progress=False)
    seconds = time.perf_counter() - start
    if report.kept:
        raise ValueError(f"{weight_format} does not fit {case.name}: {report.kept[0]}")
    gigabytes = report.bytes_before / GB
    return Packing(weight_format=weight_format, gigabytes=gigabytes, seconds=seconds)


def table(found: Sequence[Packing]) -> str:
    head = f"{'weights':<23}{'GB':>6}{'seconds':>9}{'seconds per GB':>16}"
    lines = [
        f"{p.weight_format:<23}{p.gigabytes:>6.2f}{p.seconds:>9.2f}{p.seconds_per_gb:>16.2f}"
        for p in found
    ]
    return "\n".join([head, *lines])
