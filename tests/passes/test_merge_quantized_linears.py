"""`merge_quantized_linears`: layers in codes of one input become one call; others stay."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from moe_ops.decode_ops import quantized_linears
from moe_ops.hf.linears import made_of
from moe_ops.passes.merge_quantized_linears import merge_quantized_linears, plan_of
from moe_ops.passes.rewriting.context import Context
from moe_ops.testing import BF16, F16, F32, Tol, assert_close
from tests.decode_ops.test_quantized_linears import call_of
from tests.passes.post_grad import Compiled, text

TOL = Tol(1e-5, "float32 sums in another order")


class Attention(nn.Module):
    """Three layers of one input, in one format or in several, and one of another input."""

    def __init__(self, formats: tuple[str, str, str], dtype: torch.dtype = F32) -> None:
        super().__init__()
        for name, rows, format in zip("qkv", (32, 24, 24), formats, strict=True):
            setattr(self, name, coded(64, rows, format, bias=name == "k"))
        self.o = coded(24, 16, formats[0].replace("1x32", "row"))
        self.to(dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.k(x).sigmoid(), self.v(x).tanh()
        return self.q(x), self.o(k * v)


def coded(columns: int, rows: int, format: str, bias: bool = False) -> nn.Module:
    linear = nn.Linear(columns, rows, bias=bias).requires_grad_(False)
    module = made_of(linear, format)
    module.round_from(linear.weight, "floor")
    return module


def merged(model: Any, *args: Tensor, dynamic: bool = False) -> tuple[int, Any, fx.Graph, Context]:
    context, counts = Context(), []

    def hook(graph: fx.Graph) -> None:
        counts.append(merge_quantized_linears(graph, context))
        graph.eliminate_dead_code()
        assert merge_quantized_linears(graph, Context()) == 0

    compiled = Compiled(model, hook, dynamic=dynamic)
    got = compiled(*args)
    return counts[0], got, compiled.graphs[0], context


def calls(graph: fx.Graph) -> list[int]:
    """The number of weights of each call."""
    found = graph.find_nodes(op="call_function", target=torch.ops.moe_ops.quantized_linears.planned)
    return [len(node.args[1]) for node in found]


def test_golden() -> None:
    model = Attention(("uint4:1x32",) * 3, BF16)
    count, _, graph, context = merged(model, torch.randn(2, 3, 64, dtype=BF16))
    said = [note.text for note in context.rewrites]
    assert said == ["3 of [6, 64] in uint4:1x32", "cpu", "cpu"] and count == 3
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[2, 3, 64]
arg1_1: uint8[24, 32]
arg2_1: float32[24, 2]
arg3_1: uint8[24, 2]
arg4_1: bfloat16[24]
arg5_1: uint8[24, 32]
arg6_1: float32[24, 2]
arg7_1: uint8[24, 2]
arg8_1: uint8[32, 32]
arg9_1: float32[32, 2]
arg10_1: uint8[32, 2]
arg11_1: uint8[16, 12]
arg12_1: float32[16, 1]
arg13_1: uint8[16, 1]
view = aten.reshape(arg0_1, [-1, 64])  # bfloat16[6, 64]
quantized_linears_planned = moe_ops.quantized_linears.planned(view, [arg1_1, arg5_1, arg8_1], [arg2_1, arg6_1, arg9_1], [arg3_1, arg7_1, arg10_1], [None, None, None], [arg4_1, None, None], uint4:1x32, plan=cpu)
getitem_4 = getitem(quantized_linears_planned, 0)  # bfloat16[6, 24]
getitem_5 = getitem(quantized_linears_planned, 1)  # bfloat16[6, 24]
getitem_6 = getitem(quantized_linears_planned, 2)  # bfloat16[6, 32]
view_1 = aten.reshape(getitem_4, [2, 3, 24])  # bfloat16[2, 3, 24]
sigmoid = aten.sigmoid(view_1)  # bfloat16[2, 3, 24]
view_3 = aten.reshape(getitem_5, [2, 3, 24])  # bfloat16[2, 3, 24]
tanh = aten.tanh(view_3)  # bfloat16[2, 3, 24]
mul = aten.mul.Tensor(sigmoid, tanh)  # bfloat16[2, 3, 24]
view_6 = aten.reshape(mul, [-1, 24])  # bfloat16[6, 24]
quantized_linears_planned_1 = moe_ops.quantized_linears.planned(view_6, [arg11_1], [arg12_1], [arg13_1], [None], [None], uint4:row, plan=cpu)
getitem_3 = getitem(quantized_linears_planned_1, 0)  # bfloat16[6, 16]
view_5 = aten.reshape(getitem_6, [2, 3, 32])  # bfloat16[2, 3, 32]
view_7 = aten.reshape(getitem_3, [2, 3, 16])  # bfloat16[2, 3, 16]
return [view_5, view_7]""",  # noqa: E501
    )


def test_results_stay() -> None:
    for formats, wanted in (
        (("int8:row",) * 3, [3, 1]),
        (("int8:row", "int8:row", "mxfp4"), [2, 1, 1]),
        (("int8:row", "float8_e4m3fn:row", "mxfp4"), [1, 1, 1, 1]),
    ):
        model, x = Attention(formats), torch.randn(2, 3, 64)
        with torch.inference_mode():
            want = copy.deepcopy(model)(x)
        count, got, graph, _ = merged(model, x)
        assert count == len(wanted) + (1 if len(wanted) < 4 else 0)
        assert sorted(calls(graph), reverse=True) == wanted
        for y, same in zip(got, want, strict=True):
            assert_close(y, same, TOL)


def test_any_number_of_rows() -> None:
    model = Attention(("int8:row",) * 3)
    count, _, graph, _ = merged(model, torch.randn(2, 3, 64), dynamic=True)
    assert count == 3 and sorted(calls(graph)) == [1, 3]


def test_codes_that_are_computed_are_left() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = coded(64, 8, "int8:row"), coded(64, 8, "int8:row")

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = self.a(x)
            b = self.b
            (second,) = torch.ops.moe_ops.quantized_linears(
                x, [b.weight_codes], [b.weight_scale * 2], [None], [None], [None], b.w_format
            )
            return first, second

    count, _, graph, context = merged(Computed(), torch.randn(3, 64))
    assert count == 2 and calls(graph) == [1, 1]
    assert "is no parameter" in context.refusals[0].text


def test_plans_have_the_backends_that_take_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for format, dtype, wanted in (
        ("int8:row", F32, "cpu"), ("int8:row", F16, "dequantize"), ("nvfp4", F32, "dequantize"),
    ):  # fmt: skip
        call, _ = call_of(2, 64, (8,), format, dtype)
        assert plan_of(call) == wanted
    few, decoded = (quantized_linears.backends[n] for n in ("triton", "triton.decoded"))
    last = quantized_linears.backends["reference"]
    order = (*(replace(b, devices=None, supports=None) for b in (few, decoded)), last)
    monkeypatch.setitem(quantized_linears._order, "cpu", order)
    assert plan_of(call) == "64:triton,:triton.decoded"
    monkeypatch.setitem(quantized_linears._order, "cpu", (order[0], last))
    assert plan_of(call) == "64:triton,:reference"
