"""What a device reaches, measured by a copy and a matrix product, and the floor that sets.

    floor = max(bytes / copy rate, flops / rate of the product)

A read alone can run a little faster than a copy, so a time may lie below its floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.bench.timing import time_replays
from moe_ops.testing import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes that must cross the memory's bus, and operations of the matrix products."""

    bytes: float
    flops: float

    @staticmethod
    def mean(works: Sequence[Work]) -> Work:
        n = len(works)
        return Work(bytes=sum(w.bytes for w in works) / n, flops=sum(w.flops for w in works) / n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """10^12 bytes a second of a copy, reads and writes counted, and 10^12 operations a second."""

    copy_tbs: float
    matmul_tflops: float

    @staticmethod
    def parse(text: str) -> Rates:
        """Of "COPY,MATMUL". Raises ValueError for anything else, zero included."""
        try:
            copy, matmul = (float(word) for word in text.split(","))
        except ValueError:
            copy = matmul = 0.0
        if not (copy > 0 and matmul > 0):
            raise ValueError(f"rates {text!r} are not COPY_TBS,MATMUL_TFLOPS, such as 4.26,779")
        return Rates(copy_tbs=copy, matmul_tflops=matmul)

    def floor_us(self, work: Work) -> float:
        """The least time for some work."""
        return max(work.bytes / self.copy_tbs, work.flops / self.matmul_tflops) * 1e-6

    def __str__(self) -> str:
        return f"copy {self.copy_tbs:.3g} TB/s, matrix product {self.matmul_tflops:.3g} TFLOP/s"


def work_of(case: Case, ids_TK: Tensor, itemsize: int) -> Work:
    """The work of a gated layer for a routing: the weights of every expert that it touches, once,
    the tokens and the result; and two products of every pair of token and expert.
    """
    T, K = ids_TK.shape
    active = int(ids_TK.unique().numel())
    weights = active * 3 * case.I * case.D
    return Work(
        bytes=float((weights + 2 * T * case.D) * itemsize), flops=2.0 * T * K * 3 * case.D * case.I
    )


# Bytes of one side of the copy, and the size of the square product; large enough to reach the rate.
SIZES = {"cuda": (2**32, 8192), "cpu": (2**26, 1024)}


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of this device. Random data: zeros draw less power, and run faster for it."""
    size, n = SIZES[device.type]
    copy = _copy_us(device, size)
    product = _product_us(device, dtype, n)
    return Rates(copy_tbs=2 * size / copy * 1e-6, matmul_tflops=2.0 * n**3 / product * 1e-6)


def _copy_us(device: torch.device, size: int) -> float:
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return time_replays(lambda: target.copy_(source), 1, device).us


def _product_us(device: torch.device, dtype: torch.dtype, n: int) -> float:
    a, b = (torch.empty(n, n, dtype=dtype, device=device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    return time_replays(lambda: torch.mm(a, b, out=out), 1, device).us
