"""What batch invariance costs: the experts of a layer in an invariant call, and in another.

Both take turns on the same weights and sets of tokens, from CUDA graphs on a GPU. A run goes on in
the file of an earlier one. Most of the time on a GPU that is new to it goes to compiling kernels,
which several processes can do ahead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench import formats, progress
from moe_ops.bench.inputs import Weights, make_routed, make_weights
from moe_ops.bench.results import write
from moe_ops.bench.resume import REMEDY
from moe_ops.bench.tables import aligned
from moe_ops.bench.timing import Run, Timing, capture_long, time_replays
from moe_ops.ops import experts
from moe_ops.quant.arguments import named_format
from moe_ops.quant.config import QuantConfig
from moe_ops.registry.invariance import invariant
from moe_ops.testing import LAYERS, TOL, Case, assert_close

log = logging.getLogger("moe_ops")
SEED, PLAIN, TURNS = 0, "bfloat16", 3
REST = 0.1  # seconds before each turn: nothing but turns heats a GPU here
SETS, FEW_SETS, MANY_TOKENS = 8, 2, 1024  # of tokens, whose experts differ
FORMATS = (
    PLAIN, "int4:1x128:bfloat16", "uint4:1x128:bfloat16", "mxfp4", "nvfp4", "int8:row",
    "float8_e4m3fn:row", "mxfp4+mxfp8", "int4:1x128:bfloat16+float8_e4m3fn:row", "nvfp4+nvfp4",
    "int8:row+int8:row", "float8_e4m3fn:row+float8_e4m3fn:row",
    "float8_e4m3fn:128x128+float8_e4m3fn:1x128", "mxfp8+mxfp8", "q4_k",
)  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
Call = Callable[[], Tensor]
Key = tuple[str, str, int]  # layer, format, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Median microseconds of a layer's experts in calls that are not invariant, and that are; the
    backends that were picked."""

    layer: str
    format: str  # WEIGHTS, WEIGHTS+INPUTS, or bfloat16
    tokens: int
    us: float
    invariant_us: float
    backends: tuple[str, str]

    @property
    def key(self) -> Key:
        return self.layer, self.format, self.tokens

    @property
    def ratio(self) -> float:
        return self.invariant_us / self.us


def measure(
    cases: Sequence[Case],
    names: Sequence[str],
    tokens: Sequence[int],
    device: torch.device,
    known: Container[Key] = (),
) -> Iterator[Cost]:
    """Cell by cell, but those that are known. Formats that do not fit a layer, or that no invariant
    call takes, are left out, with a word."""
    for case, name in itertools.product(cases, names):
        asked = [T for T in tokens if (case.name, name, T) not in known]
        if not asked:
            continue
        try:
            quant = fitting(case, name)
            g = torch.Generator(device).manual_seed(SEED)
            weights = make_weights(case, torch.bfloat16, g, quant)
            for T in asked:
                progress.tell(f"{case.name} {name} {T} tokens")
                yield _cost(case, name, T, weights, g)
        except (ValueError, NotImplementedError) as error:
            print(f"{name} of {case.name} is not measured: {error}")
        progress.done()


def fitting(case: Case, name: str) -> QuantConfig | None:
    """The formats in a text, as `quant_of` says, which raises ValueError where a layer has no
    widths for them."""
    quant = quant_of(name)
    if quant is not None:
        formats.check_layer(quant, case)
    return quant


def compile_all(
    cases: Sequence[Case], names: Sequence[str], tokens: Sequence[int], jobs: int
) -> None:
    """Compile what calls of all cells launch on a GPU, in so many processes side by side; what
    cannot run is told of where it is measured."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        layers = [*itertools.product(cases, names)]
        work = [pool.submit(call_once, case, name, tokens) for case, name in layers]
        for done, future in enumerate(as_completed(work), 1):
            future.result()
            progress.tell(f"compiled {done} of {len(layers)}")
    progress.done()


def call_once(case: Case, name: str, tokens: Sequence[int], device: str = "cuda") -> None:
    """One call of each kind for each number of tokens, where a layer takes them."""
    try:
        quant = fitting(case, name)
        g = torch.Generator(device).manual_seed(SEED)
        weights = make_weights(case, torch.bfloat16, g, quant)
        for T, wanted in itertools.product(tokens, (False, True)):
            with torch.inference_mode(), invariant(wanted):
                _calls(case, T, weights, g, 1)[0]()
    except (ValueError, NotImplementedError) as error:
        log.debug("%s of %s: %s", name, case.name, error)


def quant_of(name: str) -> QuantConfig | None:
    """The formats in the text WEIGHTS or WEIGHTS+INPUTS; None for bfloat16."""
    if name == PLAIN:
        return None
    weights, _, inputs = name.partition("+")
    return QuantConfig(
        weights=named_format("weights", weights).name,
        inputs=named_format("inputs", inputs).name if inputs else "",
    )


def _cost(case: Case, name: str, T: int, weights: Weights, g: torch.Generator) -> Cost:
    """The cell, once both results are as close to each other as an op's has to be."""
    with torch.inference_mode():
        calls = _calls(case, T, weights, g, FEW_SETS if T > MANY_TOKENS else SETS)
        found = [_captured(calls, g.device, wanted) for wanted in (False, True)]
        # Codes of h that lie between two round to either.
        kind = torch.float8_e4m3fn if weights.keywords.get("x_format") else torch.bfloat16
        assert_close(found[1].result, found[0].result.float(), TOL["experts", kind], name)
        times = in_turns([(f.run, f.calls) for f in found], g.device)
    return Cost(
        layer=case.name, format=name, tokens=T, us=times[0], invariant_us=times[1],
        backends=(found[0].backend, found[1].backend),
    )  # fmt: skip


def _calls(
    case: Case, T: int, weights: Weights, g: torch.Generator, sets: int
) -> list[partial[Tensor]]:
    """Calls of a layer with so many sets of tokens."""
    calls = []
    for _ in range(sets):
        routed = make_routed(replace(case, T=T), T, "uniform", torch.bfloat16, g)
        tensors = (routed.x_TD, routed.weights_TK, routed.ids_TK)
        args = (*tensors, weights.w13_EFD, weights.w2_EDI)
        calls.append(partial(experts, *args, **weights.keywords))
    return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What runs so many calls, the last result, and the backend that was picked."""

    run: Run
    calls: int
    result: Tensor
    backend: str


def _captured(calls: Sequence[Any], device: torch.device, wanted: bool) -> Captured:
    with invariant(wanted):
        one = calls[0]
        backend = experts.pick(experts.call(*one.args, **one.keywords)).name
        for call in calls:
            result = call()
        if device.type != "cuda":
            run = partial(_all, calls, wanted)
            return Captured(run=run, calls=len(calls), result=result, backend=backend)
        graph, count, results = capture_long(calls, device)
        graph()
    return Captured(run=graph, calls=count, result=results[-1], backend=backend)


def _all(calls: Sequence[Call], wanted: bool) -> None:
    with invariant(wanted):
        for call in calls:
            call()


def in_turns(runs: Sequence[tuple[Run, int]], device: torch.device) -> list[float]:
    """Microseconds of a call of each run, which makes so many: the median of some turns."""
    spans: list[list[Timing]] = [[] for _ in runs]
    for _ in range(TURNS):
        for (run, calls), found in zip(runs, spans, strict=True):
            found.append(time_replays(run, calls, device, rest=REST))
    return [sorted(t.us for t in found)[TURNS // 2] for found in spans]


def table(found: Sequence[Cost]) -> str:
    """The cells, then the geometric mean and the largest ratio of each format."""
    rows = [("layer", "format", "tokens", "µs", "invariant", "ratio", "by")]
    rows += [
        (
            c.layer, c.format, str(c.tokens), f"{c.us:.1f}", f"{c.invariant_us:.1f}",
            f"{c.ratio:.2f}", " -> ".join(dict.fromkeys(c.backends)),
        )
        for c in found
    ]  # fmt: skip
    means = [("format", "cells", "mean ratio", "largest", "of")]
    for name in dict.fromkeys(c.format for c in found):
        of = [c for c in found if c.format == name]
        mean = statistics.geometric_mean(c.ratio for c in of)
        worst = max(of, key=lambda c: c.ratio)
        where = f"{worst.layer} {worst.tokens}"
        means.append((name, str(len(of)), f"{mean:.3f}", f"{worst.ratio:.2f}", where))
    return f"{aligned(rows)}\n\n{aligned(means)}"


def add(options: argparse.ArgumentParser) -> None:
    """Add the options of `bench invariant`."""
    options.add_argument("--layer", nargs="+", choices=sorted(LAYERS), default=[*LAYERS])
    options.add_argument(
        "--formats", nargs="+", default=[*FORMATS], help="WEIGHTS or WEIGHTS+INPUTS"
    )
    options.add_argument("--tokens", nargs="+", type=int, default=[*TOKENS])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    options.add_argument("--device", default=default, choices=("cuda", "cpu"))
    options.add_argument(
        "--jobs", type=int, default=0, help="processes that compile ahead on a GPU; none by default"
    )


def measure_invariant(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the cells that the file of `--json` lacks, and write it behind each of them."""
    cases, device = [LAYERS[name] for name in args.layer], torch.device(args.device)
    on = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    path = Path(args.json) if args.json else None
    found = [] if path is None else earlier(path, on)
    known = {c.key for c in found}
    if args.jobs and device.type == "cuda":
        compile_all(cases, args.formats, args.tokens, args.jobs)
    for cost in measure(cases, args.formats, args.tokens, device, known):
        found.append(cost)
        if path is not None:
            write(path, figures(on, found))
    if found:
        print(table(found))
    return figures(on, found)


def figures(device: str, found: Sequence[Cost]) -> dict[str, Any]:
    return {"device": device, "invariant": [asdict(c) | {"ratio": c.ratio} for c in found]}


def earlier(path: Path, device: str) -> list[Cost]:
    """The cells in a file, none if there is none. Raises ValueError if it is of another device."""
    if not path.exists():
        return []
    held = json.loads(path.read_text())
    if held["device"] != device:
        raise ValueError(f"{path} is of {held['device']}, this is {device}; {REMEDY}")
    return [
        Cost(**{f.name: cell[f.name] for f in fields(Cost)} | {"backends": tuple(cell["backends"])})
        for cell in held["invariant"]
    ]
