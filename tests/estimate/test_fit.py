"""Factors that are fitted, and shares of layers that were measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_ops.estimate.fit import HEAD, LINEARS, WAITS, Call, Fit, fitted
from moe_ops.estimate.measured import Formats, LayerTime, Measured, Rates, shipped
from moe_ops.estimate.shares import LAUNCHES, Shares, floor
from moe_ops.estimate.sizes import Experts

RATES = Rates(device="a", bytes_per_second=1e12, flops=1e15, flops_8_bit=2e15, memory=1e11)
SIZES = {"E": 64, "K": 8, "D": 2048, "I": 1024}
EXPERTS = Experts(**SIZES, values=3 * 2048 * 1024)
LAUNCH_US = 2.0


def layer(tokens: int, share: float, format: str = "bfloat16", device: str = "a") -> LayerTime:
    """A time in which a layer reaches this share."""
    time = LayerTime(device=device, format=format, **SIZES, tokens=tokens, us=1.0)
    least = floor(time, Formats(experts=format), tokens, RATES).us
    return replace(time, us=least / share + LAUNCHES * LAUNCH_US)


def shares(*layers: LayerTime) -> Shares:
    rates = (RATES, replace(RATES, device="b"))
    return Shares(Measured(rates=rates, layers=layers, runs=()), LAUNCH_US)


@pytest.mark.parametrize(("a", "b"), [(1.25, 3.0), (2.0, 0.0)])
def test_factors_are_found(a: float, b: float) -> None:
    rows = [{LINEARS: 1.0 + n, HEAD: 0.5 * n * n, WAITS: 7.0 - n} for n in range(4)]
    of = [(row, a * (row[LINEARS] + row[HEAD]) + b * row[WAITS], 1.0 + n) for n, row in
          enumerate(rows)]  # fmt: skip
    found = fitted(of)
    assert found[LINEARS] == found[HEAD] == pytest.approx(a, rel=1e-6)
    assert found[WAITS] == pytest.approx(b, abs=1e-6)


def test_no_factor_is_below_zero() -> None:
    rows = [({LINEARS: 1.0, WAITS: 1.0 + n}, 4.0 - n, 1.0) for n in range(3)]
    found = fitted(rows)
    assert found[WAITS] == 0.0 and found[LINEARS] == pytest.approx(3.0)


def test_the_share_of_a_measured_layer_is_its_own() -> None:
    found = shares(layer(8, 0.8), *(layer(2**n, 0.5) for n in range(6, 12)))
    assert found.of(EXPERTS, Formats(), 8, RATES).value == pytest.approx(0.8, abs=0.02)
    assert found.of(EXPERTS, Formats(), 8, RATES).guess == ""


@pytest.mark.parametrize(
    ("format", "device", "guess"),
    [
        ("mxfp4", "a", "experts in mxfp4 were never measured; taken as formats like it"),
        ("bfloat16", "b", "experts in bfloat16 were measured on a alone"),
    ],
)
def test_what_was_not_measured_is_a_guess(format: str, device: str, guess: str) -> None:
    measured = [layer(2**n, 0.9) for n in range(6)]
    measured += [layer(2**n, 0.6, "int4:1x128:bfloat16") for n in range(6)]
    rates = replace(RATES, device=device)
    found = shares(*measured).of(EXPERTS, Formats(experts=format), 4, rates)
    assert found.guess == guess
    assert found.value == pytest.approx(0.6 if format == "mxfp4" else 0.9)


def test_experts_far_from_all_that_were_measured_are_a_guess() -> None:
    small = Experts(E=8, K=2, D=64, I=32, values=3 * 64 * 32)
    found = shares(layer(1, 0.9), layer(8, 0.9)).of(small, Formats(), 1, RATES)
    assert found.guess == "no experts near these sizes were measured in bfloat16"


def test_a_second_layer_of_a_kind_adds_what_the_first_took() -> None:
    run = next(r for r in shipped().ours() if r.name == "qwen3-30b" and r.batch == 8)
    rates = shipped().rates_of(run.device)
    assert rates is not None
    fit, call = Fit(shipped()), Call.of_run(run, rates)
    layers = call.sizes.layers
    twice = replace(call.sizes, layers=tuple(replace(x, count=2 * x.count) for x in layers))
    one, two = (fit.step(replace(call, sizes=s)).parts for s in (call.sizes, twice))
    assert two["experts"] == pytest.approx(2 * one["experts"])
    assert two[WAITS] == pytest.approx(2 * one[WAITS]) and two[HEAD] == one[HEAD]
