"""Weights of calls in formats, and calls of `experts` whose tokens are codes already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_ops.quant import packing
from moe_ops.quant.arguments import not_codes
from moe_ops.quant.formats import Format
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


def fits(format: str, *widths: int) -> bool:
    """Whether rows of these widths fill whole bytes."""
    return not format or all(w % Format.of(format).parsed.storage.values == 0 for w in widths)


def quantized(w: Tensor, format: str, name: str, axes: str) -> dict[str, Tensor | None]:
    """A stacked weight's values, scales and zero points as arguments of an op."""
    done = packing.quantize(w, Format.of(format))
    return {f"{name}_E{axes}": done.values, f"{name}_scale_E{axes[0]}G": done.scale,
            f"{name}_zero_E{axes[0]}G": done.zero}  # fmt: skip


def in_formats(layer: Any, w_format: str, x_format: str) -> dict[str, Any]:
    """The weights of a layer in a format, for inputs in one."""
    first = quantized(layer.w13_EFD, w_format, "w13", "FD")
    second = quantized(layer.w2_EDI, w_format, "w2", "DI")
    return {"w_format": w_format, "x_format": x_format, **first, **second}
