"""`fuse_residual`: the sum behind the experts that ends a layer is a part of their kernels."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from moe_ops.ops import experts, quantize, route
from moe_ops.passes.fuse_residual import fuse_residual
from moe_ops.passes.pick_backend import pick_backend
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import BF16, F32, Tol, assert_close
from tests import decoding
from tests.chosen import in_turn
from tests.passes.planned import Hook
from tests.passes.post_grad import Compiled, text

pytestmark = pytest.mark.slow  # compiles many graphs
E, D, WIDTH = 4, 16, 8


@pytest.fixture(autouse=True)
def any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none of the kernels; there the op runs its definition."""
    file = importlib.import_module("moe_ops.passes.fuse_residual")
    monkeypatch.setattr(file, "plans", lambda: set(experts.backends))
    for plan in experts.backends:
        decoding.define(monkeypatch, "experts_onto", plan)


def tensors(T: int = 1, dtype: torch.dtype = BF16) -> list[Tensor]:
    x, s = (torch.randn(T, 1, D).to(dtype) for _ in range(2))
    ids = torch.rand(T, E).argsort(1)[:, :2]
    w13, w2 = torch.randn(E, 2 * WIDTH, D).to(dtype), torch.randn(E, D, WIDTH).to(dtype)
    return [s, x, torch.rand(T, 2), ids, w13, w2, torch.randn(E, D).to(dtype)]


def layer(change: str = "") -> Any:
    """The end of a layer; `change` says how it is another."""

    def call(
        s: Tensor, x: Tensor, w: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, b: Tensor
    ) -> Any:
        rows = x.view(-1, D)
        y = experts(rows, w, ids, w13, w2, b2_ED=b, alpha=1.5).view(x.shape)
        if change == "order":
            return y + s
        if change == "read twice":
            return s + y, y.relu()
        if change == "followed":
            return (s + y).relu()
        if change == "scaled":
            return torch.add(s, y, alpha=2)
        if change == "itself":
            return y + y
        if change == "wide":
            return s.float() + y
        if change == "one column":
            return s[..., :1] + y
        if change == "number":
            return y + 1.0
        return s * y if change == "product" else s + y

    return call


def fused(call: Any, *args: Tensor) -> tuple[Hook, Any, fx.Graph]:
    hook = Hook(pick_backend, fuse_residual)
    compiled = Compiled(call, hook)
    got = compiled(*args)
    graph = compiled.graphs[0]
    graph.eliminate_dead_code()
    return hook, got, graph


def test_golden() -> None:
    hook, _, graph = fused(layer(), *tensors())
    assert hook.counts == [1, 1]
    assert_expected_inline(
        text(graph),
        """\
arg0_1: bfloat16[1, 1, 16]
arg1_1: bfloat16[4, 16]
arg2_1: float32[1, 2]
arg3_1: int64[1, 2]
arg4_1: bfloat16[4, 16, 16]
arg5_1: bfloat16[4, 16, 8]
arg6_1: bfloat16[1, 1, 16]
view = aten.reshape(arg0_1, [-1, 16])  # bfloat16[1, 16]
reshape_default = aten.reshape(arg6_1, [1, 16])  # bfloat16[1, 16]
experts_onto_planned = moe_ops.experts_onto.planned(reshape_default, view, arg2_1, arg3_1, arg4_1, arg5_1, plan=cpu, b2_ED=arg1_1, alpha=1.5)  # bfloat16[1, 16]
reshape_default_1 = aten.reshape(experts_onto_planned, [1, 1, 16])  # bfloat16[1, 1, 16]
return [reshape_default_1]""",  # noqa: E501
    )


@in_turn(
    pytest.mark.parametrize("change", ["", "order"]),
    pytest.mark.parametrize("dtype", [BF16, F32], ids=str),
    pytest.mark.parametrize("T", [1, 3, 8]),
)
def test_numbers_stay(T: int, dtype: torch.dtype, change: str) -> None:
    given = tensors(T, dtype)
    hook, got, _ = fused(layer(change), *given)
    assert hook.counts == [1, 1]
    assert torch.equal(got, layer(change)(*given))


def test_scales_of_quantized_weights_go_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_backends", dict(experts.backends))
    monkeypatch.setattr(experts, "_order", {})
    experts.backend("planted", reads=experts.optional, devices=("cpu",), priority=9)(experts.body)
    file = importlib.import_module("moe_ops.passes.fuse_residual")
    monkeypatch.setattr(file, "plans", lambda: {"planted"})
    decoding.define(monkeypatch, "experts_onto", "planted")
    width, w_format = 32, "uint4:1x32"
    w13, w2 = torch.randn(E, 2 * width, width), torch.randn(E, width, width)
    made = [packing.quantize(w, Format.of(w_format)) for w in (w13, w2)]
    names = ("w13_scale_EFG", "w2_scale_EDG", "w13_zero_EFG", "w2_zero_EDG")

    def call(s: Tensor, x: Tensor, w: Tensor, ids: Tensor, *held: Any) -> Tensor:
        codes = dict(zip(names, held[2:], strict=True))
        return s + experts(x, w, ids, *held[:2], **codes, w_format=w_format)

    ids = torch.rand(3, E).argsort(1)[:, :2]
    held = [getattr(m, part) for part in ("values", "scale", "zero") for m in made]
    given = (torch.randn(3, width), torch.randn(3, width), torch.rand(3, 2), ids, *held)
    hook, got, graph = fused(call, *given)
    assert hook.counts == [1, 1] and "experts_onto.planned" in text(graph)
    assert torch.equal(got, call(*given))


def test_experts_of_codes_stay() -> None:
    """`experts_onto` takes tokens that are floats."""
    formats = {"w_format": "int8:row", "x_format": "int8:row", "out_dtype": "bfloat16"}
    s, x, w, ids, *weights = tensors(3)
    made = [packing.quantize(t, Format.of("int8:row")) for t in weights[:2]]
    q, scale = quantize(x.view(-1, D), "int8:row")

    def call(s: Tensor, q: Tensor, scale: Tensor, w: Tensor, ids: Tensor, *held: Tensor) -> Tensor:
        scales = {"w13_scale_EFG": held[2], "w2_scale_EDG": held[3], "x_scale_TG": scale}
        return s + experts(q, w, ids, *held[:2], **scales, **formats)

    held = [getattr(m, part) for part in ("values", "scale") for m in made]
    given = (s.view(-1, D), q, scale, w, ids, *held)
    hook, got, _ = fused(call, *given)
    assert hook.counts == [1, 0]
    assert "its tokens are codes" in hook.context.refusals[0].text
    assert torch.equal(got, call(*given))


NEAR_MISSES = {
    "read twice": None,
    "followed": None,
    "product": None,
    "scaled": "they are added to themselves, or scaled",
    "itself": "they are added to themselves, or scaled",
    "wide": "torch.float32 [1, 1, 16] is added to torch.bfloat16 [1, 1, 16]",
    "one column": "torch.bfloat16 [1, 1, 1] is added to torch.bfloat16 [1, 1, 16]",
    "number": "1.0 is no tensor",
}


@pytest.mark.parametrize(("change", "reason"), NEAR_MISSES.items(), ids=NEAR_MISSES)
def test_near_misses(change: str, reason: str | None) -> None:
    hook, _, _ = fused(layer(change), *tensors())
    assert hook.counts == [1, 0]
    said = {note.text for note in hook.context.refusals}
    assert said == (set() if reason is None else {reason})


def test_other_plans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hook, _, _ = fused(layer(), *tensors())
    assert hook.counts == [1, 0] and not hook.context.refusals


def test_compiled_code_has_no_launch_behind_it() -> None:
    given = tensors()
    hook = Hook(pick_backend, fuse_residual)
    options = {"fx_graph_cache": False, "post_grad_custom_post_pass": hook}
    with torch.no_grad(), config.patch(options):
        torch._dynamo.reset()
        got, (code,) = run_and_get_code(torch.compile(layer(), fullgraph=True), *given)
    assert code.count("moe_ops.experts_onto.planned(") == 1 and "cpp_fused" not in code
    assert torch.equal(got, layer()(*given))


def test_a_residual_that_is_a_sum_is_written_where_it_is_normed() -> None:
    """Of several rows the sum before a norm is Inductor's: one launch computes both."""

    def call(square: Tensor, x: Tensor, o: Tensor, *rest: Tensor) -> Tensor:
        s = x + (o.view(-1, D) @ square).view(x.shape)
        wide = s.float()
        n = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(s.dtype)
        weights, ids = route(n.view(-1, D) @ square[:, :E], 2)
        return layer()(s, n, weights, ids, *rest)

    s, x, _, _, *weights = tensors(3)
    given = [torch.randn(D, D).to(BF16), s, x, *weights]
    hook = Hook(pick_backend, fuse_residual)
    options = {"fx_graph_cache": False, "post_grad_custom_post_pass": hook}
    with torch.no_grad(), config.patch(options):
        torch._dynamo.reset()
        got, (code,) = run_and_get_code(torch.compile(call, fullgraph=True), *given)
    code = code[code.index("def call") :]
    assert code.count("moe_ops.experts_onto.planned(") == 1
    assert sum("cpp_fused" in line and "(" in line for line in code.splitlines()) == 1
    assert_close(got.float(), call(*given).float(), Tol(2e-2, "roundings to 8 bits of mantissa"))
