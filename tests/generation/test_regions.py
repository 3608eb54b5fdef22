"""Code that layers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_ops import compiler
from moe_ops.generation.regions import ByKind


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_layers_of_unlike_parts_have_code_of_their_own() -> None:
    compiled: list[Any] = []

    def compile_region(region: Any) -> Any:
        compiled.append(region)
        return region

    call = ByKind("prompt", compile_region)
    layers = [Layer(nn.Tanh()), Layer(nn.ReLU()), Layer(nn.Tanh()), Layer(nn.ReLU())]
    x = torch.tensor([-1.0, 2.0])
    for layer in layers + layers:
        assert torch.equal(call(layer, x), layer.inner(x))
    names = [region.__code__.co_name for region in compiled]
    assert names == ["prompt_Layer_0", "prompt_Layer_1"]


@pytest.mark.parametrize(("B", "S", "compiles"), [(1, 1, 2), (1, 7, 1), (3, 1, 2), (2, 2, 1)])
def test_one_graph_for_all_prompts_but_those_of_one_token(B: int, S: int, compiles: int) -> None:
    torch._dynamo.reset()
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def scaled(module: Any, x: Any) -> Any:
        """Branches on the number of tokens, as attention functions do."""
        return module(x) * (x.shape[0] if x.shape[1] > 1 else -x.shape[0])

    region = compiler.PromptRegion(torch.compile(scaled, backend=keep))
    layer = Layer(nn.Tanh())
    for shape in ((4, 5, 8), (2, 9, 8), (B, S, 8)):
        x = torch.randn(shape)
        assert torch.equal(region(layer, x), scaled(layer, x))
    assert len(graphs) == compiles
