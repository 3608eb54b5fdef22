"""What was measured of layers and of `generate`, as it is shipped with the package."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from moe_ops.estimate.sizes import FLOAT, Sizes

SHIPPED = Path(__file__).with_name("measured.json")
OURS = "moe_ops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches, measured: a copy, and products of matrices in 16 and in 8 bits."""

    device: str
    bytes_per_second: float
    flops: float
    flops_8_bit: float
    memory: float  # bytes

    def flops_of(self, inputs: str) -> float:
        """Operations per second of experts whose inputs are in a format, or floats."""
        return self.flops_8_bit if inputs else self.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """The microseconds of the experts of one layer, with their router, for uniform routing."""

    device: str
    format: str
    E: int
    K: int
    D: int
    I: int  # noqa: E741
    tokens: int
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """How a model is quantised: its experts ("weights" or "weights+inputs"), its linear layers and
    its head."""

    experts: str = FLOAT
    linears: str = FLOAT
    head: str = FLOAT

    @property
    def weights(self) -> str:
        return self.experts.partition("+")[0]

    @property
    def inputs(self) -> str:
        return self.experts.partition("+")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured `generate`: `way` is "moe_ops", or that of transformers."""

    file: str
    name: str
    way: str
    device: str
    formats: Formats
    batch: int
    prompt: int
    length: float  # tokens in the cache in the middle of the steps that were timed
    step_ms: float
    prompt_ms: float
    sizes: Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All of it."""

    rates: tuple[Rates, ...]
    layers: tuple[LayerTime, ...]
    runs: tuple[Run, ...]

    def ours(self) -> list[Run]:
        return [run for run in self.runs if run.way == OURS]

    def without(self, run: Run) -> Measured:
        """What is left without a model's own figures: no run of a model of this name, and no
        experts of its sizes."""
        own = {_shape(layer.experts) for layer in run.sizes.layers if layer.experts}
        return Measured(
            rates=self.rates,
            layers=tuple(t for t in self.layers if _shape(t) not in own),
            runs=tuple(r for r in self.runs if r.name != run.name),
        )

    def rates_of(self, device: str) -> Rates | None:
        return next((rates for rates in self.rates if rates.device == device), None)


def _shape(of: object) -> tuple[int, ...]:
    return tuple(getattr(of, name) for name in ("E", "K", "D", "I"))


@functools.cache
def shipped() -> Measured:
    """What was measured, from the package's own file."""
    return parse(SHIPPED.read_text(encoding="utf-8"))


def parse(text: str) -> Measured:
    """What was measured, from JSON as `tests/estimate/collect.py` writes it."""
    found = json.loads(text)
    sizes = [Sizes.of_json(figures) for figures in found["sizes"]]
    return Measured(
        rates=tuple(Rates(**rates) for rates in found["rates"]),
        layers=tuple(
            LayerTime(**layer, tokens=tokens, us=us)
            for layer in found["layers"]
            for tokens, us in layer.pop("times")
        ),
        runs=tuple(
            Run(**{**run, "formats": Formats(**run["formats"]), "sizes": sizes[run["sizes"]]})
            for run in found["runs"]
        ),
    )
