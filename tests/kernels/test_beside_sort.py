"""Tokens made ready in the launch that sorts their pairs: what launches of their own make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are Triton's")

from moe_ops import experts
from moe_ops.backends.triton import run_experts
from moe_ops.conformance.adapter_samples import adapters
from moe_ops.kernels.triton.experts import driver
from moe_ops.kernels.triton.experts.operands import beside_sort
from moe_ops.kernels.triton.experts.operands.beside_sort import Made
from moe_ops.kernels.triton.experts.schedule.sort import sort_pairs
from moe_ops.ops.adapters import Adapter
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import BF16, DEVICE, F16, Case
from tests.chosen import in_turn
from tests.kernels.test_quantized_experts import BLOCK_FLOAT8, call_of

STATIC = {
    n: torch.tensor([scale], device=DEVICE) for n, scale in (("x_scale", 0.02), ("h_scale", 0.01))
}
# Weights, inputs, static scales; how tokens are made.
MADE = {
    "groups": (*BLOCK_FLOAT8, {}, "groups"),
    "rows": ("float8_e4m3fn:row", "float8_e4m3fn:row", {}, "row"),
    "int8_rows": ("int8:tensor", "int8:row", {}, "row"),
    "static": ("int8:row", "int8:tensor", STATIC, "row"),
    "mxfp8": ("mxfp8", "mxfp8", {}, "emulated"),
    "mxfp4_by_mxfp8": ("mxfp4", "mxfp8", {}, "emulated"),
    "emulated_static": ("mxfp4", "float8_e4m3fn:tensor", STATIC, "emulated"),
    "int4": ("int4:1x32:bfloat16", "", {}, "arranged"),
    "mxfp6": ("mxfp6_e2m3", "", {}, "arranged"),
}
# What is known of all tokens first, or of an expert, is made in launches of its own.
APART = {
    "rows_of_emulated": ("mxfp4", "float8_e4m3fn:row", {}),
    "nvfp4": ("nvfp4", "nvfp4", {}),
    "tensor": ("int8:row", "int8:tensor", {}),
    "bytes": ("mxfp8", "", {}),
}
CASE = Case(name="beside", T=19, E=6, K=3, D=288, I=96)


def layer(w_format: str, x_format: str, static: dict[str, Tensor], **more: Any) -> ExpertsCall:
    call = replace(call_of(CASE, w_format, x_format, **more), **static)
    wide = torch.full((CASE.T, CASE.D + 32), float("nan"), dtype=call.x_TD.dtype, device=DEVICE)
    wide[:, :-32] = call.x_TD
    wide[3], wide[5, 7], wide[6, 8] = 0, float("nan"), float("inf")
    call.ids_TK[2], call.ids_TK[9, 1] = -1, CASE.E
    return replace(call, x_TD=wide[:, :-32])


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def both_ways(call: ExpertsCall, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, Any]:
    """The layer with tokens made beside the sort, and in launches of their own; what was made."""
    found: list[Made | None] = []

    def made(*args: Any, **more: Any) -> Made | None:
        found.append(beside_sort.made_beside(*args, **more))
        return found[-1]

    monkeypatch.setattr(driver, "made_beside", made)
    got = run_experts("rows/rows", call)
    monkeypatch.setattr(driver, "made_beside", lambda *_, **__: None)
    return got, run_experts("rows/rows", call), found[0]


@in_turn(
    pytest.mark.parametrize("dtype", [BF16, F16], ids=str), pytest.mark.parametrize("case", MADE)
)
def test_the_same_tokens(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    w_format, x_format, static, how = MADE[case]
    if static and dtype == F16 and how == "emulated":
        dtype = BF16  # float16 has no room for codes times a static scale
    call = layer(w_format, x_format, static, dtype=dtype)
    got, want, made = both_ways(call, monkeypatch)
    assert made is not None and made.how == how
    assert same(got, want) and bool(got[0].isfinite().all())


@pytest.mark.parametrize("case", APART)
def test_what_is_made_apart(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got, want, made = both_ways(layer(*APART[case]), monkeypatch)
    assert made is None and same(got, want)


def test_more_pairs_than_one_launch_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_sort, "ONE_LAUNCH", CASE.T * CASE.K - 1)
    got, want, made = both_ways(layer(*MADE["groups"][:3]), monkeypatch)
    assert made is None and same(got, want)


@pytest.mark.parametrize("case", ["groups", "mxfp8", "mxfp4_by_mxfp8", "int4"])
def test_adapters_read_the_same_tokens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated ones before they are arranged, so that these are made apart."""
    w_format, x_format, static, _ = MADE[case]
    call = layer(w_format, x_format, static)
    adapter = Adapter(**adapters(experts.arguments.by_name(call), (4, 3), 2))
    outs = []
    for beside in (beside_sort.made_beside, lambda *_, **__: None):
        monkeypatch.setattr(driver, "made_beside", beside)
        outs.append(run_experts("rows/rows", call, adapter=adapter))
    assert same(*outs)


@pytest.mark.parametrize("mapped", [False, True], ids=["all", "mapped"])
def test_rows_are_sorted(mapped: bool) -> None:
    call = layer(*MADE["groups"][:3])
    expert_map = torch.randperm(CASE.E + 1, device=DEVICE) - 1 if mapped else None
    values = torch.empty(CASE.T, CASE.D, dtype=torch.float8_e4m3fn, device=DEVICE)
    scale = torch.empty(CASE.T, 3, device=DEVICE)
    made = Made(how="groups", values=values, scale=scale, block=4, group=128)
    got = beside_sort.sort_beside_tokens(call.ids_TK, CASE.E, expert_map, call.x_TD, made)
    for t, want in zip(got, sort_pairs(call.ids_TK, CASE.E, expert_map), strict=True):
        assert torch.equal(t, want)
