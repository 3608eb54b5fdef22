"""Graphs whose calls have to be batch invariant: products with parameters, and plans of ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import moe_ops
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.invariant_linears import RULE, invariant_linears
from moe_ops.passes.rewriting.context import Context, Options
from moe_ops.registry.invariance import PLANNED
from moe_ops.testing import BF16, F16, F32
from tests.passes.post_grad import Compiled

INVARIANT = Options(batch_invariant=True)
DTYPES = {F32: "cpu", BF16: "cpu", F16: "by_row"}  # and which backend multiplies them


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
    one = ["full", "unsqueeze", "unsqueeze", "expert_gemm"]  # its end, its weight, its bias
    assert [n.target._schema.name.partition("::")[2] for n in nodes] == [
        *one, "relu", "full", "unsqueeze", "expert_gemm",
    ]  # fmt: skip
    assert [n.kwargs["plan"] for n in nodes if "plan" in n.kwargs] == [PLANNED] * 2


def test_other_products_stay() -> None:
    """Without the option, of what is no parameter, and where no backend sums rows alone."""
    plain = Lift(Options())
    Compiled(Two(), plain)(torch.randn(3, 91))
    of_inputs, double = Lift(), Lift()
    Compiled(lambda x, y: x @ y.t(), of_inputs)(torch.randn(3, 91), torch.randn(5, 91))
    Compiled(Two(torch.float64), double)(torch.randn(3, 91).double())
    assert plain.count == of_inputs.count == double.count == 0
    assert {n.rule for n in of_inputs.context.refusals} == {RULE}
    reasons = [n.text for n in double.context.refusals]
    assert reasons and "by_row: takes no float64" in reasons[0]


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
