"""`fuse_norm`: the norm of a few rows goes into the launch of the layers in codes that read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.nn.functional import linear

from moe_ops.decode_ops import quantized_linears
from moe_ops.hf.linears import made_of
from moe_ops.passes.merge_quantized_linears import merge_quantized_linears
from moe_ops.passes.rewriting.context import Context
from moe_ops.testing import BF16, assert_close
from tests import decoding
from tests.passes.post_grad import Compiled, text
from tests.passes.test_fuse_norm import ROUNDED, Fuse, norm, parameter

D = 32
ops = torch.ops.moe_ops


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding.on_any_device(monkeypatch)


class Layers(nn.Module):
    """A norm of a sum, layers in codes that read it, and a router in floats where there is one."""

    def __init__(self, format: str, router: bool = False) -> None:
        super().__init__()
        self.gain, self.router = parameter(D), parameter(8, D) if router else None
        for name, rows in (("q", 24), ("k", 8)):
            of = nn.Linear(D, rows, bias=False).requires_grad_(False)
            setattr(self, name, made_of(of, format))
            getattr(self, name).round_from(of.weight, "floor")
        self.bfloat16()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        s = x + y
        n = norm(s, self.gain)
        routed = () if self.router is None else (linear(n, self.router),)
        return s - n, *routed, self.q(n), self.k(n)


class FuseCodes(Fuse):
    def __call__(self, graph: fx.Graph) -> None:
        merge_quantized_linears(graph, Context())
        super().__call__(graph)


def fused(model: Any, rows: int = 1) -> tuple[FuseCodes, fx.Graph]:
    """The passes and the graph that they leave, which gives what the model does."""
    given = [torch.randn(1, rows, D, dtype=BF16) for _ in range(2)]
    with torch.inference_mode():
        want = model(*given)
    hook = FuseCodes()
    compiled = Compiled(model, hook)
    for g, w in zip(compiled(*given), want, strict=True):
        assert g.shape == w.shape
        assert_close(g.float(), w.float(), ROUNDED)
    return hook, compiled.graphs[0]


def count(graph: fx.Graph, target: Any) -> int:
    return len(graph.find_nodes(op="call_function", target=target))


def test_golden() -> None:
    hook, graph = fused(Layers("uint4:1x32"))
    assert [note.text for note in hook.context.rewrites] == ["a norm of a sum and 2 products"]
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[1, 1, 32]
arg1_1: bfloat16[1, 1, 32]
arg2_1: bfloat16[32]
arg3_1: uint8[24, 16]
arg4_1: float32[24, 1]
arg5_1: uint8[24, 1]
arg6_1: uint8[8, 16]
arg7_1: float32[8, 1]
arg8_1: uint8[8, 1]
reshape_default = aten.reshape(arg0_1, [1, 32])  # bfloat16[1, 32]
reshape_default_1 = aten.reshape(arg1_1, [1, 32])  # bfloat16[1, 32]
normed_quantized_linears_planned = moe_ops.normed_quantized_linears.planned(reshape_default, reshape_default_1, arg2_1, 1e-06, [arg3_1, arg6_1], [arg4_1, arg7_1], [arg5_1, arg8_1], [None, None], [None, None], uint4:1x32, plan=triton)
getitem_4 = getitem(normed_quantized_linears_planned, 0)  # bfloat16[1, 32]
getitem_5 = getitem(normed_quantized_linears_planned, 1)  # bfloat16[1, 32]
getitem_6 = getitem(normed_quantized_linears_planned, 2)  # bfloat16[1, 24]
getitem_7 = getitem(normed_quantized_linears_planned, 3)  # bfloat16[1, 8]
reshape_default_2 = aten.reshape(getitem_5, [1, 1, 32])  # bfloat16[1, 1, 32]
reshape_default_3 = aten.reshape(getitem_4, [1, 1, 32])  # bfloat16[1, 1, 32]
sub = aten.sub.Tensor(reshape_default_3, reshape_default_2)  # bfloat16[1, 1, 32]
view_1 = aten.reshape(getitem_6, [1, 1, 24])  # bfloat16[1, 1, 24]
view_3 = aten.reshape(getitem_7, [1, 1, 8])  # bfloat16[1, 1, 8]
return [sub, view_1, view_3]""",  # noqa: E501
    )


@pytest.mark.parametrize(
    ("format", "rows"), [("mxfp6_e2m3", 1), ("float8_e4m3fn:row", 8), ("int4:1x32", 64)], ids=str
)
def test_numbers_stay(format: str, rows: int) -> None:
    hook, graph = fused(Layers(format), rows)
    assert hook.count == 1 and count(graph, ops.normed_quantized_linears.planned) == 1


def test_one_of_two_launches_norms() -> None:
    """The first one, of whose result the other reads the normed row."""
    hook, graph = fused(Layers("float8_e4m3fn:row", router=True))
    assert hook.count == 1
    assert count(graph, ops.normed_quantized_linears.planned) == 1
    assert count(graph, ops.linears.planned) == 1


@pytest.mark.parametrize(
    ("format", "rows", "reason"),
    [
        ("int8:1x8", 1, "needs groups of 16, 32, 64, 128 or more columns, got 8"),
        ("int8:row", 65, ""),
    ],
    ids=str,
)
def test_near_misses(format: str, rows: int, reason: str) -> None:
    hook, graph = fused(Layers(format), rows)
    assert hook.count == 0 and count(graph, ops.quantized_linears.planned) == 1
    said = [note.text for note in hook.context.refusals]
    assert len(said) == (1 if reason else 0) and all(reason in text for text in said)


class Computed(Layers):
    """A bias that is computed in the graph, ahead of the norm or behind it."""

    def __init__(self, ahead: bool) -> None:
        super().__init__("int8:row")
        self.bias, self.ahead = parameter(24), ahead

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        bias = 2 * self.bias if self.ahead else self.bias
        n = norm(x + y, self.gain)
        bias = bias if self.ahead else 2 * self.bias
        given = ([self.q.weight_codes], [self.q.weight_scale], [None], [None], [bias], "int8:row")
        return tuple(quantized_linears(n.reshape(-1, D), *given))


@pytest.mark.parametrize("ahead", [True, False])
def test_what_is_computed_is_not_read_ahead(ahead: bool) -> None:
    hook, graph = fused(Computed(ahead))
    assert hook.count == 0 and count(graph, ops.quantized_linears.planned) == 1
    assert ["is no parameter" in note.text for note in hook.context.refusals] == [True]


class Gains(Layers):
    """A gain of more rows than the sum has."""

    def __init__(self) -> None:
        super().__init__("int8:row")
        self.gain = parameter(4, D)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (self.q(norm(x + y, self.gain)),)


def test_a_gain_with_rows_of_its_own() -> None:
    hook, graph = fused(Gains())
    assert hook.count == 0 and count(graph, ops.quantized_linears.planned) == 1
    assert [note.text for note in hook.context.refusals] == ["the gain has rows of its own"]


def test_a_device_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hook, graph = fused(Layers("int8:row"))
    assert hook.count == 0 and count(graph, ops.quantized_linears.planned) == 1
