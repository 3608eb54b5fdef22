"""A small run of `bench layer` with made-up times, and small layers that are measured quickly."""

from __future__ import annotations

import sys

import pytest

from moe_ops.bench import __main__ as cli
from moe_ops.bench import rates, timing
from moe_ops.bench.cells import Cell
from moe_ops.bench.rates import Rates
from moe_ops.bench.results import Results
from moe_ops.testing import LAYERS, Case

LAYER = ("layer", "--ours", "moe", "--device", "cpu")
TINY = Case(name="tiny", T=1, E=8, K=2, D=64, I=32)
SMALL = Case(name="small", T=1, E=16, K=2, D=64, I=32)
BLOCKS = Case(name="blocks", T=1, E=4, K=2, D=256, I=128)  # whole blocks of float8


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers, few replays, small rates."""
    for case in (TINY, SMALL, BLOCKS):
        monkeypatch.setitem(LAYERS, case.name, case)
    monkeypatch.setitem(rates.SIZES, "cpu", (2**16, 32))
    monkeypatch.setitem(timing.SECONDS, "cpu", 0.0)
    monkeypatch.setattr(timing, "LEAST", 2)


def bench(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """Run the command line."""
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    cli.main()


def cell(
    layer: str, tokens: int, routing: str, us: float | None, floor: float = 10.0, *, name: str = ""
) -> Cell:
    """A cell of ours, or of the one that is named; without a time it is wrong."""
    return Cell(
        layer=layer,
        tokens=tokens,
        routing=routing,
        contender=name or "moe_ops",
        ran={} if name else {"moe": "reference", "route": "cpu", "experts": "cpu"},
        copies=2,
        sets=8,
        cold=layer != "small",
        bytes=floor * 4e6,
        flops=floor * tokens * 1e6,
        floor_us=floor,
        given_floor_us=floor / 2,
        error=0.004 if us else None,
        us=us,
        low_us=us,
        high_us=us,
        wrong="" if us else "AssertionError: set 0: relative error 0.1",
    )


def results() -> Results:
    """Two layers, two routings, one peer that is faster once, one cell that is wrong."""
    return Results(
        command="python -m moe_ops.bench layer --layer tiny,small",
        device="Made-up Device",
        dtype="bfloat16",
        versions={"torch": "2.11.0"},
        rates=Rates(copy_tbs=4.0, matmul_tflops=800.0),
        given=Rates(copy_tbs=8.0, matmul_tflops=900.0),
        layers={"tiny": TINY, "small": SMALL},
        cells=[
            cell("tiny", 1, "uniform", 12.5),
            cell("tiny", 1, "uniform", 25.0, name="grouped_mm"),
            cell("tiny", 1, "zipf", 15.0),
            cell("tiny", 1, "zipf", None, name="grouped_mm"),
            cell("tiny", 64, "uniform", 20.0),
            cell("tiny", 64, "uniform", 30.0, name="grouped_mm"),
            cell("tiny", 64, "zipf", 12.0, 8.0),
            cell("tiny", 64, "zipf", 30.0, 8.0, name="grouped_mm"),
            cell("small", 1, "uniform", 20.0),
            cell("small", 64, "uniform", None),
        ],
        peers={
            "tiny": {1: {"one": 13.0, "two": 14.0}, 64: {"one": 19.0, "grouped_mm": 40.0}},
            "small": {1: {}},
        },
    )
