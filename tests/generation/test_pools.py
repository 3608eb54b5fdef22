"""Indexers of pools run as one graph, whatever a mask says, and choose what transformers' do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops.generation import pools
from moe_ops.generation.linear_layers import WithAllPools
from tests.generation.indexers import hold_left, hold_uncompiled, indexers_of

NAME = "Glm5NextForConditionalGeneration"


def indexers() -> tuple[nn.Module, nn.Module]:
    return indexers_of(NAME, WithAllPools)


def call_of(indexer: Any, tokens: int, pads: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(pads)
    x, q = (
        torch.randn(rows, tokens, indexer.hidden_size),
        torch.randn(rows, tokens, indexer.q_lora_rank),
    )
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    for row, pad in enumerate(pads):
        mask[row, :pad] = False
    return x, q, mask


@torch.no_grad()
def test_one_graph_chooses_what_transformers_do_for_all_lengths() -> None:
    stock, ours = indexers()
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def chosen(tokens_BSK: Tensor) -> Tensor:
        return tokens_BSK.sort(-1).values

    compiled = torch.compile(lambda *args: ours(*args, None), backend=backend, fullgraph=True)
    for tokens, pads in ((70, (0, 0)), (33, (5, 0)), (9, (3, 2)), (130, (0, 90))):
        call = call_of(stock, tokens, pads)
        for x in call:
            torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(*call), stock(*call, None)), tokens
    # As many tokens as a pool has. Beside it another is kept, whose place holds no token.
    call = call_of(stock, stock.index_kpool, (0, 1))
    assert torch.equal(chosen(compiled(*call)), chosen(stock(*call, None)))
    assert len(graphs) == 1


@torch.no_grad()
def test_all_pools_are_those_of_transformers_and_others_that_are_not_whole() -> None:
    stock, _ = indexers()
    packed = torch.randn(2, 22, 2 * stock.head_dim + 1)
    packed[..., -1] = 1
    packed[0, :7, -1] = packed[1, 13:, -1] = 0
    want, got = stock.get_pooled_states(packed), pools.all_pools(stock, packed)
    kept = got[2].any(0)
    assert 0 < int(kept.sum()) < len(kept)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a[:, kept], b)
    assert not got[2][:, ~kept].any() and not got[0].isnan().any()


@torch.no_grad()
def test_uncompiled_and_copied_they_are_transformers_own() -> None:
    stock, ours = indexers()
    hold_uncompiled(stock, ours, *call_of(stock, 30, (4, 0)), None)


class Others(nn.Module):
    """Pools that are sums."""

    def get_pooled_states(self, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, tokens, whole = pools.all_pools(self, packed_states)
        kept = whole.any(0)
        return 2 * keys[:, kept], tokens[:, kept], whole[:, kept]


class Failing(nn.Module):
    def get_pooled_states(self, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise AttributeError("something else")


@pytest.mark.parametrize("kind", [Others, Failing])
def test_others_stay_with_a_reason(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    hold_left(kind, "get_pooled_states", caplog)
