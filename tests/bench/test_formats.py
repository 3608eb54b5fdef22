"""`bench layer --format`: quantised layers are what they should be, checked, then timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moe_ops
from moe_ops.bench import cells, contenders, formats, inputs, numerics
from moe_ops.bench.inputs import Routed, Weights
from moe_ops.bench.rates import Rates
from moe_ops.bench.results import load
from moe_ops.quant import packing
from moe_ops.testing import BF16, F32, Case
from tests.bench.runs import BLOCKS, LAYER, TINY, bench, quicken
from tests.chosen import one_in

RATES = Rates(copy_tbs=0.03, matmul_tflops=0.1, matmul8_tflops=0.2)
BLOCK_INPUTS = "float8_e4m3fn:128x128+float8_e4m3fn:1x128"
STATIC_INPUTS = "float8_e4m3fn:tensor+float8_e4m3fn:tensor+static"
KINDS = {
    "int4:1x32:bfloat16": TINY,
    "uint4:1x32:bfloat16": TINY,
    "mxfp4": TINY,
    "float8_e4m3fn:128x128": TINY,  # whose blocks are cut short
    BLOCK_INPUTS: BLOCKS,
    "int8:row+int8:row": TINY,
    STATIC_INPUTS: BLOCKS,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers, few replays, small rates."""
    quicken(monkeypatch)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("format", [*KINDS, "nvfp4", "float8_e4m3fn:row"])
def test_weights_are_those_of_the_layer_in_codes(format: str) -> None:
    """Made one by one, and decoded one by one, as a stack of normal weights would be."""
    quant = formats.parse(format)
    g = generator()
    made = inputs.make_weights(TINY, BF16, generator(), quant)
    stacks = [torch.empty(TINY.E, r, c, dtype=BF16) for _, r, c in formats.matrices(TINY)]
    codes = (made.w13_EFD, made.w2_EDI)
    for which, (stack, names) in enumerate(zip(stacks, inputs.BESIDE, strict=True)):
        for w in stack:
            w.normal_(std=w.shape[1] ** -0.5, generator=g)
        common = None
        if quant.format.has_global_scale:
            common = torch.stack([packing.global_scale_of(w, quant.format) for w in stack])
        want = packing.quantize(stack, quant.format, global_scale=common)
        beside = (want.scale, want.zero, common)
        assert torch.equal(codes[which].view(torch.uint8), want.values.view(torch.uint8))
        for name, tensor in zip(names, beside, strict=True):
            assert (name in made.beside) == (tensor is not None)
            if tensor is not None:
                assert torch.equal(made.beside[name].float(), tensor.float())
        decoded = packing.dequantize(want.values, want.scale, quant.format, want.zero, common)
        assert torch.equal(made.expert(3)[which], decoded[3])


class Largest(TorchDispatchMode):
    """The most values that a tensor of 16 or 32 bits held."""

    values = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor) and t.dtype.itemsize > 1:
                self.values = max(self.values, t.numel())
        return found


@pytest.mark.parametrize("format", ["mxfp4", "uint4:1x32:bfloat16", "float8_e4m3fn:128x128"])
def test_no_more_than_one_expert_is_held_in_16_bits(format: str) -> None:
    """Some layers hold 22 GB in 16 bits."""
    case = replace(BLOCKS, E=8)
    with Largest() as largest:
        made = inputs.make_weights(case, BF16, generator(), formats.parse(format))
        made.expert(5)
    assert largest.values == 2 * case.I * case.D


@pytest.mark.parametrize("format", [f for f in KINDS if "+" not in f])
def test_the_float32_layer_of_codes_is_the_definition(format: str) -> None:
    weights = inputs.make_weights(TINY, F32, generator(), formats.parse(format))
    routed = inputs.make_routed(TINY, 30, "zipf", F32, generator(1))
    with moe_ops.using("reference"):
        want = contenders.ours(TINY, "cpu").call(weights, routed)
    assert numerics.relative_error(numerics.want(weights, routed), want) < 1e-6


@one_in(3, pytest.mark.parametrize("format", KINDS))
def test_each_kind_of_format_is_measured_by_the_definition(
    format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    case = KINDS[format]
    tokens = "16,48" if case is BLOCKS else "1,20"  # one token of a narrow layer says little
    words = ("--layer", case.name, "--tokens", tokens, "--format", format, "--rates", "1,2,3")
    bench(monkeypatch, *LAYER, *words, "--against", "reference", "--json", str(file))
    found = load(file)
    assert found.format == format
    assert len(found.cells) == 4
    low, high = (0.01, 0.06) if "+" in format else (0.0005, 0.01)
    for c in found.cells:
        assert not c.wrong and c.us and c.error and low < c.error < high
        if c.contender == "reference":
            assert set(c.ran.values()) == {"reference"}
        else:
            assert c.ran["experts"] == "cpu"
        assert c.given_floor_us == pytest.approx(
            max(c.bytes / 1, c.flops / (3 if "+" in format else 2)) * 1e-6
        )
    out = capsys.readouterr().out
    assert f"{case.name}: E={case.E} K=2 D={case.D} I={case.I}, bfloat16, " in out
    assert formats.in_words(format) in out


def grid_of(quant: str, case: Case, *of: contenders.Contender) -> cells.Grid:
    return cells.Grid(
        layers=[case],
        tokens=[20],
        routings=["uniform"],
        contenders=lambda case: of,
        dtype=BF16,
        device=torch.device("cpu"),
        quant=formats.parse(quant),
    )


@pytest.mark.parametrize("format", KINDS)
def test_a_wrong_scale_is_caught_and_not_timed(format: str) -> None:
    """Of a quarter of the experts, as if a kernel read those of their neighbours' rows."""
    case = KINDS[format]
    ours = contenders.ours(case, "cpu")

    def with_wrong_scale(weights: Weights, routed: Routed) -> torch.Tensor:
        scale = weights.beside["w2_scale_EDG"].clone()
        e8m0 = scale.dtype == torch.uint8  # where one more is twice as much
        scale[::4] = scale[::4] + 1 if e8m0 else scale[::4] * 1.25
        return ours.call(replace(weights, beside=weights.beside | {"w2_scale_EDG": scale}), routed)

    broken = contenders.Contender(name="broken", call=with_wrong_scale)
    wrong, right = cells.measure(grid_of(format, case, broken, ours), RATES)
    assert wrong.us is None and "AssertionError: set 0: relative error 0." in wrong.wrong
    assert right.us is not None and not right.wrong


def test_zeros_that_are_left_out_are_an_error_of_the_cell() -> None:
    ours = contenders.ours(TINY, "cpu")

    def without(weights: Weights, routed: Routed) -> torch.Tensor:
        beside = {n: t for n, t in weights.beside.items() if "zero" not in n}
        return ours.call(replace(weights, beside=beside), routed)

    broken = contenders.Contender(name="broken", call=without)
    (cell,) = cells.measure(grid_of("uint4:1x32", TINY, broken), RATES)
    assert cell.us is None and "w13_EFD's zero is missing: 'uint4:1x32'" in cell.wrong


def test_limits_by_format() -> None:
    weights, both = formats.parse("mxfp4"), formats.parse(BLOCK_INPUTS)
    limit = numerics.limit_of
    assert limit(BF16, None, 1) == limit(BF16, weights, 1) == limit(BF16, weights, 4096) == 0.01
    assert limit(F32, weights, 1) == 1e-5
    assert limit(BF16, both, 16384) == pytest.approx(4.6e-2, rel=5e-3)
    assert limit(BF16, both, 1) == pytest.approx(6.1e-2)
    rows, integers = (formats.parse(f"{e}:row+{e}:row") for e in ("float8_e4m3fn", "int8"))
    assert limit(BF16, integers, 4096) < limit(BF16, both, 4096) < limit(BF16, rows, 4096)


def test_a_token_reads_so_little_that_more_sets_take_turns() -> None:
    mxfp4 = formats.parse("mxfp4")
    assert [inputs.sets_for(T) for T in (1, 64, 4096)] == [8, 8, 2]
    assert [inputs.sets_for(T, mxfp4) for T in (1, 64, 4096)] == [16, 8, 2]


def test_a_cell_draws_the_same_whatever_was_measured_before() -> None:
    drawn = []

    def keep(weights: Weights, routed: Routed) -> torch.Tensor:
        drawn.append(routed.x_TD)
        return ours.call(weights, routed)

    ours: contenders.Contender = contenders.ours(TINY, "cpu")
    keeping: Callable[..., torch.Tensor] = keep
    grid = grid_of("mxfp4", TINY, contenders.Contender(name="keeping", call=keeping))
    for tokens in ([20], [4, 20]):
        (*_, last) = cells.measure(replace(grid, tokens=tokens), RATES)
        assert last.tokens == 20 and not last.wrong
    several = [x for x in drawn if len(x) == 20]
    assert torch.equal(several[0], several[len(several) // 2])


@pytest.mark.parametrize(
    ("case", "format", "why"),
    [
        (Case(name="odd", T=1, E=2, K=1, D=66, I=32), "mxfp4", "groups of 32; measure other"),
        (Case(name="odd", T=1, E=2, K=1, D=65, I=32), "int4:row", "packed in 2s; measure other"),
        (Case(name="odd", T=1, E=2, K=1, D=96, I=64), "int4:1x64", "choose groups of 32, or"),
        (Case(name="odd", T=1, E=2, K=1, D=128, I=96), "int4:1x128", "w2 of odd has 96 columns"),
    ],
)
def test_widths_must_fill_the_groups(case: Case, format: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        formats.check_layer(formats.parse(format), case)


def test_static_scales_are_named_and_only_behind_inputs() -> None:
    assert formats.spelled(formats.parse(STATIC_INPUTS)) == STATIC_INPUTS
    assert formats.in_words(STATIC_INPUTS).endswith("inputs in float8_e4m3fn:tensor, static")
    with pytest.raises(ValueError, match="only 'static' may come after inputs"):
        formats.parse(STATIC_INPUTS.removesuffix("static") + "fixed")
    with pytest.raises(ValueError, match="names no inputs"):
        formats.parse("mxfp4++static")


def test_static_scales_are_those_of_a_calibration() -> None:
    made = inputs.make_weights(TINY, BF16, generator(), formats.parse(STATIC_INPUTS))
    x_scale, h_scale = (made.beside[name] for name in ("x_scale", "h_scale"))
    assert x_scale.shape == h_scale.shape == (1,)
    assert 4 < float(x_scale) * 448 < 6  # the largest of some 2**17 normal values
    routed = inputs.make_routed(TINY, 64, "uniform", BF16, generator(1))
    w13_FD, _ = made.expert(0)
    gate, up = torch.nn.functional.linear(routed.x_TD.float(), w13_FD).chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate) * up
    assert float(h.abs().amax()) / 2 < float(h_scale) * 448 < 10 * float(h.abs().amax())
