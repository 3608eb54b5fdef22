"""The experts of one layer after another that train: check each implementation, then time them in
turns.

A call is a forward that autograd records, alone or with its backward, from a routing on. Nothing is
captured: a training step is queued by its host, and so is this.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_ops.bench import progress
from moe_ops.bench.contenders import backends_of
from moe_ops.bench.memory import peak_bytes
from moe_ops.bench.rates import Rates
from moe_ops.bench.timing import Run, Timing, time_turns
from moe_ops.bench.train_contenders import TrainContender
from moe_ops.bench.train_inputs import (
    OUT,
    Tensors,
    TrainLayer,
    make_parameters,
    make_tensors,
    want,
)
from moe_ops.testing import TOL, assert_close, poisoned

# Products of forward and backward: each of the two has a gradient by its input and one by its
# weight, of which frozen experts have the first alone.
PRODUCTS, FROZEN_PRODUCTS = 6, 4
AT_ONCE = 2**26  # elements that are compared, in float64, at a time

Place = tuple[str, int, bool]  # a layer, tokens, and whether its experts are frozen
Key = tuple[str, int, bool, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCell:
    """One implementation of a layer at one number of tokens; without times, why there are none."""

    layer: str
    tokens: int
    frozen: bool
    contender: str
    products_us: float  # that all products take at the measured rate
    ran: dict[str, str] = field(default_factory=dict)  # backends by op; empty: not our eager code
    forward: Timing | None = None
    both: Timing | None = None  # forward and backward
    peak_bytes: int | None = None  # at the most, beside weights, gradients and inputs
    saved_bytes: int | None = None  # for the backward, beside weights and inputs
    wrong: str = ""
    refused: str = ""

    @property
    def key(self) -> Key:
        """What one run measures once."""
        return self.layer, self.tokens, self.frozen, self.contender

    @property
    def products(self) -> int:
        return FROZEN_PRODUCTS if self.frozen else PRODUCTS

    @property
    def share(self) -> float | None:
        """The products' time as a share of the measured time of forward and backward."""
        return None if self.both is None else self.products_us / self.both.us


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGrid:
    """What to measure; each implementation runs `repeats` times."""

    layers: Sequence[TrainLayer]
    tokens: Sequence[int]
    contenders: Sequence[TrainContender]
    dtype: torch.dtype
    device: torch.device
    frozen: bool
    repeats: int

    def places(self) -> list[Place]:
        return [(layer.name, T, self.frozen) for layer in self.layers for T in self.tokens]

    def wanted(self, layer: TrainLayer) -> list[TrainContender]:
        """The implementations that compute a layer."""
        return [c for c in self.contenders if c.refusal(layer, self.device) is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """A forward of an implementation, and one with the backward behind it."""

    forward: Run
    both: Run


def measure(grid: TrainGrid, rates: Rates, places: Sequence[Place]) -> Iterator[list[TrainCell]]:
    """The cells of each of these places, as they are done."""
    for layer in grid.layers:
        here = [T for T in grid.tokens if (layer.name, T, grid.frozen) in places]
        if not here:
            continue
        parameters = make_parameters(layer, grid.dtype, grid.device, grid.frozen)
        for T in here:
            progress.tell(f"{layer.name}, {T} tokens: inputs")
            tensors = make_tensors(layer, T, grid.dtype, parameters)
            yield _place(grid, layer, tensors, rates)
            _clear(grid.device)  # what was compiled for a number of tokens is of no more use
    progress.done()


def _clear(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _place(grid: TrainGrid, layer: TrainLayer, tensors: Tensors, rates: Rates) -> list[TrainCell]:
    T = tensors.x_TD.shape[0]
    right = want(layer, tensors)
    cells: dict[str, TrainCell] = {}
    ready: dict[str, Calls] = {}
    for contender in grid.contenders:
        progress.tell(f"{layer.name}, {T} tokens: {contender.name}")
        cell = _untimed(grid, layer, T, contender, rates)
        if not cell.refused:
            try:
                cell, ready[contender.name] = _checked(cell, contender, layer, tensors, right)
            except Exception as reason:  # whatever it is, the others are still measured
                cell = replace(cell, wrong=f"{type(reason).__name__}: {reason}")
        cells[contender.name] = cell
    del right  # as large as the gradients in float32
    for name, timings in _timed(grid, ready).items():
        cells[name] = replace(cells[name], forward=timings[0], both=timings[1])
    return list(cells.values())


def _untimed(
    grid: TrainGrid, layer: TrainLayer, T: int, contender: TrainContender, rates: Rates
) -> TrainCell:
    products = FROZEN_PRODUCTS if grid.frozen else PRODUCTS
    return TrainCell(
        layer=layer.name,
        tokens=T,
        frozen=grid.frozen,
        contender=contender.name,
        products_us=layer.flops(T, products) / rates.matmul_tflops * 1e-6,
        refused=contender.refusal(layer, grid.device) or "",
    )


def _checked(
    cell: TrainCell,
    contender: TrainContender,
    layer: TrainLayer,
    tensors: Tensors,
    right: dict[str, Tensor],
) -> tuple[TrainCell, Calls]:
    """The cell with what is measured once, and the calls to time. Raises AssertionError if the
    result or a gradient is wrong."""
    calls = calls_of(contender.forward(layer, tensors), tensors)
    if not contender.compiled:
        cell = replace(cell, ran=backends_of(calls.both))
    # Compiled code allocates past torch.empty, and would be compiled anew for this.
    with contextlib.nullcontext() if contender.compiled else poisoned():
        check(calls.both(), right, tensors.x_TD.dtype)
    saved = saved_bytes(calls.forward, tensors.all())
    return replace(cell, saved_bytes=saved, peak_bytes=extra_bytes(calls.both, tensors)), calls


def calls_of(forward: Callable[[], Tensor], tensors: Tensors) -> Calls:
    wanted = tensors.wanted()

    def both() -> dict[str, Tensor]:
        out_TD = forward()
        grads = torch.autograd.grad(out_TD, list(wanted.values()), tensors.grad_TD)
        return {OUT: out_TD.detach(), **dict(zip(wanted, grads, strict=True))}

    return Calls(forward=forward, both=both)


def check(got: dict[str, Tensor], right: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Raise AssertionError unless the result and every gradient are as in float32, as far as the
    table of tolerances allows. Gradients of weights come after all roundings of a backward."""
    for name, found in got.items():
        if found.dtype != dtype:
            raise AssertionError(f"{name}: {found.dtype}, wanted {dtype}")
        tol = TOL["experts" if name == OUT else "experts_backward", dtype]
        what = "the result" if name == OUT else f"the gradient of {name}"
        pieces = max(1, found.numel() // AT_ONCE)
        pairs = zip(found.chunk(pieces), right[name].chunk(pieces), strict=True)
        for i, (part, right_part) in enumerate(pairs):
            assert_close(part, right_part, tol, f"{what}, piece {i}" if pieces > 1 else what)


def saved_bytes(forward: Run, given: Sequence[Tensor]) -> int:
    """The bytes that autograd keeps of a forward until its backward, but for what was given."""
    before = {t.untyped_storage().data_ptr() for t in given}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in before:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = forward()  # which holds what was saved: no address comes twice
    del out
    return sum(kept.values())


def extra_bytes(both: Run, tensors: Tensors) -> int:
    """The most bytes that a step holds at one time, but for gradients and what was given."""
    gradients = sum(t.nbytes for t in tensors.wanted().values())
    return max(0, peak_bytes(both, tensors.x_TD.device) - gradients)


def _timed(grid: TrainGrid, ready: dict[str, Calls]) -> dict[str, tuple[Timing, Timing]]:
    """Times of forward, and of forward and backward, of calls that take turns."""
    if not ready:
        return {}
    progress.tell("timing")
    found = [
        time_turns([getattr(calls, part) for calls in ready.values()], grid.repeats, grid.device)
        for part in ("forward", "both")
    ]
    return dict(zip(ready, zip(*found, strict=True), strict=True))
