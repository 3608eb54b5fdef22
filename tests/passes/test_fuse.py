"""Fusing and hoisting: what becomes one op, what stays, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import moe_ops
from moe_ops.ops.experts import OF_CODES
from moe_ops.passes.drop_duplicate_quantize import drop_duplicate_quantize
from moe_ops.passes.fuse_experts import fuse_experts
from moe_ops.passes.fuse_moe import fuse_moe
from moe_ops.passes.hoist_quantize import hoist_quantize
from moe_ops.passes.rewriting.context import Context
from moe_ops.passes.rewriting.graph import arg
from moe_ops.quant import packing
from moe_ops.quant.formats import Format
from moe_ops.testing import Case, Tol, assert_close, make_layer
from tests.chosen import in_turn
from tests.passes.post_grad import Compiled

pytestmark = pytest.mark.slow  # compiles many graphs

ops = torch.ops.moe_ops
CASE = Case(name="small", T=6, E=4, K=2, D=32, I=32)
ONE_ROUNDING = Tol(8e-3, "one rounding to 8 bits of mantissa, either way at a tie")


class Hook:
    """Passes, and what they said."""

    def __init__(self, *passes: Callable[[fx.Graph, Context], int]) -> None:
        self.passes, self.context, self.counts = passes, Context(), []

    def __call__(self, graph: fx.Graph) -> None:
        for run in self.passes:
            self.counts.append(run(graph, self.context))
            graph.eliminate_dead_code()
        assert [run(graph, Context()) for run in self.passes] == [0] * len(self.passes)


def calls(compiled: Compiled) -> list[str]:
    """The names of our ops in a compiled graph."""
    (graph,) = compiled.graphs
    return [n.target._opname for n in graph.nodes
            if getattr(n.target, "namespace", "") == "moe_ops"]  # fmt: skip


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    layer = make_layer(CASE, dtype)
    return (layer.x_TD, layer.logits_TE, layer.w13_EFD, layer.w2_EDI, layer.b13_EF, layer.b2_ED)


def stages(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, b13: Any = None,
    b2: Any = None, *, kind: str = "silu", **second: Any,
) -> Tensor:  # fmt: skip
    rows, places, ends = ops.dispatch(x, ids, CASE.E)
    h = ops.activate(ops.expert_gemm(rows, w13, ends, b13), kind)
    return ops.combine(ops.expert_gemm(h, w2, ends, b2, **second), weights, places)


def layer(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Tensor:
    weights, ids = ops.route(logits, 2, renormalize=True, scale=1.5, out_dtype="bfloat16")
    return stages(x, weights, ids, w13, w2, b13, b2, kind="gelu")


def test_stages_become_experts_and_with_their_routing_moe() -> None:
    given, hook = tensors(), Hook(fuse_experts, fuse_moe)
    compiled = Compiled(layer, hook)
    got = compiled(*given)
    assert hook.counts == [1, 1]
    assert calls(compiled) == ["moe"]
    (node,) = [n for n in compiled.graphs[0].nodes if n.target is ops.moe.default]
    named = dict(zip((a.name for a in ops.moe.default._schema.arguments), node.args, strict=False))
    chosen = {k: v for k, v in named.items() if not isinstance(v, fx.Node)}
    assert chosen["top_k"] == 2
    assert (chosen["renormalize"], chosen["scale"]) == (True, 1.5)
    assert (chosen["weights_dtype"], chosen["kind"]) == ("bfloat16", "gelu")
    assert_close(got, layer(*given), ONE_ROUNDING)


def test_weights_may_be_quantized() -> None:
    format = Format.of("uint4:1x16")
    x, logits, *weights, _, _ = tensors()
    w13, w2 = (packing.quantize(w, format) for w in weights)

    def model(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = ops.route(logits, 2)
        rows, places, ends = ops.dispatch(x, ids, CASE.E)
        y = ops.expert_gemm(
            rows, w13.values, ends, w_scale_EFG=w13.scale, w_zero_EFG=w13.zero,
            w_format=format.name,
        )  # fmt: skip
        h = ops.activate(y)
        y = ops.expert_gemm(
            h, w2.values, ends, w_scale_EFG=w2.scale, w_zero_EFG=w2.zero, w_format=format.name
        )
        return ops.combine(y, weights, places)

    hook = Hook(fuse_experts, fuse_moe)
    compiled = Compiled(model, hook)
    assert_close(compiled(x, logits), model(x, logits), ONE_ROUNDING)
    assert calls(compiled) == ["moe"]


def test_every_argument_of_the_stages_is_kept() -> None:
    format, E = Format.of("uint4:1x16"), CASE.E
    x, logits, *weights, b13, b2 = tensors()
    w13, w2 = (packing.quantize(w, format) for w in weights)
    ids = torch.randint(0, E + 2, (CASE.T, CASE.K))
    expert_map = torch.tensor([2, -1, 0, 3, 1, -1])
    scale13, scale2 = torch.rand(E), torch.rand(E) + 1
    activation = {
        "kind": "silu", "gated": True, "interleaved": True, "alpha": 1.5, "limit": 0.75,
        "up_shift": 0.5,
    }  # fmt: skip

    def model(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        rows, places, ends = ops.dispatch(x, ids, E, expert_map)
        y = ops.expert_gemm(
            rows, w13.values, ends, b13, w_scale_EFG=w13.scale, w_zero_EFG=w13.zero,
            global_scale_E=scale13, w_format=format.name,
        )  # fmt: skip
        y = ops.expert_gemm(
            ops.activate(y, **activation), w2.values, ends, b2, w_scale_EFG=w2.scale,
            w_zero_EFG=w2.zero, global_scale_E=scale2, w_format=format.name,
        )  # fmt: skip
        return ops.combine(y, weights, places)

    hook = Hook(fuse_experts)
    compiled, given = Compiled(model, hook), (x, logits[:, : CASE.K].softmax(-1), ids)
    assert_close(compiled(*given), model(*given), ONE_ROUNDING)
    assert calls(compiled) == ["experts"]
    (node,) = [n for n in compiled.graphs[0].nodes if n.target is ops.experts.default]
    schema = ops.experts.default._schema.arguments
    default = {a.name for a in schema if arg(node, a.name) == a.default_value}
    # One that is added to `experts` has to come from a stage, or to be no concern of theirs.
    assert default == {
        "transposed", "kind", "gated", "x_scale", "h_scale", "x_format", "layout", "expert_offset",
        *OF_CODES,
    }  # fmt: skip


def unfused(change: str) -> Callable[..., Any]:
    """A layer whose stages are not those of one `experts`, or are needed elsewhere too."""

    def model(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Any:
        weights, ids = ops.route(logits, 2, out_dtype="bfloat16")
        rows, places, ends = ops.dispatch(x, ids, CASE.E)
        others = ops.dispatch(x * 2, ids.flip(0), CASE.E)
        y = ops.expert_gemm(rows, w13, others[2] if change == "first_ends" else ends)
        h = ops.activate(y)
        if change == "inserted":
            h = h * 2
        y2 = ops.expert_gemm(
            h, w2, others[2] if change == "ends" else ends,
            out_dtype="bfloat16" if change == "dtype" else "",
        )  # fmt: skip
        out = ops.combine(y2, weights, others[1] if change == "places" else places)
        inner = {"rows": rows, "h": h, "y": y, "y2": y2, "used_ends": ends, "used_places": places}
        return (out, inner[change]) if change in inner else out

    return model


UNFUSED = {
    "first_ends": "the first product has the ends of another dispatch",
    "ends": "the two products have different ends",
    "places": "it combines the rows of another dispatch",
    "inserted": "the second product's input is",
    "dtype": "a product gives another dtype",
    "rows": "the dispatched rows are also used elsewhere",
    "h": "is also used elsewhere",
    "y": "is also used elsewhere",
    "y2": "is also used elsewhere",
    "used_ends": "the ends are also used elsewhere",
    "used_places": "the rows' places are also used elsewhere",
}


@pytest.mark.parametrize(("change", "reason"), UNFUSED.items(), ids=UNFUSED)
def test_other_stages_stay(change: str, reason: str) -> None:
    hook = Hook(fuse_experts)
    Compiled(unfused(change), hook)(*tensors())
    assert hook.counts == [0]
    assert reason in hook.context.refusals[0].text


def unrouted(change: str) -> Callable[..., Any]:
    def model(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Any:
        weights, ids = ops.route(logits, 2)
        other = ops.route(logits * 2, 2)
        if change == "scaled":
            weights = weights * 2
        if change == "other_ids":
            ids = other[1]
        out = ops.experts(x, weights, ids, w13, w2)
        inner = {"weights": weights, "ids": ids}
        return (out, inner[change]) if change in inner else out

    return model


UNROUTED = {
    "scaled": "the weights is",
    "other_ids": "weights and ids come from two routings",
    "weights": "the weights are also used elsewhere",
    "ids": "the ids are also used elsewhere",
}


@pytest.mark.parametrize(("change", "reason"), UNROUTED.items(), ids=UNROUTED)
def test_other_routings_stay(change: str, reason: str) -> None:
    hook = Hook(fuse_moe)
    Compiled(unrouted(change), hook)(*tensors())
    assert hook.counts == [0]
    assert reason in hook.context.refusals[0].text


def test_experts_of_codes_stay() -> None:
    """`moe` takes tokens that are floats."""
    made = [packing.quantize(w, Format.of("int8:row")) for w in tensors()[2:4]]
    (w13, scale13), (w2, scale2) = ((m.values, m.scale) for m in made)

    def model(x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = ops.route(logits, 2)
        q, scale = ops.quantize(x, "int8:row")
        return ops.experts(
            q, weights, ids, w13, w2, w13_scale_EFG=scale13, w2_scale_EDG=scale2,
            w_format="int8:row", x_format="int8:row", x_scale_TG=scale, out_dtype="bfloat16",
        )  # fmt: skip

    given, hook = tensors()[:2], Hook(fuse_moe)
    got = Compiled(model, hook)(*given)
    assert hook.counts == [0]
    assert "its tokens are codes" in hook.context.refusals[0].text
    assert torch.equal(got, model(*given))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
def test_ids_of_another_width(dtype: torch.dtype) -> None:
    """Of 64 bits, as transformers' routers return them, they are the same; of 16 perhaps not."""

    def model(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, b13: Tensor, b2: Tensor) -> Any:
        weights, ids = ops.route(logits, 2)
        return ops.experts(x, weights, ids.to(dtype).long(), w13, w2)

    given, hook = tensors(), Hook(fuse_moe)
    got = Compiled(model, hook)(*given)
    assert hook.counts == [int(dtype is torch.int64)]
    assert torch.equal(got, model(*given))


FORMATS = {
    "rows": ("float8_e4m3fn:row", False),
    "groups": ("mxfp8", False),
    "packed": ("mxfp4", False),
    "static": ("int8:tensor", True),
    "nvfp4": ("nvfp4", True),
}


def quantized(format: str, scale: Tensor | None, *, hole: bool) -> Callable[..., Tensor]:
    w_format = "int8:row" if format.startswith(("int8", "float8")) else "mxfp4"
    if format == "nvfp4":
        w_format = "nvfp4"

    def model(x: Tensor, logits: Tensor, w13: Tensor, *rest: Tensor) -> Tensor:
        weights, ids = ops.route(logits, 2)
        if hole:
            ids = torch.where(ids == 1, -1, ids)
        rows, places, ends = ops.dispatch(x, ids, CASE.E)
        values, scales = ops.quantize(rows, format, scale)
        w = packing.quantize(w13, Format.of(w_format))
        y = ops.expert_gemm(
            values, w.values, ends, x_scale_RG=scales, w_scale_EFG=w.scale,
            x_format=format, w_format=w_format, out_dtype="float32",
        )  # fmt: skip
        return ops.combine(y, weights, places)

    return model


@in_turn(
    pytest.mark.parametrize("hole", [False, True], ids=["all_here", "holes"]),
    pytest.mark.parametrize(("format", "static"), FORMATS.values(), ids=FORMATS),
)
def test_quantize_before_dispatch(format: str, static: bool, hole: bool) -> None:
    scale = torch.tensor([0.02]) if static else None
    model, hook = quantized(format, scale, hole=hole), Hook(hoist_quantize)
    given = tensors(torch.float32)
    compiled = Compiled(model, hook)
    assert torch.equal(compiled(*given), model(*given))
    assert hook.counts == [1]
    assert calls(compiled)[1:3] == ["quantize", "dispatch"]
    (node,) = [n for n in compiled.graphs[0].nodes if n.target is ops.quantize.default]
    assert node.args[0].meta["val"].shape == (CASE.T, CASE.D)


def test_one_scale_of_all_rows_stays_behind_dispatch() -> None:
    hook = Hook(hoist_quantize)
    Compiled(quantized("int8:tensor", None, hole=True), hook)(*tensors(torch.float32))
    assert hook.counts == [0]
    assert hook.context.refusals[0].text == "one scale is taken from all rows"


def test_global_scales_of_rows_stay_with_their_rows() -> None:
    hook, scale_R = Hook(hoist_quantize), torch.full((CASE.T * 2,), 0.02)
    Compiled(quantized("nvfp4", scale_R, hole=False), hook)(*tensors(torch.float32))
    assert hook.counts == [0]
    assert hook.context.refusals[0].text == "each row has a global scale of its own"


def test_equal_quantizations_happen_once() -> None:
    def model(x: Tensor, logits: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        same = [ops.quantize(x, "mxfp8") for _ in range(3)]
        other = [ops.quantize(x, "mxfp4"), ops.quantize(logits, "int8:row")]
        return tuple(scale for _, scale in [*same, *other])

    hook = Hook(drop_duplicate_quantize)
    compiled = Compiled(model, hook)
    given = tensors(torch.float32)
    for got, want in zip(compiled(*given), model(*given), strict=True):
        assert torch.equal(got, want)
    assert len(calls(compiled)) == 3


def test_fused_ops_run_as_the_stages_do() -> None:
    x, logits, w13, w2, b13, b2 = tensors(torch.float32)
    weights, ids = moe_ops.route(logits, 2)
    want = stages(x, weights, ids, w13, w2, b13, b2)
    assert_close(moe_ops.experts(x, weights, ids, w13, w2, b13, b2), want, Tol(1e-6, "other order"))
