"""Which of our ops Inductor's own CUDA graphs hold: none in which the host waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config, cudagraph_utils

import moe_ops
from moe_ops import experts_over_ranks
from moe_ops.passes.inductor.partitions import leave_outside
from moe_ops.testing import BF16
from tests.absent_gpu import absent_gpu
from tests.distributed.ranks import fake_group

RANKS, ROWS = 4, 8
WAITING = "torch.ops.moe_ops.experts_over_ranks.planned_waiting("
PLANNED = "torch.ops.moe_ops.experts_over_ranks.planned("


@pytest.fixture(scope="module")
def group() -> Iterator[str]:
    with fake_group(RANKS) as name:
        yield name


def arguments(device: str) -> tuple[Tensor, ...]:
    """Tokens, weights, ids, two weights of one expert here, and which rank holds which."""

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=BF16)

    ids = torch.randint(RANKS, (ROWS, 2), device=device)
    ranks = torch.arange(RANKS, dtype=torch.int32, device=device)
    weights = torch.rand(ROWS, 2, device=device)
    return floats(ROWS, 64), weights, ids, floats(1, 128, 64), floats(1, 64, 64), ranks, 0 * ranks


def graph_of(args: tuple[Tensor, ...], group: str, plan: str) -> fx.Graph:
    """A graph of one planned call."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(args))]
    for node, value in zip(inputs, args, strict=True):
        node.meta["val"] = value
    given = (*inputs, ROWS, group, "auto")
    graph.output(graph.call_function(experts_over_ranks.planned, given, {"plan": plan}))
    return graph


@pytest.mark.parametrize(
    ("plan", "waits"),
    [("exchange", True), ("gather", False), ("16:gather,:exchange", True), ("push", False)],
)
def test_calls_in_which_the_host_waits_are_left_outside(plan: str, waits: bool, group: str) -> None:
    with absent_gpu():
        graph = graph_of(arguments("cuda"), group, plan)
        assert leave_outside(graph) == waits
        assert leave_outside(graph) == 0
    (node,) = (n for n in graph.nodes if n.op == "call_function")
    assert isinstance(node.target, torch._ops.OpOverload)
    assert (torch.Tag.cudagraph_unsafe in node.target.tags) == waits
    assert node.kwargs == {"plan": plan}
    graph.lint()


def test_on_a_cpu_it_waits_for_nothing(group: str) -> None:
    assert leave_outside(graph_of(arguments("cpu"), group, "exchange")) == 0


@pytest.fixture
def unwrapped() -> Iterator[None]:
    """Graphs are made for Inductor's CUDA graphs, and then not captured, as there is no GPU."""
    if not hasattr(cudagraph_utils, "CUDAGraphPolicy"):
        pytest.skip("this torch asks no policy whether to capture")

    class Never(cudagraph_utils.CUDAGraphPolicy):
        def should_wrap(self, compiled_graph: Any) -> bool:
            return False

    with config.patch(cudagraph_policy=Never()):
        yield


@pytest.mark.parametrize(("collective", "graphs"), [("exchange", 2), ("gather", 1)])
def test_inductor_takes_a_graph_apart_around_them(
    collective: str, graphs: int, group: str, unwrapped: None
) -> None:
    def function(x: Tensor, *rest: Tensor) -> Tensor:
        y = experts_over_ranks((x * 2).relu(), *rest, ROWS, group, collective)
        return (y + 1).sin()

    options = moe_ops.inductor_options(extra={"triton.cudagraphs": True})
    call: Callable[..., Any] = torch.compile(function, options=options)
    with absent_gpu() as codes, torch.no_grad():
        call(*arguments("cuda"))
    (code,) = codes
    inside, _, outside = code.partition("class Runner")
    assert inside.count("def partition_") == graphs
    assert (PLANNED in inside, WAITING in outside) == (graphs == 1, graphs == 2)
    assert WAITING not in inside and PLANNED not in outside
