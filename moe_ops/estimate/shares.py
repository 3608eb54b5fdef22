"""The share of its floor that experts reach, from layers that were measured and are most alike."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ops.estimate.measured import Formats, LayerTime, Measured, Rates
from moe_ops.estimate.sizes import Experts, bits_of
from moe_ops.planning.cost import distinct

NEAREST = 4  # layers that a share is the mean of, the more alike the heavier
# Squares of distances, in doublings: of the floor and of the rows that an expert has, and what is
# added for another device and for another format.
OTHER_DEVICE, OTHER_FORMAT, OTHER_BITS = 0.5, 9.0, 4.0
SOFT = 0.05  # added to all, or a layer that is met exactly would count alone
FAR = 9.0  # beyond, a layer is no more than a hint
LAUNCHES = 4  # of a call of experts with its router, as it was measured
HIGHEST = 1.0  # reads alone are faster than the copy whose rate makes the floor, by some percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least time of the experts of a layer for a number of tokens."""

    us: float
    bytes: float
    flops: float
    rows: float  # of an expert that has any


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of its floor that a layer reaches; `guess` says what of it was not measured."""

    value: float
    guess: str = ""


def floor(experts: Experts | LayerTime, formats: Formats, tokens: float, rates: Rates) -> Floor:
    """The least time of a layer's experts for so many tokens, routed uniformly."""
    touched = distinct(experts.E, experts.K, max(1, round(tokens)))
    values = experts.values if isinstance(experts, Experts) else 3 * experts.D * experts.I
    read = touched * values * bits_of(formats.weights) / 8 + 4 * tokens * experts.D
    flops = 2.0 * tokens * experts.K * values
    seconds = max(read / rates.bytes_per_second, flops / rates.flops_of(formats.inputs))
    return Floor(
        us=seconds * 1e6, bytes=read, flops=flops, rows=tokens * experts.K / max(touched, 1e-9)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A measured layer: where it lies among others, in doublings, and the share it reached."""

    time: LayerTime
    us: float
    rows: float
    share: float


class Shares:
    """Shares of layers that were measured. `launch_us`: what one launch waits, which no share is
    counted for: `generate` waits less often, and that is counted apart."""

    def __init__(self, measured: Measured, launch_us: float) -> None:
        self._points: list[_Point] = []
        wait = LAUNCHES * launch_us
        rates = {r.device: r for r in measured.rates}
        for time in measured.layers:
            if time.device in rates and time.us > wait:
                at = floor(time, Formats(experts=time.format), time.tokens, rates[time.device])
                share = min(HIGHEST, at.us / (time.us - wait))
                where = {"us": math.log2(at.us), "rows": math.log2(at.rows)}
                self._points.append(_Point(time=time, share=share, **where))
        self._others = {(p.time.device, p.time.format) for p in self._points}
        # Where whole models ran in a format, its layers of another device are known to do.
        self._ran = {(run.device, run.formats.experts) for run in measured.ours()}

    def of(self, experts: Experts, formats: Formats, tokens: float, rates: Rates) -> Share:
        """The share that a layer's experts reach for so many tokens."""
        at = floor(experts, formats, tokens, rates)
        us, rows = math.log2(at.us), math.log2(at.rows)
        apart = {
            (device, format): _apart(format, formats)
            + (OTHER_DEVICE if device != rates.device else 0.0)
            for device, format in self._others
        }
        distances = (
            (p.us - us) ** 2 + (p.rows - rows) ** 2 + apart[p.time.device, p.time.format]
            for p in self._points
        )
        near = heapq.nsmallest(
            NEAREST, zip(distances, self._points, strict=True), key=lambda found: found[0]
        )
        weights = [1 / (SOFT + distance) for distance, _ in near]
        value = sum(w * point.share for w, (_, point) in zip(weights, near, strict=True))
        return Share(
            value=value / sum(weights),
            guess=self._guess([(d, point.time) for d, point in near], formats, rates.device),
        )

    def _guess(self, near: Sequence[tuple[float, LayerTime]], formats: Formats, device: str) -> str:
        """What of a share was not measured, in words."""
        distance, nearest = near[0]
        if all(time.format != formats.experts for _, time in near):
            return f"experts in {formats.experts} were never measured; taken as formats like it"
        if (device, formats.experts) not in self._ran and all(t.device != device for _, t in near):
            return f"experts in {formats.experts} were measured on {nearest.device} alone"
        if distance > FAR:
            return f"no experts near these sizes were measured in {formats.experts}"
        return ""


def _apart(format: str, formats: Formats) -> float:
    """The square of the distance of two formats."""
    if format == formats.experts:
        return 0.0
    bits = bits_of(format.partition("+")[0]) / bits_of(formats.weights)
    other_inputs = ("+" in format) != bool(formats.inputs)
    return OTHER_FORMAT * (1 + other_inputs) + OTHER_BITS * abs(math.log2(bits))
