"""The stages of a layer alone, each on its backends: checked, then timed against their floor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moe_ops.bench import progress
from moe_ops.bench.inputs import Rotation, Routed, Weights, make_routed, make_weights, rotate
from moe_ops.bench.numerics import exact_float32, want_products
from moe_ops.bench.rates import Rates, Work
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import capture, rounds_for, time_replays
from moe_ops.checks.shapes import FLOATS
from moe_ops.ops import activate, combine, dispatch, expert_gemm, quantize, route
from moe_ops.planning.cost import cost
from moe_ops.registry.spec import REFERENCE, Op
from moe_ops.testing import Case, Tol, assert_close, float32, poisoned, tolerance

EXACT = Tol(0.0, "integers are exact")
SEED = 0
MOST_TURNS = 32
INPUTS = ("float8_e4m3fn:tensor", "float8_e4m3fn:row", "float8_e4m3fn:1x128", "int8:row", "mxfp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a measurement in the grid."""

    layer: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """A call of an op, and what is right for it."""

    place: Place
    name: str
    op: Op
    args: tuple[Any, ...]
    want: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCell:
    """One stage on one backend. Times in microseconds; None: not timed, for the reason `wrong`."""

    layer: str
    tokens: int
    stage: str
    backend: str
    copies: int  # of the arguments, which take turns
    cold: bool
    bytes: float
    flops: float
    floor_us: float
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    wrong: str = ""


@torch.inference_mode()
def measure(
    cases: Sequence[Case],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    rates: Rates,
    backends: Sequence[str] = (),
) -> Iterator[StageCell]:
    """Every stage on the named backends that can run it; on all but slow definitions, if none is
    named.
    """
    g = torch.Generator(device=device).manual_seed(SEED)
    for case in cases:
        weights = make_weights(case, dtype, g)
        for T in tokens:
            place = Place(layer=case.name, tokens=T)
            # Uniform, as the costs of the ops take it to be.
            routed = make_routed(case, T, "uniform", dtype, g)
            for stage in stages(place, case, weights, routed):
                for backend in usable(stage, device.type, backends):
                    progress.tell(f"{case.name}, {T} tokens: {stage.name} on {backend}")
                    yield fill(plan(stage, backend, rates, device), stage, device)
    progress.done()


def stages(place: Place, case: Case, weights: Weights, routed: Routed) -> Iterator[Stage]:
    """The stages, the product twice, each on what the definition of the one before gives; and the
    tokens in the formats in which inputs are mostly quantised.
    """
    ids, x = routed.ids_TK, routed.x_TD

    def stage(name: str, op: Op, args: tuple[Any, ...], want: Tensor | None = None) -> Stage:
        if want is None:
            with exact_float32():
                found = results_of(op, op.reference(*(float32(a) for a in args)))
        else:
            found = (want,)
        return Stage(place=place, name=name, op=op, args=args, want=found)

    routing = route.call(routed.logits_TE, case.K, renormalize=True)
    yield stage("route", route, route.arguments.flat(routing))
    for format in INPUTS:
        yield stage(f"quantize {format}", quantize, (x, format))
    yield stage("dispatch", dispatch, (x, ids, case.E))
    x_RD, rows_R, ends_E = dispatch.reference(x, ids, case.E)
    y_RF = want_products(x_RD, weights.w13_EFD, ends_E)
    yield stage("expert_gemm 13", expert_gemm, (x_RD, weights.w13_EFD, ends_E), y_RF)
    y_RF = y_RF.to(x.dtype)
    yield stage("activate", activate, (y_RF,))
    h_RI = activate.reference(y_RF)
    y_RD = want_products(h_RI, weights.w2_EDI, ends_E)
    yield stage("expert_gemm 2", expert_gemm, (h_RI, weights.w2_EDI, ends_E), y_RD)
    yield stage("combine", combine, (y_RD.to(x.dtype), routed.weights_TK, rows_R))


def results_of(op: Op, got: Any) -> tuple[Tensor, ...]:
    """The results in the order in which they are compared: equal logits may change places."""
    if op is route:
        weights_TK, ids_TK = got
        sorted_TK, order_TK = ids_TK.sort(dim=-1)
        return weights_TK.gather(1, order_TK), sorted_TK
    return (got,) if isinstance(got, Tensor) else tuple(got)


def usable(stage: Stage, device: str, names: Sequence[str]) -> list[str]:
    """The backends to time. The definition of `expert_gemm` gathers a weight for every row, so it
    is left out unless it is named.
    """
    found = []
    rows, call = stage.args[0].shape[0], stage.op.call(*stage.args)
    for backend in stage.op.candidates(device):
        default = backend.name != REFERENCE or stage.op is not expert_gemm
        wanted = backend.name in names if names else default
        if wanted and backend.refusal(device, rows, call) is None:
            found.append(backend.name)
    return found


def plan(stage: Stage, backend: str, rates: Rates, device: torch.device) -> StageCell:
    """The cell without its time."""
    found = cost(stage.op.name, stage.op.call(*stage.args), stage.args[0].shape[0])
    assert found is not None, "sizes are numbers outside of a compilation"
    work = Work(bytes=found.bytes, flops=found.flops)
    rotation = turns(stage, work, device)
    return StageCell(
        **asdict(stage.place),
        stage=stage.name,
        backend=backend,
        copies=rotation.copies,
        cold=rotation.cold,
        bytes=work.bytes,
        flops=work.flops,
        floor_us=rates.floor_us(work),
    )


def turns(stage: Stage, work: Work, device: torch.device) -> Rotation:
    """How many copies of the arguments take turns."""
    size = sum(a.nbytes for a in stage.args if isinstance(a, Tensor))
    return rotate([work] * MOST_TURNS, size, device, kept=1, most=MOST_TURNS)


def fill(cell: StageCell, stage: Stage, device: torch.device) -> StageCell:
    """The cell with a time, or with the reason why there is none."""
    op, run = stage.op, stage.op.backends[cell.backend].run
    given = op.call(*stage.args)
    try:
        with poisoned():
            check(stage, run(given), cell.backend)
        calls: list[Callable[[], Any]] = [functools.partial(run, given)]
        for _ in range(cell.copies - 1):
            copy = (a.clone() if isinstance(a, Tensor) else a for a in stage.args)
            calls.append(functools.partial(run, op.call(*copy)))
        if device.type == "cuda":
            for call in calls:
                call()
            rounds = rounds_for(len(calls), cell.floor_us)
            replay, results = capture(calls, rounds)
            for t in tree_leaves(results):
                fill_(t)
            replay()
            for got in results:
                check(stage, got, cell.backend)
            timing = time_replays(replay, rounds * len(calls), device)
        else:
            timing = time_replays(lambda: [call() for call in calls], len(calls), device)
    except Exception as reason:  # whatever it is, the others are still measured
        return replace(cell, wrong=f"{type(reason).__name__}: {reason}")
    return replace(cell, us=timing.us, low_us=timing.low_us, high_us=timing.high_us)


def fill_(t: Tensor) -> None:
    """Write what no right result is: NaN, or where a dtype has none the largest number."""
    if t.dtype.itemsize == 1:
        t.view(torch.uint8).fill_(torch.iinfo(torch.uint8).max)
    else:
        t.fill_(math.nan if t.is_floating_point() else torch.iinfo(t.dtype).max)


def check(stage: Stage, got: Any, backend: str) -> None:
    """Raise AssertionError unless every result is as close to float32 as TOL asks."""
    pairs = zip(results_of(stage.op, got), stage.want, strict=True)
    for i, (g, w) in enumerate(pairs):
        given = stage.args[0].dtype
        tol = tolerance(stage.op.name, g.dtype, given) if g.dtype in FLOATS else EXACT
        assert_close(g, w, tol, f"result {i} of {stage.name} on {backend}")


def table(cells: Sequence[StageCell]) -> str:
    """A line for each cell."""
    head = ["stage", "backend", "layer", "tokens"]
    rows = [[*head, "µs", "TB/s", "TFLOP/s", "floor µs", "% of floor"]]
    for c in cells:
        row = [c.stage, c.backend, c.layer, str(c.tokens)]
        if c.us is None:
            rows.append([*row, "WRONG", "", "", f"{c.floor_us:.1f}", ""])
            continue
        mark = "" if c.cold else "~"
        row += [f"{mark}{c.us:.1f}", f"{c.bytes / c.us * 1e-6:.3g}"]
        row += [f"{c.flops / c.us * 1e-6:.3g}", f"{c.floor_us:.1f}"]
        rows.append([*row, f"{100 * c.floor_us / c.us:.1f}"])
    lines = [aligned(rows)]
    if any(not c.cold for c in cells):
        lines.append("~ some arguments may have come from the cache: they are too small")
    lines += [
        f"WRONG, not timed: {c.stage} on {c.backend}, {c.layer}, {c.tokens} tokens: {c.wrong}"
        for c in cells
        if c.wrong
    ]
    return "\n".join(lines)
