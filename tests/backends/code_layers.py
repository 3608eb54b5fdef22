"""Layers of codes on the CPU, and the sets of instructions to which tests confine its kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops import experts
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, make_layer

# Rows of several steps of codes, the last one cut short, with one to more than eight tokens.
CASE = Case(name="steps", T=24, E=4, K=2, D=416, I=160)
# More rows of an expert than are multiplied while codes are in registers, in several tiles.
MANY = Case(name="many", T=62, E=2, K=1, D=416, I=160)
# No multiple of any step or group.
ODD = Case(name="odd", T=5, E=3, K=2, D=90, I=38)
MANY_ODD = Case(name="many_odd", T=47, E=2, K=1, D=90, I=38)
# What machines with less run; each is compiled for itself.
MARKS = {
    "AVX512": pytest.mark.every,
    "AVX_VNNI": pytest.mark.every,
    "AVX2": pytest.mark.slow,
    "PLAIN": pytest.mark.every,
}


def by_instructions(*others: str) -> pytest.MarkDecorator:
    """Parametrise by all instructions of this machine, and by some of MARKS alone."""
    names = [pytest.param(name, marks=MARKS[name]) for name in others]
    return pytest.mark.parametrize("instructions", ["", *names], ids=["all", *others])


# Element types of weights and of inputs whose codes AVX2 reads by code of its own in codes.h or
# inputs.h: four bits have one function, eight bits of integers differ by their sign alone, and all
# else is compiled the same for other types.
OWN_CODE = {("int8", ""), ("float4_e2m1", ""), ("float8_e4m3fn", ""), ("int8", "int8")}


def by_format_and_instructions(
    argument: str, formats: Iterable[Any], *others: str
) -> pytest.MarkDecorator:
    """Parametrise by formats of weights, or by pairs of those of weights and of inputs, and by
    instructions: AVX2 alone runs always with what it has code of its own for."""
    params = []
    for format in formats:
        pair = format if isinstance(format, tuple) else (format, "")
        elements = tuple(f and Format.of(f).element for f in pair)
        named = f"{' with '.join(f for f in pair if f)}"
        params.append(pytest.param(format, "", id=f"{named}-all"))
        for name in others:
            marks = [MARKS[name], *[pytest.mark.every] * (elements not in OWN_CODE)]
            params.append(pytest.param(format, name, marks=marks, id=f"{named}-{name}"))
    return pytest.mark.parametrize((argument, "instructions"), params)


def layer_of(
    case: Case, format: str, dtype: torch.dtype, gated: bool = True, x_format: str = ""
) -> dict[str, Any]:
    """The arguments of a layer of this format, with biases."""
    layer = make_layer(case, dtype, gated=gated)
    w13, w2 = (packing.quantize(w, Format.of(format)) for w in (layer.w13_EFD, layer.w2_EDI))
    return {
        "x_TD": layer.x_TD, "weights_TK": layer.weights_TK, "ids_TK": layer.ids_TK,
        "w13_EFD": w13.values, "w2_EDI": w2.values, "b13_EF": layer.b13_EF, "b2_ED": layer.b2_ED,
        "w13_scale_EFG": w13.scale, "w2_scale_EDG": w2.scale,
        "w13_zero_EFG": w13.zero, "w2_zero_EDG": w2.zero, "w_format": format, "x_format": x_format,
    }  # fmt: skip


def calls_apart(call: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The same layer where not all experts are here, by what is apart."""
    holes = call["ids_TK"].long()
    holes[::3, 0], holes[1] = -1, CASE.E
    here = {
        n: t[:2]
        for n, t in call.items()
        if isinstance(t, Tensor) and n[:2] in ("w1", "w2", "b1", "b2")
    }
    mapped = {"expert_map": torch.tensor([1, -1, 0, -1], dtype=torch.int32)}
    return {
        "pairs that are not here": call | {"ids_TK": holes},
        "experts of one rank": call | here | mapped,
    }


def run(call: dict[str, Any]) -> Tensor:
    with moe_ops.using("cpu", "experts"):
        return experts(**call)
