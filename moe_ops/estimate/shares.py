"""The share of its floor that experts reach, from layers that were measured and are most alike."""

from __future__ import annotations

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


class Shares:
    """Shares of layers that were measured. `launch_us`: what one launch waits, which no share is
    counted for: `generate` waits less often, and that is counted apart."""

    def __init__(self, measured: Measured, launch_us: float) -> None:
        self._points: list[tuple[LayerTime, Floor, float]] = []
        wait = LAUNCHES * launch_us
        for time in measured.layers:
            rates = measured.rates_of(time.device)
            if rates is not None and time.us > wait:
                at = floor(time, Formats(experts=time.format), time.tokens, rates)
                self._points.append((time, at, min(HIGHEST, at.us / (time.us - wait))))

    def of(self, experts: Experts, formats: Formats, tokens: float, rates: Rates) -> Share:
        """The share that a layer's experts reach for so many tokens."""
        at = floor(experts, formats, tokens, rates)
        near = sorted(
            ((_distance(time, there, at, formats, rates.device), share, time)
             for time, there, share in self._points),
            key=lambda found: found[0],
        )[:NEAREST]  # fmt: skip
        weights = [1 / (SOFT + distance) for distance, _, _ in near]
        value = sum(w * share for w, (_, share, _) in zip(weights, near, strict=True))
        return Share(
            value=value / sum(weights),
            guess=_guess([(d, time) for d, _, time in near], formats, rates.device),
        )


def _distance(time: LayerTime, there: Floor, at: Floor, formats: Formats, device: str) -> float:
    found = math.log2(there.us / at.us) ** 2 + math.log2(there.rows / at.rows) ** 2
    if time.device != device:
        found += OTHER_DEVICE
    if time.format != formats.experts:
        bits = bits_of(time.format.partition("+")[0]) / bits_of(formats.weights)
        found += OTHER_FORMAT + OTHER_BITS * abs(math.log2(bits))
        found += OTHER_FORMAT * (("+" in time.format) != bool(formats.inputs))
    return found


def _guess(near: Sequence[tuple[float, LayerTime]], formats: Formats, device: str) -> str:
    """What of a share was not measured, in words."""
    distance, nearest = near[0]
    if all(time.format != formats.experts for _, time in near):
        return f"experts in {formats.experts} were never measured; taken as {nearest.format}"
    if all(time.device != device for _, time in near):
        return f"experts in {formats.experts} were measured on {nearest.device} alone"
    if distance > FAR:
        return f"no experts near these sizes were measured in {formats.experts}"
    return ""
