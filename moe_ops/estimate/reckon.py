"""An estimate: a model on a device, for several batch sizes, with ranges and what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_ops.estimate.fit import Call, Fit, Times, misses, spread
from moe_ops.estimate.here import Here
from moe_ops.estimate.measured import OURS, Formats, Measured, Rates, Run
from moe_ops.estimate.sizes import Sizes
from moe_ops.estimate.work import Work, cache_bytes, prompt_of, step_of, weight_bytes

GUESSED = 1.25  # by which each guess widens a range, to both sides
UNMEASURED = 0.7, 1.4  # the range of a processor, of which no runs are shipped
LIKE = 2.0  # times as long a measured run may be to be shown
Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an estimate is asked for: prompts of so many tokens, then so many new ones."""

    sizes: Sizes
    formats: Formats
    batches: tuple[int, ...]
    prompt: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """Milliseconds that something is expected to take, and their range; the least that it can
    take; its parts, and the work of those that have any."""

    ms: float
    low_ms: float
    high_ms: float
    floor_ms: float
    parts: dict[str, float]
    work: tuple[Work, ...]

    @property
    def limit(self) -> tuple[str, float]:
        """The part that takes most, and its share."""
        part = max(self.parts, key=self.parts.__getitem__)
        return part, self.parts[part] / self.ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One batch size. `measured` and `stock`: tokens per second of such a run of ours, and of
    transformers, if there was one."""

    batch: int
    step: Duration
    prompt: Duration
    cache_bytes: float
    measured: float | None
    stock: float | None

    def tokens_per_s(self, ms: float) -> float:
        return self.batch / ms * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An estimate, and what of it is a guess. `runs` are those that the ranges come from; none on
    a device of which no runs are shipped."""

    asked: Asked
    device: str
    rates: Rates
    rows: tuple[Row, ...]
    weight_bytes: float
    guesses: tuple[str, ...]
    runs: int
    models: int


def estimate(asked: Asked, measured: Measured, device: str, here: Here | None) -> Estimate:
    """Reckon a model on a device whose runs are shipped, or on this machine, which was measured."""
    fit = Fit(measured)
    rates = here.rates if here is not None else measured.rates_of(device)
    if rates is None:
        known = ", ".join(r.device for r in measured.rates)
        raise ValueError(f"{device} was never measured; known are {known}")
    found = misses(measured)
    ranges = spread([m.step for m in found]), spread([m.prompt for m in found])
    if here is not None and not here.is_gpu:
        ranges, found = (UNMEASURED, UNMEASURED), []
    rows, guesses = [], [*_model_guesses(asked), *_format_guesses(asked.formats, measured)]
    if here is not None:
        guesses += here.guesses
        if here.is_gpu and measured.rates_of(device) is None:
            guesses.append(f"what launches wait on {device}, taken as on those that were measured")
    for batch in asked.batches:
        call = Call(
            sizes=asked.sizes, formats=asked.formats, batch=batch, prompt=asked.prompt,
            length=asked.prompt + asked.tokens / 2, rates=rates,
        )  # fmt: skip
        step, prompt = fit.step(call), fit.prompt(call)
        if here is not None:
            step, prompt = here.step(call, step), here.prompt(call, prompt)
        guesses += [g for g in (*step.guesses, *prompt.guesses) if g not in guesses]
        rows.append(_row(call, asked, step, prompt, ranges, measured, device))
    wider = GUESSED ** len(guesses)
    return Estimate(
        asked=asked,
        device=device,
        rates=rates,
        rows=tuple(_widened(row, wider) for row in rows),
        weight_bytes=weight_bytes(asked.sizes, asked.formats),
        guesses=tuple(guesses),
        runs=len(found),
        models=len({m.run.name for m in found}),
    )


def _model_guesses(asked: Asked) -> list[str]:
    """What of a model is not known, or runs on other code than what was measured."""
    found = asked.sizes.guesses()
    if asked.sizes.refusal:
        found.append(
            f"generate is transformers' own, as this model {asked.sizes.refusal}; reckoned as if "
            "it ran by steps of ours"
        )
    reasons = {
        layer.experts.refusal
        for layer in asked.sizes.layers
        if layer.experts is not None and layer.experts.refusal
    }
    found += [f"experts keep transformers' code ({r}); reckoned as ours" for r in sorted(reasons)]
    return found


def _format_guesses(formats: Formats, measured: Measured) -> list[str]:
    """Formats of linear layers and of heads in which no run is shipped."""
    runs = measured.ours()
    asked = ("linear layers", "linears"), ("a head", "head")
    return [
        f"{words} in {getattr(formats, name)}, of which no run was measured"
        for words, name in asked
        if getattr(formats, name) not in {getattr(run.formats, name) for run in runs}
    ]


def _row(
    call: Call, asked: Asked, step: Times, prompt: Times, ranges: tuple[Range, Range],
    measured: Measured, device: str,
) -> Row:  # fmt: skip
    arguments = call.sizes, call.formats, call.batch
    runs = [run for run in measured.runs if _is_of(run, call, device)]
    return Row(
        batch=call.batch,
        step=_duration(step, step_of(*arguments, call.length, call.rates), ranges[0]),
        prompt=_duration(prompt, prompt_of(*arguments, call.prompt, call.rates), ranges[1]),
        cache_bytes=cache_bytes(call.sizes, call.batch, asked.prompt + asked.tokens),
        measured=_fastest([run for run in runs if run.way == OURS]),
        stock=_fastest([run for run in runs if run.way != OURS]),
    )


def _is_of(run: Run, call: Call, device: str) -> bool:
    """Whether a run is one of this call, about as long: stock's in floats is beside any of
    ours."""
    same = run.sizes == call.sizes and run.device == device and run.batch == call.batch
    alike = 1 / LIKE <= run.length / call.length <= LIKE
    return same and alike and (run.way != OURS or run.formats == call.formats)


def _fastest(runs: Sequence[Run]) -> float | None:
    return max((run.batch / run.step_ms * 1e3 for run in runs), default=None)


def _duration(times: Times, work: list[Work], range_: Range) -> Duration:
    """The least time of a part goes by the rate of a copy. What was measured here may be below it,
    as reading alone is faster."""
    work = [replace(w, floor_ms=min(w.floor_ms, times.parts[w.part])) for w in work]
    return Duration(
        ms=times.ms,
        low_ms=times.ms * range_[0],
        high_ms=times.ms * range_[1],
        floor_ms=sum(w.floor_ms for w in work),
        parts=times.parts,
        work=tuple(work),
    )


def _widened(row: Row, by: float) -> Row:
    """A row with wider ranges."""

    def wider(d: Duration) -> Duration:
        return replace(d, low_ms=d.low_ms / by, high_ms=d.high_ms * by)

    return replace(row, step=wider(row.step), prompt=wider(row.prompt))
