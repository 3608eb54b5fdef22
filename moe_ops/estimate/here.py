"""This machine, measured for half a minute: its memory, products of matrices, and the experts of
the layers that are asked about."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_ops.checks.shapes import DTYPES
from moe_ops.estimate.fit import (
    BESIDE,
    LAUNCH_US,
    LAYERS,
    ONCE,
    ROWS,
    STATES,
    WAITS,
    Call,
    Times,
)
from moe_ops.estimate.measured import Formats, Rates
from moe_ops.estimate.shares import floor
from moe_ops.estimate.sizes import FLOAT, Experts, Sizes, bits_of
from moe_ops.estimate.work import EXPERTS, HEAD, LINEARS
from moe_ops.ops.experts import ExpertsCall
from moe_ops.planning import tune
from moe_ops.planning.cost import device_of
from moe_ops.planning.layers import Shape, arguments_of
from moe_ops.planning.tuned import Cell

SECONDS = 30.0  # in all
LEAST, SLICE = 3, 0.3  # calls, or seconds, of one measurement
# Bytes of the sides of a copy, and sizes of square products; both reach the rates.
COPIES, SQUARES = {"cuda": 2**31, "cpu": 2**27}, {"cuda": 8192, "cpu": 1024}
LINEAR_VALUES = 2**26  # of the weight that stands for linear layers
EXPERTS_BYTES = 2**29  # of made-up experts, at most; as few of a layer's as that takes
COPIES_BYTES = 2**28  # and at least, or caches would hold them
MOST_FLOPS = {"cuda": 1e13, "cpu": 2e10}  # of one call; longer ones are taken in proportion
LAUNCHES = 3  # of the op of experts on a GPU
# What the code of a layer takes a CPU besides its products, in calls of an operation on one row,
# and for each token in rows of it; of prompts fewer, which do more at once. Of one machine.
LAYER_CALLS, STEP_ROWS, PROMPT_ROWS = 600.0, 210.0, 20.0
MANY_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What was measured: microseconds of a layer's experts by number of tokens, microseconds of
    linear layers for each byte of weights by rows, of an operation on one row, and of that on each
    further one."""

    device: str
    rates: Rates
    is_gpu: bool
    experts_us: dict[tuple[Experts, int], float] = field(default_factory=dict)
    linear_us: dict[int, float] = field(default_factory=dict)
    call_us: float = 0.0
    row_us: float = 0.0
    guesses: tuple[str, ...] = ()

    def step(self, call: Call, expected: Times) -> Times:
        """A step with what was measured here in the place of what was expected."""
        parts = expected.parts | {EXPERTS: self._experts_ms(call, call.batch)}
        if not self.is_gpu:
            parts |= self._linears_ms(call, call.batch)
            parts |= {WAITS: 0.0, BESIDE: 0.0, LAYERS: self._layers_ms(call, STEP_ROWS, call.batch)}
        return Times(parts=parts)

    def prompt(self, call: Call, expected: Times) -> Times:
        """A prompt in the same way."""
        tokens = call.batch * call.prompt
        parts = expected.parts | {EXPERTS: self._experts_ms(call, tokens)}
        if not self.is_gpu:
            parts |= self._linears_ms(call, tokens)
            parts |= {ONCE: 0.0, ROWS: 0.0, STATES: 0.0}
            parts[LAYERS] = self._layers_ms(call, PROMPT_ROWS, tokens)
        return Times(parts=parts)

    def _layers_ms(self, call: Call, rows: float, tokens: int) -> float:
        of_layer = LAYER_CALLS * self.call_us + rows * tokens * self.row_us
        return call.sizes.depth * of_layer / 1e3

    def _experts_ms(self, call: Call, tokens: int) -> float:
        total = 0.0
        for layer in call.sizes.layers:
            if layer.experts is not None:
                own = {t: us for (e, t), us in self.experts_us.items() if e == layer.experts}
                nearest = min(own, key=lambda t: abs(t - tokens))
                least = [
                    floor(layer.experts, call.formats, t, call.rates).us for t in (tokens, nearest)
                ]
                us = own[nearest] * least[0] / least[1]
                if self.is_gpu:  # what its launches wait is counted with all others
                    us = max(us / 2, us - LAUNCHES * LAUNCH_US)
                total += layer.count * us / 1e3
        return total

    def _linears_ms(self, call: Call, tokens: int) -> dict[str, float]:
        nearest = min(self.linear_us, key=lambda rows: abs(rows - tokens))
        us = self.linear_us[nearest] * max(1.0, tokens / nearest)
        of_batch = self.linear_us[min(self.linear_us, key=lambda rows: abs(rows - call.batch))]
        sizes, bits = call.sizes, bits_of(call.formats.linears) / 8
        read = sum(x.count * (x.linear_values * bits + x.kept_bytes) for x in sizes.layers)
        head = sizes.head_values * bits_of(call.formats.head) / 8
        return {LINEARS: read * us / 1e3, HEAD: head * of_batch / 1e3}


def measure(
    sizes: Sizes, formats: Formats, tokens: Sequence[int], seconds: float = SECONDS
) -> Here:
    """Measure this machine, the GPU if there is one, with experts of these sizes for these numbers
    of tokens. What is not done in time is left out, the largest numbers first."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = time.perf_counter() + seconds
    named, gpu = device_of(device).name, device.type == "cuda"
    rates = _rates(device, named, _dtype(formats.experts))
    linear_us = {} if gpu else _linears(sizes.hidden, formats, tokens, rates)
    call_us, row_us = (0.0, 0.0) if gpu else _small_us(sizes.hidden)
    experts_us: dict[tuple[Experts, int], float] = {}
    late = False
    shapes = dict.fromkeys(x.experts for x in sizes.layers if x.experts is not None)
    for shape in shapes:
        calls = _calls(shape, formats, device)
        for count in sorted({_most(shape, t, device) for t in tokens}):
            if time.perf_counter() > end and any(e == shape for e, _ in experts_us):
                late = True
                break
            experts_us[shape, count] = _experts_us(shape, formats, calls, count, rates)
    guesses = [] if not late else ["half a minute did not suffice for prompts of so many tokens"]
    if not gpu and formats.linears not in DTYPES:
        guesses.append(f"linear layers in {formats.linears} were taken by their bytes")
    return Here(
        device=named, rates=rates, is_gpu=gpu, experts_us=experts_us, linear_us=linear_us,
        call_us=call_us, row_us=row_us, guesses=tuple(guesses),
    )  # fmt: skip


def _most(shape: Experts, tokens: int, device: torch.device) -> int:
    """So many tokens, or as many as a call can have."""
    return max(1, min(tokens, int(MOST_FLOPS[device.type] / (2 * shape.K * shape.values))))


def _dtype(format: str) -> torch.dtype:
    return DTYPES.get(format, DTYPES[FLOAT])


def _rates(device: torch.device, name: str, dtype: torch.dtype) -> Rates:
    size, n = COPIES[device.type] // 2, SQUARES[device.type]
    source = torch.empty(size // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    copied = _us(lambda: target.copy_(source), device)
    a, b = (torch.empty(n, n, dtype=dtype, device=device).normal_() for _ in range(2))
    flops = 2.0 * n**3 / _us(lambda: a @ b, device) * 1e6
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
    else:
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Rates(
        device=name, bytes_per_second=2 * size / copied * 1e6, flops=flops, flops_8_bit=flops,
        memory=memory,
    )  # fmt: skip


def _linears(
    hidden: int, formats: Formats, tokens: Sequence[int], rates: Rates
) -> dict[int, float]:
    """Microseconds for each byte of weights, by rows."""
    dtype = _dtype(formats.linears)
    w_NK = torch.empty(LINEAR_VALUES // hidden, hidden, dtype=dtype).normal_()
    most = max(1, int(MOST_FLOPS["cpu"] / (2 * LINEAR_VALUES)))
    found = {}
    for rows in sorted({min(t, most) for t in tokens}):
        x_TK = torch.randn(rows, hidden).to(dtype)
        product = functools.partial(torch.nn.functional.linear, x_TK, w_NK)
        found[rows] = _us(product) / w_NK.nbytes
    return found


def _small_us(hidden: int) -> tuple[float, float]:
    """Microseconds of an operation on one row, which is all but the call, and on a further one."""
    one, many = (
        _us(
            functools.partial(torch.nn.functional.silu, torch.randn(rows, hidden).to(_dtype(FLOAT)))
        )
        for rows in (1, MANY_ROWS)
    )
    return one, max(0.0, many - one) / (MANY_ROWS - 1)


def _calls(shape: Experts, formats: Formats, device: torch.device) -> list[ExpertsCall]:
    """Calls on made-up experts, as many as a layer has if memory is to suffice, with weights that
    take turns."""
    bits = bits_of(formats.weights)
    one = 3 * shape.D * shape.I * max(2.0, bits / 8)
    experts = min(shape.E, max(shape.K, int(EXPERTS_BYTES / one)))
    of_shape = Shape(
        E=experts, K=shape.K, D=shape.D, I=shape.I, device=device.type,
        dtype=formats.weights if formats.weights in DTYPES else FLOAT,
        w_format="" if formats.weights in DTYPES else formats.weights, x_format=formats.inputs,
    )  # fmt: skip
    copies = max(1, min(tune.TURNS, int(COPIES_BYTES / (experts * one))))
    return [arguments_of(of_shape) for _ in range(copies)]


def _experts_us(
    shape: Experts, formats: Formats, calls: Sequence[ExpertsCall], tokens: int, rates: Rates
) -> float:
    """The microseconds of the fastest backend, of all of a layer's experts: in proportion where
    there are fewer, or where they hold other tensors besides."""
    backends = tune.usable_backends(calls[0])
    able = [name for name, most in backends.items() if most is None or tokens <= most]
    us = min(
        tune.measure(calls, Cell(tokens=tokens, routing="uniform", backend=name)) for name in able
    )
    made = replace(shape, E=calls[0].w13_EFD.shape[0], values=3 * shape.D * shape.I)
    whole, part = (floor(e, formats, tokens, rates).us for e in (shape, made))
    return us * whole / part


def _us(call: Callable[[], Tensor], device: torch.device | None = None) -> float:
    """The microseconds of the median call."""
    gpu = device is not None and device.type == "cuda"
    taken: list[float] = []
    start = time.perf_counter()
    while len(taken) <= LEAST or time.perf_counter() - start < SLICE:
        before = time.perf_counter()
        call()
        if gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken[1:]) * 1e6
