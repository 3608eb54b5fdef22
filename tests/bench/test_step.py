"""One token through layers: the calls, and reading the launches of the layer in the middle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from moe_ops.bench import step
from moe_ops.bench.formats import parse
from moe_ops.bench.timing import Timing
from moe_ops.testing import LAYERS, Case

SMALL = Case(name="small", T=1, E=8, K=2, D=64, I=32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "small", SMALL)
    attention = step.Attention(H=4, N=2, size=16, normed=True)
    monkeypatch.setitem(step.ATTENTION, "small", attention)


def test_every_model_is_a_layer_of_the_benchmarks() -> None:
    assert step.ATTENTION.keys() <= LAYERS.keys()


def test_a_step_of_two_layers_on_the_cpu() -> None:
    found = step.measure("small", 2, 32, torch.device("cpu"))
    assert (found.layers, found.slots, found.launches) == (2, 32, [])
    assert 0 < found.timing.low_us <= found.timing.us <= found.timing.high_us


def test_a_step_of_layers_in_codes() -> None:
    """Of the same random numbers, so that no more than their rounding tells the results apart."""
    device, attention = torch.device("cpu"), step.ATTENTION["small"]
    place, outs = step.make_place(attention, 32, device), []
    coded = step.Formats(experts=parse("int8:row"), linears="int8:row")
    for formats in (step.FLOATS, coded):
        g = torch.Generator().manual_seed(0)
        layer = step.make_layer(SMALL, attention, 32, g, formats)
        x = torch.randn(1, SMALL.D, generator=torch.Generator().manual_seed(1)).bfloat16()
        outs.append(step.forward(x, layer, SMALL, attention, place).float())
    assert 0 < float((outs[0] - outs[1]).norm() / outs[0].norm()) < 0.1
    found = step.measure("small", 1, 32, device, step.Formats(linears="int4:1x32"), 3)
    assert found.formats == "linear layers in int4:1x32"
    assert step.table(found).startswith(f"small, 3 tokens, 1 layers, 32 slots, {found.formats}: ")


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_writes_its_slot_and_keeps_the_size_of_its_token(biased: bool) -> None:
    device = torch.device("cpu")
    g = torch.Generator().manual_seed(0)
    attention = replace(step.ATTENTION["small"], biased=biased)
    layer, place = step.make_layer(SMALL, attention, 32, g), step.make_place(attention, 32, device)
    before = layer.keys.clone()
    x = torch.randn(1, SMALL.D, generator=g).bfloat16()
    out = step.forward(x, layer, SMALL, attention, place)
    assert out.shape == x.shape and bool(out.isfinite().all()) and not torch.equal(out, x)
    changed = (layer.keys != before).any(-1).any(1)[0].nonzero().flatten()
    assert changed.tolist() == place.slot.tolist() == [18]


# As the profiler gives them, not in order, times in microseconds.
LAYER = [("tiny_up", 10, 24), ("tiny_down(T)", 11, 33), ("linears_one", 25, 39), ("route", 50, 53)]
KERNELS = [
    (name, begin + 50.0 * n, end + 50.0 * n) for n in (2, 0, 1) for name, begin, end in LAYER
]


def test_the_launches_are_those_of_the_layer_in_the_middle() -> None:
    found = step.launches_of(KERNELS, 3)
    assert [launch.name for launch in found] == [name for name, *_ in LAYER]
    assert (found[0].begin_us, found[-1].end_us) == (0.0, 43.0)
    assert step.launches_of(KERNELS[:4], 1) == []  # no layer behind it


def test_the_table() -> None:
    launches = step.launches_of(KERNELS, 3)
    found = step.Step(
        layer="small", layers=3, slots=32, sequences=1, formats="",
        timing=Timing(us=43.21, low_us=43.0, high_us=44.0, replays=5), launches=launches,
    )  # fmt: skip
    assert_expected_inline(
        step.table(found).replace("µ", "u"),
        """\
small, 1 tokens, 3 layers, 32 slots: 43.21 us a layer (43.00 to 44.00)
launch       begins, us  ends, us  after the one before
tiny_up            0.00     14.00
tiny_down          1.00     23.00                  9.00
linears_one       15.00     29.00                  6.00
route             40.00     43.00                 14.00""",
    )


def test_every_bias_of_a_layer_and_its_sinks_count() -> None:
    attention = replace(step.ATTENTION["small"], biased=True)
    place = step.make_place(attention, 32, torch.device("cpu"))
    layer = step.make_layer(SMALL, attention, 32, torch.Generator().manual_seed(0))
    x = torch.randn(1, SMALL.D, generator=torch.Generator().manual_seed(1)).bfloat16()

    def out(changed: step.StepLayer) -> torch.Tensor:
        own = replace(changed, keys=layer.keys.clone(), values=layer.values.clone())
        return step.forward(x, own, SMALL, attention, place)

    want = out(layer)
    for name in ("qkv", "out", "router"):
        linears = getattr(layer, name)
        without = replace(linears, biases=[None] * len(linears.biases))
        assert not torch.equal(out(replace(layer, **{name: without})), want), name
    for name in ("b13_EF", "b2_ED"):
        without = {key: value for key, value in layer.more.items() if key != name}
        assert not torch.equal(out(replace(layer, more=without)), want), name
    assert not torch.equal(out(replace(layer, sinks_H=None)), want)
