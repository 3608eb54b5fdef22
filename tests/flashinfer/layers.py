"""Layers in every format that FlashInfer's backends read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import experts
from moe_ops.ops.experts import ExpertsCall, weights_of
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, make_layer

CASE = Case(name="tiled", T=12, E=4, K=2, D=256, I=128)
F8, BLOCKS, GROUPS = "float8_e4m3fn:tensor", "float8_e4m3fn:128x128", "float8_e4m3fn:1x128"
FORMATS = {
    "bfloat16": ("", ""),
    "float8": (F8, F8),
    "blocks": (BLOCKS, GROUPS),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4": ("mxfp4", ""),
    "mxfp4-mxfp8": ("mxfp4", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
# The most of |got - want| / |want|, in norms: products of 16 bits round in other places, so inputs
# of codes change code in the middle of two.
MOST_ERROR = {
    "bfloat16": 0.008,
    "float8": 0.03,
    "blocks": 0.03,
    "mxfp8": 0.03,
    "mxfp4": 0.008,
    "mxfp4-mxfp8": 0.03,
    "nvfp4": 0.08,
}
WRONG = 0.2  # what no error of roundings reaches


def call_of(
    formats: str, gated: bool = True, tokens: int | None = None, case: Case = CASE, **more: Any
) -> ExpertsCall:
    """A call as weights are loaded: with static inputs, and for each expert factors of its own."""
    if formats == "float8":
        pytest.importorskip("triton", reason="a kernel of Triton's makes factors of its scales")
    w_format, x_format = FORMATS[formats]
    case = case if tokens is None else replace(case, T=tokens)
    made = make_layer(case, torch.bfloat16, gated=gated)
    call = ExpertsCall(
        made.x_TD, made.weights_TK, made.ids_TK, made.w13_EFD, made.w2_EDI,
        kind="silu" if gated else "relu2", gated=gated,
    )  # fmt: skip
    if w_format:
        own = torch.rand(case.E) + 0.5 if formats == "nvfp4" else None
        w13, w2 = (
            packing.quantize(w, Format.of(w_format), global_scale=None if own is None else own / n)
            for n, w in ((400, made.w13_EFD), (300, made.w2_EDI))
        )
        scales = {
            "w13_EFD": w13.values, "w2_EDI": w2.values,
            "w13_scale_EFG": w13.scale, "w2_scale_EDG": w2.scale,
        }  # fmt: skip
        call = replace(call, w_format=w_format, x_format=x_format, **scales)
        if x_format in (F8, "nvfp4"):
            x_scale, h_scale = (torch.tensor([s]) for s in STATIC[x_format])
            call = replace(call, x_scale=x_scale, h_scale=h_scale)
            if own is not None:
                call.global_scale13_E, call.global_scale2_E = (
                    own / 400 * x_scale,
                    own / 300 * h_scale,
                )
    return replace(call, **more)


# A power of two scales blocks as 1 does, which is what b12x takes.
STATIC = {F8: (4 / 448, 8 / 448), "nvfp4": (4 / 2688, 2**-8)}


def stored(call: ExpertsCall, layout: str) -> ExpertsCall:
    """The same with weights prepared in place, in copies."""
    held = {n: t.clone() for n, t in weights_of(call).items()}
    experts.layouts[layout].prepare_(held)
    return replace(call, layout=layout, **held)


def run(name: str, call: ExpertsCall) -> Tensor:
    """A backend, if it says that it can."""
    backend = experts.backends[name]
    reason = backend.refusal("cpu", call.x_TD.shape[0], call)
    assert reason is None, reason
    experts.check(call)
    out: Tensor = backend.run(call)
    return out


def wanted(call: ExpertsCall) -> Tensor:
    """The definition."""
    out: Tensor = experts.body(call)
    return out


def error_of(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, in norms; infinite if anything is no number."""
    error = (got.double() - want.double()).norm() / want.double().norm()
    return float(error.nan_to_num(nan=float("inf")))


def check(name: str, formats: str, got: Tensor, want: Tensor) -> None:
    """Raise AssertionError unless a backend's result is the definition's, but for roundings."""
    assert got.shape == want.shape and got.dtype == want.dtype
    error, most = error_of(got, want), MOST_ERROR[formats]
    assert error <= most, f"{name} of {formats}: an error of {error:.3g}, at most {most}"
