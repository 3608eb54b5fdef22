"""What a device reaches, measured by a copy and a matrix product, and the floor that sets.

    floor = max(bytes / copy rate, flops / rate of the product)

Inputs in 8 bits are multiplied at a rate of their own.
A read alone can run a little faster than a copy, so a time may lie below its floor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ops.bench.formats import eight_bit, expert_bytes
from moe_ops.bench.timing import time_replays
from moe_ops.kernels import gpus
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes that must cross the memory's bus, and operations of the matrix products."""

    bytes: float
    flops: float
    eight_bit: bool = False  # of products whose inputs have 8 bits

    @staticmethod
    def mean(works: Sequence[Work]) -> Work:
        """The mean of works, which are all in 8 bits or all not."""
        n = len(works)
        return Work(
            bytes=sum(w.bytes for w in works) / n,
            flops=sum(w.flops for w in works) / n,
            eight_bit=works[0].eight_bit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """10^12 bytes a second of a copy, reads and writes counted, and 10^12 operations a second of a
    product; of one in 8 bits too, where it is known.
    """

    copy_tbs: float
    matmul_tflops: float
    matmul8_tflops: float | None = None

    @staticmethod
    def parse(text: str) -> Rates:
        """The rates in the text "COPY,MATMUL" or "COPY,MATMUL,MATMUL8". Raises ValueError for
        anything else, zero included."""
        try:
            found = [float(word) for word in text.split(",")]
        except ValueError:
            found = []
        if len(found) not in (2, 3) or not all(0 < rate < math.inf for rate in found):
            raise ValueError(
                f"rates {text!r} are not COPY_TBS,MATMUL_TFLOPS[,MATMUL8_TFLOPS], such as "
                "4.26,779 or 4.26,779,1430"
            )
        copy, matmul, *eight = found
        return Rates(
            copy_tbs=copy, matmul_tflops=matmul, matmul8_tflops=eight[0] if eight else None
        )

    def product(self, eight_bit: bool) -> float:
        """The rate of products. Raises ValueError if that in 8 bits is not known."""
        if not eight_bit:
            return self.matmul_tflops
        if self.matmul8_tflops is None:
            raise ValueError(
                "the rate of products in 8 bits is not known; give it as the third of --rates "
                "COPY_TBS,MATMUL_TFLOPS,MATMUL8_TFLOPS"
            )
        return self.matmul8_tflops

    def floor_us(self, work: Work) -> float:
        """The least time for some work."""
        return max(work.bytes / self.copy_tbs, work.flops / self.product(work.eight_bit)) * 1e-6

    def __str__(self) -> str:
        eight = "" if self.matmul8_tflops is None else f", in 8 bits {digits(self.matmul8_tflops)}"
        return (
            f"copy {digits(self.copy_tbs)} TB/s, "
            f"matrix product {digits(self.matmul_tflops)} TFLOP/s{eight}"
        )


def digits(rate: float) -> str:
    """Three digits, or a whole number: %g alone writes 1430 as 1.43e+03."""
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:.0f}"


def work_of(case: Case, ids_TK: Tensor, itemsize: int, quant: QuantConfig | None = None) -> Work:
    """The work of a gated layer for a routing: the weights of every expert that it touches, once,
    the tokens and the result; and two products of every pair of token and expert. `itemsize` is
    that of tokens, results and weights without a format.
    """
    T, K = ids_TK.shape
    active = int(ids_TK.unique().numel())
    return Work(
        bytes=float(active * expert_bytes(case, itemsize, quant) + 2 * T * case.D * itemsize),
        flops=2.0 * T * K * 3 * case.D * case.I,
        eight_bit=eight_bit(quant),
    )


# Bytes of one side of the copy, and the size of the square product; large enough to reach the rate.
SIZES = {"cuda": (2**32, 8192), "cpu": (2**26, 1024)}


def has_8bit_product(device: torch.device) -> bool:
    """Whether the rate in 8 bits can be measured: GPUs multiply float8 from Ada and Hopper on."""
    return (
        device.type == "cuda"
        and torch.cuda.is_available()
        and hasattr(torch, "_scaled_mm")
        and gpus.capability(device) >= (8, 9)
    )


def measure_rates(device: torch.device, dtype: torch.dtype, eight_bit: bool = False) -> Rates:
    """The rates of this device. Random data: zeros draw less power, and run faster for it."""
    size, n = SIZES[device.type]
    copy = _copy_us(device, size)
    product = _product_us(device, dtype, n)
    flops = 2.0 * n**3
    measured = eight_bit and has_8bit_product(device)
    return Rates(
        copy_tbs=2 * size / copy * 1e-6,
        matmul_tflops=flops / product * 1e-6,
        matmul8_tflops=flops / _product8_us(device, n) * 1e-6 if measured else None,
    )


def _copy_us(device: torch.device, size: int) -> float:
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return time_replays(lambda: target.copy_(source), 1, device).us


def _product_us(device: torch.device, dtype: torch.dtype, n: int) -> float:
    a, b = (torch.empty(n, n, dtype=dtype, device=device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    return time_replays(lambda: torch.mm(a, b, out=out), 1, device).us


def _product8_us(device: torch.device, n: int) -> float:
    """Microseconds of a float8 product with one scale for each side. It sums as fast as the device
    can, because a floor is computed from it."""
    a, b = (
        torch.empty(n, n, dtype=torch.bfloat16, device=device).normal_().to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    one = torch.ones((), device=device)

    def product() -> Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return time_replays(product, 1, device).us
