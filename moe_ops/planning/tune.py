"""`tune`: measure the backends of a model's layers on this device, for the plan to go by."""

from __future__ import annotations

import functools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from moe_ops.checks.options import check_flag, check_ints, check_text, check_writable
from moe_ops.checks.shapes import check_choice
from moe_ops.checks.signature import described
from moe_ops.interop.interrupts import let_through
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.planning.cost import device_of
from moe_ops.planning.layers import (
    ROUTINGS,
    Shape,
    arguments_of,
    calls_of,
    fake_arguments_of,
    routed,
)
from moe_ops.planning.tuned import Cell, TunedLayer, layer_of_call, read, write
from moe_ops.registry.registration import ANY_ROWS
from moe_ops.registry.spec import REFERENCE
from moe_ops.terminal import rewrite

log = logging.getLogger("moe_ops")

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
# Inputs and weights that take turns, so that no call finds those of the last one in a cache.
TURNS = 8
COPIES_BYTES = 2**29  # of made-up weights, at least; more than caches hold
SECONDS, LEAST_CALLS, MOST_CALLS = 0.3, 5, 200  # of one measurement

Run = Callable[[], Any]


def tune(
    layers: nn.Module | Shape | Sequence[Shape],
    table: str | Path,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    tokens: Iterable[int] = TOKENS,
    routings: Iterable[str] = ROUTINGS,
    progress: TextIO | None = sys.stderr,
    paths: bool = False,
) -> Path:
    """Measure every backend of `experts` for the layers of a model, and write the times to a table.

        moe_ops.tune(moe_ops.optimize(model), "table.json")
        moe_ops.compile(model, tuned="table.json")

    layers: a model that calls `experts`, as `optimize` makes one of transformers do, called once
    with `inputs` (transformers' dummy inputs if left out) to see which layers it has; or shapes,
    whose weights are made up. Where weights are prepared, the backends that read their layout are
    measured. Each is measured at each number of tokens, with experts chosen evenly ("uniform") and
    by a power law ("zipf"). What the table holds already is not measured again, and a time is
    written as soon as it is known: a run that was interrupted goes on where it was.
    With `paths` each way in which a backend runs calls is measured, too, as a backend of its own
    name, such as "triton.grouped/wgmma".
    `progress` gets a line at the end, and if it is a terminal one before it that is rewritten; None
    for silence. Returns the table's path.

    Raises RuntimeError inside a CUDA graph capture or a compilation; ValueError for an unknown
    routing, for a model that never calls `experts` and for one without inputs; before anything is
    measured TypeError, ValueError or OSError for what an argument cannot be.
    """
    _require_eager()
    routings, tokens = _routings(routings), sorted(set(check_ints("tokens", tokens, least=1)))
    _require_layers(layers)
    _require_inputs(inputs)
    if progress is not None and not callable(getattr(progress, "write", None)):
        raise TypeError(f"progress must be a file to write to or None, got {described(progress)}")
    check_flag("paths", paths)
    check_writable("table", table)
    path = Path(table)
    times = read(path) if path.exists() else {}
    with torch.no_grad():  # what backends keep is written to in any mode later
        for layer, backends, make in _layers(layers, inputs, paths):
            known = times.setdefault(layer, {})
            cells = [
                Cell(tokens=count, routing=routing, backend=backend)
                for count in tokens
                for routing in routings
                for backend, possible in backends.items()
                if possible is None or count <= possible
            ]
            missing = [cell for cell in cells if cell not in known]
            if missing:
                log.info("tune measures %d times of %s", len(missing), _words(layer))
            calls = make() if missing else []
            for i, cell in enumerate(missing, 1):
                known[cell] = measure(calls, cell)
                write(path, times)
                if progress is not None:
                    told = f"{_words(layer)}: {i} of {len(missing)}, {_told(cell, known)}"
                    rewrite(progress, told)
    if progress is not None:
        rewrite(progress, "")
        print(
            f"{path}: {sum(map(len, times.values()))} times of {len(times)} "
            f"{'layer' if len(times) == 1 else 'layers'}",
            file=progress,
        )
    return path


def measure(calls: Sequence[ExpertsCall], cell: Cell) -> float:
    """Microseconds of one backend, tokens, routing and weights changing from call to call."""
    backend = experts.named(cell.backend)
    assert backend is not None, cell.backend
    run = backend.run
    turns: list[Run] = []
    for i in range(max(TURNS, len(calls))):
        call = calls[i % len(calls)]
        x_TD, weights_TK, ids_TK = routed(call, cell.tokens, cell.routing, seed=i)
        turn = replace(call, x_TD=x_TD, weights_TK=weights_TK, ids_TK=ids_TK)
        turns.append(functools.partial(run, turn))
    cuda = calls[0].x_TD.device.type == "cuda"
    return _cuda_us(turns) if cuda else _host_us(turns)


def _host_us(turns: Sequence[Run]) -> float:
    """The microseconds of the median call."""
    turns[-1]()
    seconds: list[float] = []
    while len(seconds) < LEAST_CALLS or (len(seconds) < MOST_CALLS and sum(seconds) < SECONDS):
        turn = turns[len(seconds) % len(turns)]
        start = time.perf_counter()
        turn()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def _cuda_us(turns: Sequence[Run]) -> float:
    """The median over replays of a graph of all turns, a turn's share of it; calls that cannot be
    captured are timed as they are.
    """

    def all_turns() -> None:
        for turn in turns:
            turn()

    all_turns()
    torch.cuda.synchronize()
    replay: Run = all_turns
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            all_turns()
        replay = graph.replay
    except RuntimeError as error:
        let_through(error)
        torch.cuda.synchronize()
    found: list[float] = []
    while len(found) < LEAST_CALLS or (
        len(found) < MOST_CALLS and sum(found) * len(turns) < SECONDS * 1e6
    ):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / len(turns))
    return statistics.median(found)


def usable_backends(call: ExpertsCall, paths: bool = False) -> dict[str, int | None]:
    """The backends that can run such a call, in the order in which they are asked, with the most
    tokens that each can (None: any number); never the reference, which is compiled where it is
    chosen. With `paths` their paths follow.
    """
    by_token = {name: getattr(call, name)[:1] for name in ("x_TD", "weights_TK", "ids_TK")}
    one = replace(call, **by_token)
    device = one.x_TD.device.type
    backends = [b for b in experts.candidates(device) if b.name != REFERENCE]
    backends += experts.paths.values() if paths else ()
    able = (b for b in backends if b.refusal(device, 1, one) is None)
    limits = {b.name: b.rows.possible and b.rows.possible(one) for b in able}
    return {name: None if most == ANY_ROWS else most for name, most in limits.items()}


Found = tuple[TunedLayer, dict[str, int | None], Callable[[], Sequence[ExpertsCall]]]


def _layers(
    layers: nn.Module | Shape | Sequence[Shape],
    inputs: Sequence[Any] | Mapping[str, Any] | None,
    paths: bool,
) -> Iterator[Found]:
    """The distinct layers, their backends, and how to get calls that differ in their weights."""
    if isinstance(layers, nn.Module):
        by_layer: dict[TunedLayer, list[ExpertsCall]] = {}
        for call in calls_of(layers, inputs):
            by_layer.setdefault(_layer(call), []).append(call)
        for layer, calls in by_layer.items():
            yield layer, usable_backends(calls[0], paths), lambda calls=calls: calls[:TURNS]  # type: ignore[misc]
        return
    for shape in [layers] if isinstance(layers, Shape) else dict.fromkeys(layers):
        probe = fake_arguments_of(shape)
        size = probe.w13_EFD.nbytes + probe.w2_EDI.nbytes
        copies = min(TURNS, max(1, -(-COPIES_BYTES // size)))

        def make(shape: Shape = shape, copies: int = copies) -> list[ExpertsCall]:
            return [arguments_of(shape) for _ in range(copies)]

        yield _layer(probe), usable_backends(probe, paths), make


def _layer(call: ExpertsCall) -> TunedLayer:
    layer = layer_of_call(device_of(call.x_TD.device).name, experts.name, call)
    assert layer is not None, "sizes are numbers outside of a compilation"
    return layer


def _routings(names: Any) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"routings must be several of {ROUTINGS}, got {described(names)}")
    found = tuple(names)
    for name in found:
        check_choice("routing", name, ROUTINGS)
    if not found:
        raise ValueError(f"routings is empty; give one or more of {ROUTINGS}")
    return found


def _require_layers(layers: Any) -> None:
    shapes = [layers] if isinstance(layers, Shape) else layers
    if isinstance(shapes, nn.Module):
        return
    if isinstance(shapes, Sequence) and shapes and all(isinstance(s, Shape) for s in shapes):
        return
    raise TypeError(
        "layers must be a model, a Shape or a sequence of Shapes, such as "
        f"Shape(E=8, K=2, D=64, I=32), got {described(layers)}"
    )


def _require_inputs(inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        for name in inputs:
            check_text("each name of inputs", name)
    elif inputs is not None and (isinstance(inputs, str) or not isinstance(inputs, Sequence)):
        raise TypeError(
            "inputs must be arguments of the model, by name in a mapping or by position in a "
            f"sequence, got {described(inputs)}"
        )


def _require_eager() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune measures, which a CUDA graph cannot hold; call it before capture")
    if torch.compiler.is_compiling():
        raise RuntimeError("tune measures, which a graph cannot hold; call it before compiling")


def _words(layer: TunedLayer) -> str:
    sizes = " ".join(f"{letter}={getattr(layer, letter)}" for letter in "EKDI")
    said = (layer.dtype, layer.w_format, layer.x_format, layer.layout)
    return " ".join(filter(None, ("tune", sizes, *said)))


def _told(cell: Cell, known: Mapping[Cell, float]) -> str:
    return f"{cell.tokens} tokens {cell.routing} on {cell.backend}: {known[cell] / 1e3:.3f} ms"
