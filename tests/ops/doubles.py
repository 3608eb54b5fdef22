"""Calls of ops in float64: the samples of a tiny case whose tensors are no codes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from moe_ops.conformance.samples import Sample, samples
from moe_ops.registry.spec import DECODE_OPS, OPS, Op
from moe_ops.testing import BF16, F32, Case

TINY = Case(name="tiny", T=3, E=3, K=2, D=4, I=3)
ONE_TOKEN = Case(name="one_token", T=1, E=3, K=2, D=4, I=3)  # as some ops of a step want
FLOATS = (F32, BF16)
CODES_ALONE = ("quantized_linears", "normed_quantized_linears")  # which take no float64
EVERY = {n: op for n, op in (OPS | DECODE_OPS).items() if n not in CODES_ALONE}
# Rounding is flat, counts are integers, and what is added to float32 sums is no function's value.
WITHOUT = ("quantize", "expert_loads", "expert_wgrad_onto", "experts_accumulating")
WITH_GRADIENTS = {n: op for n, op in EVERY.items() if n not in WITHOUT}
OTHER_DTYPES = ("bfloat16", "float16", "float32")  # names of what results are rounded to


def calls(name: str) -> dict[str, list[Any]]:
    """The arguments of an op's samples in float64, by the samples' names; copies of floats."""
    return {s.name: [double(a) for a in s.args] for s in _samples(name)}


@functools.cache
def _samples(name: str) -> list[Sample]:
    """Those of them that are not rounded, which every test of an op asks for; with the values that
    a test's seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        tried = (samples(name, c, dtype) for c in (TINY, ONE_TOKEN) for dtype in FLOATS)
        found = next(filter(None, tried))
    return [s for s in found if not _is_rounded(name, s.args)]


def coded(name: str) -> dict[str, list[Any]]:
    """Those of the other samples of an op whose first tensor is a float, that one in float64."""
    found = {}
    for sample in samples(name, TINY, F32):
        if _has_codes(sample.args) and sample.args[0].dtype in FLOATS:
            found[sample.name] = [double(sample.args[0]), *sample.args[1:]]
    return found


def double(value: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A value with its floats in float64, or in another dtype."""
    if isinstance(value, Tensor) and value.dtype in (*FLOATS, torch.float64):
        return value.to(dtype)
    return [double(v, dtype) for v in value] if isinstance(value, list) else value


def is_float(value: Any) -> bool:
    """Whether a value is a float tensor, or a list with some."""
    if isinstance(value, list):
        return any(map(is_float, value))
    return isinstance(value, Tensor) and value.is_floating_point()


def floats(result: Any) -> list[Tensor]:
    """The float tensors of a result that hold anything."""
    whole = [result] if isinstance(result, Tensor) else result
    return [t for t in whole if t.is_floating_point() and t.numel()]


def first_of(op: Op) -> list[Any]:
    """One call of an op in float64, of which every row is specified."""
    found = calls(op.name)
    return found["full" if op.name == "dispatch_tokens" else next(iter(found))]


def _has_codes(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and a.dtype.itemsize == 1 and a.dtype is not torch.bool
               for a in args)  # fmt: skip


def _is_rounded(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a sample has codes, or names a dtype that rounds its result."""
    default = {p.default for p in EVERY[name].arguments.signature.parameters.values()}
    names = [a for a in args if isinstance(a, str) and a not in default]
    return _has_codes(args) or any(n in OTHER_DTYPES for n in names)
