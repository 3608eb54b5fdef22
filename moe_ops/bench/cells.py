"""One layer after another, at numbers of tokens and routings: check each implementation, time it.

A call is one layer, from logits (ours) or from ids and weights (transformers') to the result. The
calls of a cell take turns over sets of inputs and copies of weights; see `inputs.py`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_ops.bench import numerics, progress
from moe_ops.bench.contenders import Contender, Refused, backends_of
from moe_ops.bench.inputs import (
    Rotation,
    Routed,
    Weights,
    make_routed,
    make_weights,
    rotate,
    sets_for,
)
from moe_ops.bench.rates import Rates, Work, work_of
from moe_ops.bench.timing import Run, capture, rounds_for, time_replays
from moe_ops.planning.layers import ROUTINGS
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Case, poisoned

SEED = 0

Call = Callable[[], Tensor]
Key = tuple[str, int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One implementation of one layer at one number of tokens and one routing."""

    layer: str
    tokens: int
    routing: str
    contender: str
    ran: dict[str, str] = field(default_factory=dict)  # backends by op; empty: not our code
    copies: int  # of the weights
    sets: int  # of inputs, with a routing each
    cold: bool  # whether the rotation keeps weights out of the cache
    bytes: float  # of a call, the mean over the sets
    flops: float
    floor_us: float
    given_floor_us: float | None = None  # by the rates that were given, not measured
    error: float | None = None  # the largest of the sets
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    first_s: float | None = None  # the first call, with what was compiled for it
    wrong: str = ""  # why it was not timed
    refused: str = ""  # or why it does not take the layer

    @property
    def key(self) -> Key:
        """What one run measures once."""
        return self.layer, self.tokens, self.routing, self.contender

    @property
    def timed_us(self) -> float:
        """The measured microseconds. Raises ValueError for a cell that was not timed."""
        if self.us is None:
            raise ValueError(
                f"{self.contender} was not timed at {self.tokens} tokens: "
                + (self.wrong or self.refused)
            )
        return self.us

    @property
    def untimed(self) -> str:
        """What stands in a table in the place of a time."""
        return "-" if self.refused else "wrong"

    @property
    def tbs(self) -> float:
        return self.bytes / self.timed_us * 1e-6

    @property
    def tflops(self) -> float:
        return self.flops / self.timed_us * 1e-6

    @property
    def share(self) -> float:
        """The floor's time as a share of the measured time."""
        return self.floor_us / self.timed_us

    @property
    def given_share(self) -> float | None:
        """The floor's time by the rates that the user gave, as a share of the measured time; None
        without such rates, or without a time."""
        return self.given_floor_us / self.us if self.given_floor_us and self.us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to measure, but for the cells of `done`. `contenders` gives those of a layer, ours
    first.
    """

    layers: Sequence[Case]
    tokens: Sequence[int]
    routings: Sequence[str]
    contenders: Callable[[Case], Sequence[Contender]]
    dtype: torch.dtype
    device: torch.device
    seconds: float | None = None  # that a measurement loads the device; None: see `timing`
    quant: QuantConfig | None = None  # how weights and inputs are quantised
    done: Set[Key] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turns:
    """The inputs of a cell, and what is right for each of them."""

    inputs: list[tuple[Weights, Routed]]
    wants: list[Tensor]
    rotation: Rotation
    work: Work


@torch.inference_mode()
def measure(grid: Grid, rates: Rates, given: Rates | None = None) -> Iterator[Cell]:
    """The cells of a grid, as they are done."""
    for case in grid.layers:
        yield from _layer(grid, case, rates, given)
        # What was compiled for a layer, and its weights, are of no use to the next.
        torch._dynamo.reset()
        gc.collect()
        if grid.device.type == "cuda":
            torch.cuda.empty_cache()
    progress.done()


def _layer(grid: Grid, case: Case, rates: Rates, given: Rates | None) -> Iterator[Cell]:
    contenders = grid.contenders(case)
    g = torch.Generator(device=grid.device).manual_seed(SEED)
    copies: list[Weights] = []
    for T in grid.tokens:
        for routing in grid.routings:
            missing = [c for c in contenders if (case.name, T, routing, c.name) not in grid.done]
            if not missing:
                continue
            progress.tell(f"{case.name}, {T} tokens {routing}: inputs")
            turns = make_turns(grid, case, (T, routing), copies, g)
            for contender in missing:
                cell = untimed((case.name, T, routing, contender.name), turns, rates, given)
                progress.tell(f"{case.name}, {T} tokens {routing}: {contender.name}")
                yield fill(cell, contender, turns, grid)


def untimed(key: Key, turns: Turns, rates: Rates, given: Rates | None = None) -> Cell:
    """The cell of this key before it is measured."""
    layer, tokens, routing, contender = key
    return Cell(
        layer=layer,
        tokens=tokens,
        routing=routing,
        contender=contender,
        copies=turns.rotation.copies,
        sets=turns.rotation.sets,
        cold=turns.rotation.cold,
        bytes=turns.work.bytes,
        flops=turns.work.flops,
        floor_us=rates.floor_us(turns.work),
        given_floor_us=None if given is None else given.floor_us(turns.work),
    )


def make_turns(
    grid: Grid, case: Case, place: tuple[int, str], copies: list[Weights], g: torch.Generator
) -> Turns:
    """Inputs that take turns, of so many tokens and a routing. `copies` are the layer's weights so
    far; more are added if needed.
    """
    T, routing = place
    drawn = inputs_of(place, grid.device)
    count = sets_for(T, grid.quant)
    sets = [make_routed(case, T, routing, grid.dtype, drawn) for _ in range(count)]
    works = [work_of(case, r.ids_TK, grid.dtype.itemsize, grid.quant) for r in sets]
    if not copies:
        copies.append(make_weights(case, grid.dtype, g, grid.quant))
    # What is kept already counts as free: it is part of the rotation.
    rotation = rotate(works, copies[0].nbytes, grid.device, len(copies), most=count)
    while len(copies) < rotation.copies:
        copies.append(make_weights(case, grid.dtype, g, grid.quant))
    inputs = [(copies[i % rotation.copies], sets[i]) for i in range(rotation.sets)]
    return Turns(
        inputs=inputs,
        wants=[numerics.want(weights, routed) for weights, routed in inputs],
        rotation=rotation,
        work=Work.mean(works[: rotation.sets]),
    )


def inputs_of(place: tuple[int, str], device: torch.device) -> torch.Generator:
    """Draws that do not depend on what was measured before: a run that goes on where one was
    stopped gives a cell the routings that it would have had.
    """
    T, routing = place
    seed = SEED + len(ROUTINGS) * T + ROUTINGS.index(routing)
    return torch.Generator(device=device).manual_seed(seed)


def fill(cell: Cell, contender: Contender, turns: Turns, grid: Grid) -> Cell:
    """The cell with a time, or with the reason why there is none."""
    calls = [functools.partial(contender.call, *given) for given in turns.inputs]
    ran: dict[str, str] = {}
    first_s = None
    try:
        with contender.around():
            ran, first_s = first_call(calls[0], contender, grid.device)
            error = check(calls, contender, turns, grid)
            run, count, of_graph = prepare(calls, turns, grid, cell.floor_us)
            timing = time_replays(run, count, grid.device, grid.seconds)
    except Refused as reason:
        return replace(cell, refused=str(reason))
    except Exception as reason:  # whatever it is, the others are still measured
        return replace(cell, ran=ran, first_s=first_s, wrong=f"{type(reason).__name__}: {reason}")
    return replace(
        cell,
        ran=ran,
        first_s=first_s,
        error=max(error, of_graph),
        us=timing.us,
        low_us=timing.low_us,
        high_us=timing.high_us,
    )


def first_call(
    call: Call, contender: Contender, device: torch.device
) -> tuple[dict[str, str], float]:
    """The backends of ours that a call runs, and the seconds that it takes."""
    ran: dict[str, str] = {}
    start = time.perf_counter()
    if contender.compiled:
        call()
    else:
        ran = backends_of(call)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return ran, time.perf_counter() - start


def check(calls: Sequence[Call], contender: Contender, turns: Turns, grid: Grid) -> float:
    """The largest error of the calls. Raises AssertionError if one is wrong."""
    # Compiled code allocates past torch.empty, and would be compiled anew for this.
    around = contextlib.nullcontext() if contender.compiled else poisoned()
    with around:
        return _compare((call() for call in calls), turns, grid)


def prepare(
    calls: Sequence[Call], turns: Turns, grid: Grid, call_us: float
) -> tuple[Run, int, float]:
    """What to time, how many calls that is, and its largest error: on a GPU a graph of the calls,
    whose results are filled with NaN and compared again.
    """
    if grid.device.type != "cuda":
        return lambda: [call() for call in calls], len(calls), 0.0
    for call in calls:  # as they will be captured; they were checked under another mode
        call()
    rounds = rounds_for(len(calls), call_us)
    replay, results = capture(calls, rounds)
    for result in results:
        result.fill_(math.nan)
    replay()
    return replay, rounds * len(calls), _compare(results, turns, grid)


def _compare(results: Iterable[Tensor], turns: Turns, grid: Grid) -> float:
    limit = numerics.limit_of(grid.dtype, grid.quant, len(turns.wants[0]))
    pairs = enumerate(zip(results, turns.wants, strict=True))
    return max(numerics.check(got, want, grid.dtype, f"set {i}", limit) for i, (got, want) in pairs)
