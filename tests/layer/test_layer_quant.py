"""A quantised layer takes what is legal as it is, and names every tensor that breaks a rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import randomize
from test_layer_split import FORMATS
from torch import Tensor, nn

from moe_ops.layer import MoELayer
from moe_ops.quant.config import QuantConfig

E, D, I = 3, 256, 128  # noqa: E741  the legend's letter
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
Data = st.DataObject


def layer_of(quant: str | QuantConfig, **more: Any) -> MoELayer:
    return MoELayer(E, 2, D, I, quant=quant, bias=True, **more)


LAYERS = {str(quant): layer_of(quant, device="meta") for quant in FORMATS}


@dataclass(frozen=True)
class Breach:
    """A tensor in the place of one of a layer's, and how it is refused."""

    name: str
    t: Tensor | None
    found: str
    error: type[Exception] = ValueError


@dataclass(frozen=True)
class Mutation:
    """How to break a rule, of a layer that has tensors whose names end in one of `ends`."""

    ends: tuple[str, ...]
    breach: Callable[[Data, str, Tensor], Breach]
    applies: Callable[[Tensor], bool] = lambda t: True

    def names(self, layer: MoELayer) -> list[str]:
        own = {name: getattr(layer, name) for name in layer._specs}
        found = ((n, t) for n, t in own.items() if t is not None and n.endswith(self.ends))
        return [name for name, t in found if self.applies(t)]


SCALES = ("scale", "global_scale")


def with_entry(data: Data, t: Tensor, value: float) -> tuple[Tensor, str]:
    """A copy with one entry of its own, and where it is."""
    flat = data.draw(st.integers(0, t.numel() - 1))
    copy = t.detach().clone()
    copy.view(-1)[flat] = value
    place = [int(i) for i in torch.unravel_index(torch.tensor(flat), t.shape)]
    return copy, re.escape(str(place))


def not_positive(data: Data, name: str, t: Tensor) -> Breach:
    values, least = [-1.0, float("nan")], "from"
    if t.dtype != E4M3:  # of a block near zero; and it has no infinity
        values, least = [*values, 0.0, -0.0, float("inf"), float("-inf")], "above"
    bad, place = with_entry(data, t, data.draw(st.sampled_from(values)))
    found = f"{name} must hold finite values {least} 0; 1 of {t.numel()} .* at {place};"
    return Breach(name, bad, found)


def nan_of_e8m0(data: Data, name: str, t: Tensor) -> Breach:
    bad, place = with_entry(data, t, 255)
    return Breach(name, bad, f"{name} must hold codes below 255, .* at {place};")


def zero_above_codes(data: Data, name: str, t: Tensor) -> Breach:
    value = data.draw(st.integers(16, 255))
    bad, _ = with_entry(data, t, value)
    return Breach(name, bad, f"{name} must lie in 0 to 15, the codes of uint4, got {value}")


def other_dtype(data: Data, name: str, t: Tensor) -> Breach:
    dtype = data.draw(st.sampled_from([torch.float64, torch.int16]))
    got = str(dtype).removeprefix("torch.")
    found = f"{name} must be .*; got {got}; convert it first"
    return Breach(name, t.detach().to(dtype), found, TypeError)


def other_shape(data: Data, name: str, t: Tensor) -> Breach:
    axis = data.draw(st.integers(0, t.dim() - 1))
    bad = torch.cat([t.detach().view(U8)] * 3, axis).view(t.dtype)
    return Breach(name, bad, rf"{name} must have shape .* got {re.escape(str(list(bad.shape)))}")


def other_rank(data: Data, name: str, t: Tensor) -> Breach:
    bad = t.detach()[None]
    return Breach(name, bad, f"{name} must have {t.dim()} axes, got shape")


def missing(data: Data, name: str, t: Tensor) -> Breach:
    return Breach(name, None, f"{name} is missing; .* wants the shape {re.escape(str([*t.shape]))}")


def other_device(data: Data, name: str, t: Tensor) -> Breach:
    found = r"is on (cpu|meta), but the first argument is on (meta|cpu); move one"
    return Breach(name, t.detach().to("meta"), found)


EVERY = ("weight", "zero", "bias", *SCALES)
MUTATIONS = {
    "not_positive": Mutation(SCALES, not_positive, lambda t: t.dtype != U8),
    "nan_of_e8m0": Mutation(SCALES, nan_of_e8m0, lambda t: t.dtype == U8),
    "zero_above_codes": Mutation(("zero",), zero_above_codes),
    "other_dtype": Mutation(EVERY, other_dtype),
    "other_shape": Mutation(EVERY, other_shape),
    "other_rank": Mutation(EVERY, other_rank),
    "missing": Mutation(EVERY, missing),
    "other_device": Mutation(EVERY, other_device),
}


def takes(name: str, quant: str) -> bool:
    """Whether a mutation can break a layer of this format."""
    if name == "zero_above_codes" and "uint4" not in quant:
        return False
    return bool(MUTATIONS[name].names(LAYERS[quant]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_broken_rule_is_refused_for_its_reason(name: str, data: Data) -> None:
    rule = MUTATIONS[name]
    quant = data.draw(st.sampled_from([q for q in LAYERS if takes(name, q)]))
    layer = layer_of(LAYERS[quant].quant)
    place = data.draw(st.sampled_from(rule.names(layer)))
    breach = rule.breach(data, place, getattr(layer, place))
    with torch.no_grad():
        new = None if breach.t is None else nn.Parameter(breach.t, requires_grad=False)
    setattr(layer, breach.name, new)
    with pytest.raises(breach.error, match=breach.found):
        layer.quant_config()


def test_every_mutation_has_formats_and_every_format_mutations() -> None:
    assert all(any(takes(name, quant) for quant in LAYERS) for name in MUTATIONS)
    assert all(sum(takes(name, quant) for name in MUTATIONS) >= 6 for quant in LAYERS)


@pytest.mark.parametrize("quant", FORMATS, ids=str)
def test_legal_tensors_are_taken(quant: QuantConfig) -> None:
    layer = randomize(layer_of(quant))
    assert layer.quant_config() is layer.quant is quant
    assert layer.half().quant_config() is quant  # biases are cast
    assert LAYERS[str(quant)].quant_config() is quant  # on the meta device, by shape


UNUSED = {
    "w13_zero": ("int8:row", torch.zeros(E, 2 * I, 1, dtype=U8)),
    "w2_global_scale": ("mxfp4_w4a16", torch.ones(E)),
    "x_scale": ("int8_w8a8_row", torch.ones(1)),
}


@pytest.mark.parametrize("name", UNUSED)
def test_a_tensor_without_use_is_refused(name: str) -> None:
    quant, t = UNUSED[name]
    row = QuantConfig(weights="int8:row", inputs="int8:row")
    layer = layer_of(row if quant == "int8_w8a8_row" else quant)
    setattr(layer, name, nn.Parameter(t, requires_grad=False))
    with pytest.raises(ValueError, match=f"{name} is given, but a layer of .* has none; leave"):
        layer.quant_config()


def test_gate_and_up_scales_apart_are_refused() -> None:
    layer = layer_of("float8_e4m3fn:tensor")
    for shape in ((E, 2), (E, 2, 1)):
        layer.w13_scale = nn.Parameter(torch.ones(shape), requires_grad=False)
        with pytest.raises(ValueError, match=r"w13_scale must have (shape \[3, 1, 1\]|3 axes)"):
            layer.quant_config()


def test_what_is_not_quantised_has_nothing_to_check() -> None:
    assert MoELayer(E, 2, D, I).quant_config() is None
