"""Graphs whose calls have to be batch invariant: products with parameters, and plans of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import linear

import moe_ops
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.invariant_linears import invariant_linears
from moe_ops.passes.rewriting.context import Context, Options
from moe_ops.passes.rewriting.products import is_taken_apart
from moe_ops.registry.invariance import PLANNED
from moe_ops.testing import BF16, F16, F32, Tol, assert_close
from tests.chosen import in_turn
from tests.passes.post_grad import Compiled

INVARIANT = Options(batch_invariant=True)
DTYPES = {F32: "cpu", BF16: "cpu", F16: "by_row"}  # and which backend multiplies them
TOL = {
    F32: Tol(2e-6, "sums of 64 products in another order"),
    F16: Tol(2e-3, "the product is rounded ahead of the sum, to 11 bits"),
    BF16: Tol(1.6e-2, "the product is rounded ahead of the sum, to 8 bits"),
}
LEFT = {f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "mv")}
ROWS = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))


class Two(nn.Module):
    """Two linear layers, one with a bias, of widths that fill no register."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(91, 38), nn.Linear(38, 91, bias=False)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Lift:
    """The pass as a hook that keeps what it said."""

    def __init__(self, options: Options = INVARIANT) -> None:
        self.context, self.count = Context(options=options), 0

    def __call__(self, graph: fx.Graph) -> None:
        self.count = invariant_linears(graph, self.context)
        graph.eliminate_dead_code()
        assert invariant_linears(graph, self.context) == 0


def test_products_become_those_of_one_expert() -> None:
    lift = Lift()
    compiled = Compiled(Two(), lift)
    compiled(torch.randn(3, 91))
    assert lift.count == 2
    nodes = [n for n in compiled.graphs[0].nodes if n.op == "call_function"]
    one = ["full", "unsqueeze", "expert_gemm"]  # its end, its weight
    assert [n.target._schema.name.partition("::")[2] for n in nodes] == [
        *one, "add", "relu", *one,
    ]  # fmt: skip
    assert [n.kwargs["plan"] for n in nodes if "plan" in n.kwargs] == [PLANNED] * 2


def test_other_products_stay() -> None:
    """Without the option, of what is no parameter, of parameters alone, and single products."""
    plain = Lift(Options())
    Compiled(Two(), plain)(torch.randn(3, 91))
    two, outer = Lift(), Lift()
    Compiled(lambda x, y: x @ y.t(), two)(torch.randn(3, 91), torch.randn(5, 91))
    Compiled(Multiplied(lambda w, x: torch.outer(x, w[0]), torch.randn(5, 4)), outer)(ROWS[0])
    assert plain.count == two.count == outer.count == 0
    assert not two.context.refusals and not outer.context.refusals


def test_a_product_that_nothing_computes_so_is_no_graph() -> None:
    compiled = Compiled(Two(torch.float64), Lift())
    message = r"no backend gives addmm, a product with a weight in up, the same bits.*no float64"
    with pytest.raises(Exception, match=f"(?s){message}"):
        compiled(torch.randn(3, 91).double())


class Multiplied(nn.Module):
    """A function of a parameter and of rows."""

    def __init__(self, function: Any, weight: Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A way to write a product: what it does to a weight of this shape and to rows of 64."""

    function: Callable[[Tensor, Tensor], Tensor]
    weight: tuple[int, ...] = (24, 64)


SQUARE = (64, 64)
FORMS = {
    "beside a residual": Form(function=lambda w, x: x + linear(x.relu(), w), weight=SQUARE),
    "with a bias": Form(function=lambda w, x: linear(x, w, w[:, 0])),
    "with a bias that is computed": Form(function=lambda w, x: linear(x, w, w[:, 0] * 2)),
    "one output": Form(function=lambda w, x: linear(x, w), weight=(1, 64)),
    "one output with a bias": Form(function=lambda w, x: linear(x, w, w[:, 0]), weight=(1, 64)),
    "a vector": Form(function=lambda w, x: x @ w, weight=(64,)),
    "as small as Inductor takes apart": Form(
        function=lambda w, x: linear(x[..., :16], w, w[:, 0]), weight=(16, 16)
    ),
    "by columns": Form(function=lambda w, x: x @ w, weight=(64, 24)),
    "part of a weight": Form(function=lambda w, x: linear(x, w[4:20])),
    "two weights as one": Form(function=lambda w, x: linear(x, torch.cat([w, w.flip(0)]))),
    "a weight that is computed": Form(function=lambda w, x: linear(x, w * 2)),
    "an einsum": Form(function=lambda w, x: torch.einsum("...k,nk->...n", x, w)),
    "with factors": Form(
        function=lambda w, x: torch.addmm(
            w[:, 0], x.reshape(-1, 64), w.t(), alpha=2, beta=0.5
        ).view(*x.shape[:-1], 24)
    ),
    "the weight first": Form(function=lambda w, x: (w @ x.mT).mT),
    "a weight for each head": Form(
        function=lambda w, x: torch.einsum("...hk,hkn->...hn", x.unflatten(-1, (4, 16)), w),
        weight=(4, 16, 8),
    ),
    "a vector for each head": Form(
        function=lambda w, x: torch.einsum("...hk,hk->...h", x.unflatten(-1, (4, 16)), w),
        weight=(4, 16),
    ),
    "each head for all": Form(
        function=lambda w, x: torch.einsum("...k,hkn->...hn", x, w), weight=(4, 64, 8)
    ),
}  # fmt: skip
LAID_OUT = {
    "rows": lambda x: x,
    "sequences": lambda x: x.view(10, 4, 64),
    "sequences by columns": lambda x: x.view(4, 10, 64).transpose(0, 1),
}


@in_turn(
    pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"]),
    pytest.mark.parametrize("lay_out", LAID_OUT.values(), ids=LAID_OUT),
    pytest.mark.parametrize("form", FORMS.values(), ids=FORMS),
)
def test_however_a_product_is_written(form: Form, lay_out: Any, dtype: torch.dtype) -> None:
    """One graph for any number of rows, and one for one row, in which Inductor takes products
    apart."""
    model = Multiplied(form.function, torch.randn(form.weight).to(dtype) / 8)
    x = lay_out(ROWS.to(dtype))
    want = model(x)
    whole = Compiled(model, in_pipeline(), dynamic=True)
    got = whole(x)
    assert got.dtype is dtype and got.shape == want.shape
    assert_close(got, want, TOL[dtype])
    alone = Compiled(model, in_pipeline())
    for place in (0, 3, len(x) - 1):
        one = x[place : place + 1].clone()
        assert torch.equal(whole(one), got[place : place + 1])
        assert torch.equal(alone(one), got[place : place + 1])
    assert not products(whole.graphs[0]) and not products(alone.graphs[0])


def in_pipeline() -> Any:
    pipeline = Pipeline(INVARIANT)
    return lambda graph: pipeline(graph, True)


def products(graph: fx.Graph) -> list[fx.Node]:
    """What is left to torch."""
    return [
        n for n in graph.nodes
        if str(n.target) in LEFT or (str(n.target) == "aten.sum.dim_IntList" and is_taken_apart(n))
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
def test_rows_of_one_graph_are_as_alone(dtype: torch.dtype) -> None:
    """Of any number of rows, through the whole pipeline."""
    pipeline = Pipeline(INVARIANT)
    compiled = Compiled(Two(dtype), lambda graph: pipeline(graph, True), dynamic=True)
    x = torch.randn(70, 91).to(dtype)
    whole = compiled(x)
    plans = [n.kwargs["plan"] for n in compiled.graphs[0].nodes if "plan" in n.kwargs]
    assert plans == [f"{PLANNED}:{DTYPES[dtype]}"] * 2
    for rows in (slice(0, 3), slice(69, 70), slice(2, 35)):
        assert torch.equal(compiled(x[rows].clone()), whole[rows])


def test_a_layer_says_so_in_its_graph() -> None:
    """A layer that is batch invariant is so in a graph whose options say nothing of it."""
    layer = moe_ops.MoELayer(4, 2, 64, 32, internal_gate=True, batch_invariant=True)
    layer.requires_grad_(False)
    pipeline = Pipeline()
    compiled = Compiled(layer, lambda graph: pipeline(graph, True), dynamic=True)
    x = torch.randn(40, 64)
    with torch.inference_mode():
        assert torch.equal(compiled(x), layer(x))
    plans = [n.kwargs["plan"] for n in compiled.graphs[0].nodes if "plan" in n.kwargs]
    assert plans == [f"{PLANNED}:cpu"] * 3  # the gate, its choice, the experts


def test_what_nothing_computes_so_is_no_graph() -> None:
    quant = moe_ops.QuantConfig(weights="int8:row", inputs="int8:tensor")
    layer = moe_ops.MoELayer(4, 2, 64, 32, quant=quant).requires_grad_(False)
    pipeline = Pipeline(INVARIANT)
    compiled = Compiled(layer, lambda graph: pipeline(graph, True))
    with pytest.raises(Exception, match=r"batch_invariant: no backend gives moe_ops\.experts") as e:
        compiled(torch.randn(3, 64), torch.randn(3, 4))
    assert "by_row: is not batch invariant: one scale for all tokens" in str(e.value)


def test_options_alone_do_not_reach_a_graph_with_gradients() -> None:
    """Autograd takes routers apart before any pass: an error, and no graph that may differ."""
    layer = moe_ops.MoELayer(4, 2, 64, 32, internal_gate=True)
    x = torch.randn(3, 64)
    torch._dynamo.reset()
    compiled = torch.compile(layer, options=moe_ops.inductor_options(batch_invariant=True))
    with pytest.raises(Exception, match=r"is for graphs without gradients.*moe_ops\.compile"):
        compiled(x)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))


def test_a_block_does_not_reach_into_a_graph() -> None:
    x_TD, compiled = (
        torch.randn(4, 64),
        torch.compile(
            moe_ops.MoELayer(4, 2, 64, 32, internal_gate=True), options=moe_ops.inductor_options()
        ),
    )
    reached = pytest.raises(RuntimeError, match="does not reach into compiled code")
    with torch.no_grad(), moe_ops.using(batch_invariant=True), reached:
        compiled(x_TD)
