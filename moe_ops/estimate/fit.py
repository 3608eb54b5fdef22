"""What a step takes beside its experts, fitted to measured runs: the share of their floors that
other parts reach, what each launch waits, and what a step and a prompt take besides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ops.estimate.measured import Formats, Measured, Rates, Run
from moe_ops.estimate.shares import Shares, floor
from moe_ops.estimate.sizes import Sizes
from moe_ops.estimate.work import (
    CACHE,
    EXPERTS,
    HEAD,
    LINEARS,
    launches_of,
    prompt_of,
    step_of,
)

LAUNCH_US = 2.0  # that a launch of measured layers waited, as moe_ops.planning.cost has it
# Parts that are no bytes, of a step and of a prompt.
WAITS, BESIDE = "waits of launches", "once a step"
LAYERS, STATES, ROWS, ONCE = "layers", "states", "rows", "once a prompt"
ROUNDS, CLOSE = 2000, 1e-9  # of a descent along one factor after the other

Row = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of `generate` on a device; `length` is that of the cache in the middle of its
    steps."""

    sizes: Sizes
    formats: Formats
    batch: int
    prompt: int
    length: float
    rates: Rates

    @staticmethod
    def of_run(run: Run, rates: Rates) -> Call:
        return Call(
            sizes=run.sizes, formats=run.formats, batch=run.batch, prompt=run.prompt,
            length=run.length, rates=rates,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Milliseconds, part by part, and what of them is a guess."""

    parts: dict[str, float]
    guesses: tuple[str, ...] = ()

    @property
    def ms(self) -> float:
        return sum(self.parts.values())


class Fit:
    """What measurements say of other calls."""

    def __init__(self, measured: Measured) -> None:
        self._shares = Shares(measured, LAUNCH_US)
        weights = _weights(measured)
        step: list[tuple[Row, float, float]] = []
        prompt: list[tuple[Row, float, float]] = []
        for run, weight in weights:
            call = Call.of_run(run, _known(measured, run.device))
            left = run.step_ms - self._experts(call, call.batch)[0]
            step.append((step_row(call), left, weight / run.step_ms))
            left = run.prompt_ms - self._experts(call, call.batch * call.prompt)[0]
            prompt.append((prompt_row(call), left, weight / run.prompt_ms))
        self.of_step, self.of_prompt = fitted(step), fitted(prompt)

    def step(self, call: Call) -> Times:
        """The expected milliseconds of a step."""
        return self._times(call, call.batch, step_row(call), self.of_step)

    def prompt(self, call: Call) -> Times:
        """The expected milliseconds of a prompt, until its first new token is there."""
        return self._times(call, call.batch * call.prompt, prompt_row(call), self.of_prompt)

    def _times(self, call: Call, tokens: int, row: Row, factors: Row) -> Times:
        experts, guesses = self._experts(call, tokens)
        others = {part: value * factors[part] for part, value in row.items()}
        return Times(parts={EXPERTS: experts, **others}, guesses=guesses)

    def _experts(self, call: Call, tokens: int) -> tuple[float, tuple[str, ...]]:
        """Milliseconds of all layers' experts, from layers that are alike."""
        ms, guesses = 0.0, []
        for layer in call.sizes.layers:
            if layer.experts is not None:
                share = self._shares.of(layer.experts, call.formats, tokens, call.rates)
                least = floor(layer.experts, call.formats, tokens, call.rates).us
                ms += layer.count * least / share.value / 1e3
                guesses.append(share.guess)
        return ms, tuple(dict.fromkeys(filter(None, guesses)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A measured run beside what is expected of it by all others: measured / expected."""

    run: Run
    step: float
    prompt: float


def misses(measured: Measured) -> list[Miss]:
    """Every run of ours, reckoned without its own model's figures."""
    found = []
    fits: dict[str, Fit] = {}
    for run in measured.ours():
        if run.name not in fits:
            fits[run.name] = Fit(measured.without(run))
        call = Call.of_run(run, _known(measured, run.device))
        found.append(
            Miss(
                run=run,
                step=run.step_ms / fits[run.name].step(call).ms,
                prompt=run.prompt_ms / fits[run.name].prompt(call).ms,
            )
        )
    return found


def spread(ratios: Sequence[float], share: float = 0.9) -> tuple[float, float]:
    """The range that holds this share of the ratios, in the middle, and 1."""
    logs = sorted(math.log(ratio) for ratio in ratios)
    cut = int(len(logs) * (1 - share) / 2)
    return math.exp(min(0.0, logs[cut])), math.exp(max(0.0, logs[-1 - cut]))


def step_row(call: Call) -> Row:
    """What a step takes beside its experts, each to be multiplied with what was fitted: least
    milliseconds, and milliseconds of launches that wait a microsecond."""
    least = {w.part: w.floor_ms for w in _step(call)}
    return {
        LINEARS: least[LINEARS],
        HEAD: least[HEAD],
        CACHE: least[CACHE],
        WAITS: launches_of(call.sizes, call.batch) / 1e3,
        BESIDE: 1.0,
    }


def prompt_row(call: Call) -> Row:
    """What a prompt takes beside its experts, as `step_row`. Rows between layers are written and
    read, and states are made in turns."""
    sizes, tokens = call.sizes, call.batch * call.prompt
    least = {
        w.part: w.floor_ms
        for w in prompt_of(sizes, call.formats, call.batch, call.prompt, call.rates)
    }
    states = sum(layer.count for layer in sizes.layers if layer.state_bytes)
    row_bytes = 2.0 * tokens * sizes.hidden * sizes.depth
    return {
        LINEARS: least[LINEARS],
        HEAD: least[HEAD],
        CACHE: least[CACHE],
        ROWS: row_bytes / call.rates.bytes_per_second * 1e3,
        STATES: states * tokens / 1e6,
        LAYERS: sizes.depth / 1e3,
        ONCE: 1.0,
    }


# Parts that share one factor: too few runs tell them apart.
TOGETHER = {HEAD: LINEARS}


def fitted(rows: Sequence[tuple[Row, float, float]]) -> Row:
    """The factors, none below 0, by which weighted rows come nearest to what they should be: least
    squares, by a descent along one factor after the other."""
    names = list(dict.fromkeys(TOGETHER.get(part, part) for row, _, _ in rows for part in row))
    found = dict.fromkeys(names, 0.0)
    joined = [(_joined(row), target, weight) for row, target, weight in rows]
    square = {
        (a, b): sum(r.get(a, 0.0) * r.get(b, 0.0) * w * w for r, _, w in joined)
        for a in names
        for b in names
    }
    to = {a: sum(r.get(a, 0.0) * target * w * w for r, target, w in joined) for a in names}
    for _ in range(ROUNDS):
        before = dict(found)
        for a in filter(lambda a: square[a, a], names):
            slope = sum(square[a, b] * found[b] for b in names) - to[a]
            found[a] = max(0.0, found[a] - slope / square[a, a])
        if all(abs(found[a] - before[a]) <= CLOSE * found[a] for a in names):
            break
    return found | {part: found[other] for part, other in TOGETHER.items() if other in found}


def _joined(row: Row) -> Row:
    found: Row = {}
    for part, value in row.items():
        name = TOGETHER.get(part, part)
        found[name] = found.get(name, 0.0) + value
    return found


def _weights(measured: Measured) -> list[tuple[Run, float]]:
    """The runs, weighted so that each model counts alike."""
    runs = measured.ours()
    counts = Counter(run.name for run in runs)
    return [(run, counts[run.name] ** -0.5) for run in runs]


def _known(measured: Measured, device: str) -> Rates:
    rates = measured.rates_of(device)
    if rates is None:
        raise ValueError(f"{device} has runs, but no rates; collect both")
    return rates


def _step(call: Call) -> list:
    return step_of(call.sizes, call.formats, call.batch, call.length, call.rates)
