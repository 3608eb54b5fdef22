"""What layers count while they are captured, padded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops import MoELayer, route
from moe_ops.arena import Arena
from moe_ops.graphs.capture import GraphRunner
from moe_ops.graphs.cuda_graph import Captured, CaptureError, restore
from tests.graphs.recorder import Recorder, runner


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


class Sequences(nn.Module):
    """A layer that is given a few tokens for each row of the input."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(1, (4, 16))).flatten(1)


def balanced() -> MoELayer:
    return MoELayer(6, 2, 16, 8, balanced=True, redundant_experts=1, internal_gate=True)


def pairs_of(layer: MoELayer, x: Tensor) -> Tensor:
    """How often the tokens choose each expert."""
    return torch.bincount(route(layer.gate(x.reshape(-1, 16)), 2)[1].flatten(), minlength=6)


@pytest.mark.parametrize(
    "way",
    [
        lambda layer: (layer, 16, ()),
        lambda layer: (layer.forward, 16, ()),
        lambda layer: (torch.compile(layer, backend="aot_eager"), 16, ()),
        lambda layer: (lambda x, given: given(x), 16, (layer,)),
        lambda layer: (Sequences(layer), 64, ()),
    ],
    ids=["layer", "method", "compiled", "argument", "sequences"],
)
def test_a_captured_layer_counts_the_tokens_of_its_calls(way: Callable[..., Any]) -> None:
    layer, recorder = balanced(), Recorder()
    function, width, rest = way(layer)
    run, want = runner(function, recorder, buckets=(4, 16)), torch.zeros(6, dtype=torch.int64)
    run.warmup(torch.rand(2, width), *rest)
    assert recorder.captures == 2
    assert not layer.loads.any()
    for T in (3, 4, 1, 9, 17, 0, 3):  # 17 and none are too many and too few for a graph
        x = torch.randn(T, width)
        expected = function(x, *rest)
        layer.loads.zero_()
        torch.testing.assert_close(run(x, *rest), expected)
        want = pairs_of(layer, x)
        assert torch.equal(layer.loads, want), T
        assert want.sum() == T * width // 16 * 2
        function(x, *rest)  # all its tokens again, without a graph
        assert torch.equal(layer.loads, 2 * want), T
    assert recorder.captures == 2


def test_a_capture_that_fails_counts_its_call_once() -> None:
    layer, x = balanced(), torch.randn(3, 16)

    def late(function: Callable[[], Any], state: Sequence[Tensor] = (), **kw: Any) -> Captured:
        saved = [(t, t.clone()) for t in state]
        function()
        restore(saved)
        raise CaptureError("capture failed: a sync")

    run = GraphRunner(layer, capture=late, arena=Arena(), buckets=(8,))
    for calls in (1, 2):
        run(x)
        assert torch.equal(layer.loads, calls * pairs_of(layer, x))


def test_layers_that_count_nothing_have_no_state() -> None:
    states = []

    def capture(function: Callable[[], Any], state: Sequence[Tensor] = (), **kw: Any) -> Captured:
        states.append(list(state))
        return Recorder()(function, state, **kw)

    layer = MoELayer(6, 2, 16, 8, redundant_experts=1, internal_gate=True)
    GraphRunner(layer, capture=capture, arena=Arena(), buckets=(8,))(torch.randn(3, 16))
    assert states == [[]]
