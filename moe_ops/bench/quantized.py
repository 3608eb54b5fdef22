"""One layer on the CPU with weights in several formats, which take turns with bfloat16."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ops.bench import formats
from moe_ops.bench.inputs import Routed, Weights, make_routed, make_weights
from moe_ops.bench.progress import done, tell
from moe_ops.ops import experts
from moe_ops.quant.formats import Format
from moe_ops.testing import TOL, Case, assert_close

PLAIN = "bfloat16"
FORMATS = (
    "int8:row", "int8:1x128", "int4:1x128", "uint4:1x128", "mxfp4", "float8_e4m3fn:128x128",
    "int8:row+int8:row", "float8_e4m3fn:128x128+float8_e4m3fn:1x128",
)  # fmt: skip
DISTINCT = 4  # experts that are quantised: the others are copies in memory of their own
WARM_UP, LEAST, MOST = 1, 5, 200  # rounds
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Milliseconds of one layer in a format: the median of its turns, and the quartiles around."""

    format: str  # WEIGHTS, WEIGHTS+INPUTS, or bfloat16
    tokens: int
    turns: int
    ms: float
    low_ms: float
    high_ms: float


def layers(case: Case, names: Sequence[str]) -> dict[str, Weights]:
    """Weights of the case in bfloat16 and in each format. Raises ValueError for formats that do not
    fit, and NotImplementedError unless a kernel runs them here.
    """
    few = replace(case, E=min(DISTINCT, case.E))
    found = {}
    for name in (PLAIN, *names):
        quant = None if name == PLAIN else formats.parse(name)
        if quant is not None:
            formats.check_layer(quant, case)
        g = torch.Generator().manual_seed(SEED)
        weights = make_weights(few, torch.bfloat16, g, quant)
        check(few, weights, name)
        found[name] = _repeated(weights, case.E)
    return found


def check(case: Case, weights: Weights, name: str) -> None:
    """Raise AssertionError unless one token's result is that of the definition."""
    few = replace(case, K=min(case.K, case.E))
    routed = make_routed(few, 1, "uniform", torch.bfloat16, torch.Generator().manual_seed(SEED))
    args, keywords = _tensors(routed, weights), weights.keywords
    refusal = experts.refusals(*args, **keywords)["cpu"]
    if refusal is not None:
        raise NotImplementedError(f"{name} has no kernel to time here: {refusal}")
    inputs = weights.quant.inputs if weights.quant is not None else ""
    kind = Format.of(inputs).parsed.storage.dtype if inputs else torch.bfloat16
    want = experts.reference(*args, **keywords)
    assert_close(experts(*args, **keywords), want, TOL["experts", kind], f"{name}: not timed; it")


def _repeated(weights: Weights, E: int) -> Weights:
    def stretched(t: Tensor) -> Tensor:
        raw = t.view(torch.uint8) if t.dtype.itemsize == 1 else t  # not every type can be gathered
        return raw[torch.arange(E) % t.shape[0]].view(t.dtype)

    return replace(
        weights,
        w13_EFD=stretched(weights.w13_EFD),
        w2_EDI=stretched(weights.w2_EDI),
        beside={name: stretched(t) for name, t in weights.beside.items()},
    )


def _tensors(routed: Routed, weights: Weights) -> tuple[Tensor, ...]:
    return routed.x_TD, routed.weights_TK, routed.ids_TK, weights.w13_EFD, weights.w2_EDI


def measure(case: Case, tokens: Sequence[int], names: Sequence[str], seconds: float) -> list[Turns]:
    """Time every format at every number of tokens, for about so many seconds each number; tokens
    and routing are new in every round, and the same for all formats of it.
    """
    with torch.inference_mode():
        found = layers(case, names)
        return [one for T in tokens for one in time_turns(case, T, found, seconds)]


def time_turns(case: Case, T: int, found: Mapping[str, Weights], seconds: float) -> list[Turns]:
    g = torch.Generator().manual_seed(SEED)
    spans: dict[str, list[float]] = {name: [] for name in found}
    began, rounds = time.perf_counter(), 0
    while rounds < WARM_UP + LEAST or (
        rounds < WARM_UP + MOST and time.perf_counter() - began < seconds
    ):
        tell(f"{T} tokens, round {rounds + 1}")
        routed = make_routed(case, T, "uniform", torch.bfloat16, g)
        for name, weights in found.items():
            args, keywords = _tensors(routed, weights), weights.keywords
            start = time.perf_counter()
            experts(*args, **keywords)
            if rounds >= WARM_UP:
                spans[name].append((time.perf_counter() - start) * 1e3)
        rounds += 1
    done()
    return [_turns(name, T, times) for name, times in spans.items()]


def _turns(name: str, T: int, times: list[float]) -> Turns:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return Turns(format=name, tokens=T, turns=len(times), ms=middle, low_ms=low, high_ms=high)


def table(found: Sequence[Turns]) -> str:
    """Markdown: milliseconds, and how many times as fast as bfloat16."""
    tokens = list(dict.fromkeys(one.tokens for one in found))
    by = {(one.format, one.tokens): one.ms for one in found}
    heads = ("format", *(f"{T} token{'s' if T > 1 else ''}, ms" for T in tokens))
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name in dict.fromkeys(one.format for one in found):
        cells = [f"{by[name, T]:.2f} ({by[PLAIN, T] / by[name, T]:.2f})" for T in tokens]
        plain = [f"{by[name, T]:.2f}" for T in tokens]
        lines.append(f"| `{name}` | {' | '.join(plain if name == PLAIN else cells)} |")
    return "\n".join(lines)
