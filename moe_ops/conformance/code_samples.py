"""Calls of `experts` whose tokens are codes already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_ops.quant.arguments import not_codes
from moe_ops.registry.spec import OPS

Call = dict[str, Any]


def of_codes(call: Mapping[str, Any]) -> Call:
    """A call whose tokens were quantised before it, and are equal otherwise."""
    x_TD = call["x_TD"]
    q_TD, scale_TG = OPS["quantize"].reference(x_TD, call["x_format"])
    out_dtype = str(x_TD.dtype).removeprefix("torch.")
    return {**call, "x_TD": q_TD, "x_scale_TG": scale_TG, "out_dtype": out_dtype}


def with_codes(found: Mapping[str, Call]) -> dict[str, Call]:
    """All calls, and those again whose tokens may come as codes."""
    may = {
        name: call
        for name, call in found.items()
        if not_codes(call.get("x_format", ""), call.get("x_scale")) is None
    }
    return {**found, **{f"codes_{name}": of_codes(call) for name, call in may.items()}}
