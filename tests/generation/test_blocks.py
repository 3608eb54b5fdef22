"""Indexers of blocks run as one graph, whether blocks are whole or not, and choose what
transformers' do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.forward.kept import Arriving
from moe_ops.generation.linear_layers import WithWholeBlocks
from moe_ops.passes.inductor.sizes import call_oblivious
from tests.generation.indexers import hold_left, hold_uncompiled, indexers_of

NAME = "MiniMaxM3SparseForConditionalGeneration"


def indexers() -> tuple[nn.Module, nn.Module]:
    return indexers_of(NAME, WithWholeBlocks)


def call_of(indexer: Any, tokens: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    x = torch.randn(2, tokens, indexer.q_proj.in_features)
    angles = torch.randn(2, tokens, indexer.head_dim)
    positions = torch.arange(tokens).expand(2, -1).contiguous()
    for t in (x, angles, positions):
        torch._dynamo.mark_dynamic(t, 1)
    return x, (angles, angles), positions


@torch.no_grad()
@pytest.mark.parametrize("first", [40, 21, 3], ids=["whole", "not_whole", "less_than_one"])
@pytest.mark.parametrize("cached", [False, True], ids=["no_cache", "cache"])
def test_one_graph_chooses_what_transformers_do_for_all_lengths(cached: bool, first: int) -> None:
    stock, ours = indexers()
    assert stock.block_size == 4
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def run(indexer: Any, x: Tensor, angles: Any, positions: Tensor) -> tuple[Tensor, ...]:
        cache = Arriving() if cached else None
        chosen = indexer(x, angles, cache, positions)
        return (chosen,) if cache is None else (chosen, cache.kept["idx_keys"])

    compiled = torch.compile(lambda *args: run(ours, *args), backend=backend, fullgraph=True)
    for tokens in (first, 40, 21, 4, 3, 36, 99):
        call = call_of(stock, tokens)
        torch.testing.assert_close(call_oblivious(compiled, *call), run(stock, *call))
    assert len(graphs) == 1


@torch.no_grad()
def test_uncompiled_and_copied_they_are_transformers_own() -> None:
    stock, ours = indexers()
    x, angles, positions = call_of(stock, 9)
    hold_uncompiled(stock, ours, x, angles, None, positions)


class Counting(nn.Module):
    """Chooses by how many keys there are."""

    def forward(self, x: Tensor, angles: Any, cache: Any, positions: Tensor) -> Tensor:
        keys = x[:, None] if cache is None else cache.layers[0].update_index(x[:, None])
        return torch.tensor(keys.shape[2])

    def build_block_mask(self) -> None:
        raise NotImplementedError


class Failing(Counting):
    def forward(self, x: Tensor, angles: Any, cache: Any, positions: Tensor) -> Tensor:
        raise AttributeError("something else")


@pytest.mark.parametrize("kind", [Counting, Failing])
def test_others_stay_with_a_reason(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    hold_left(kind, "forward", caplog)
