"""Choices that no pass took: of a number of tokens, too, that a graph is compiled for any of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_ops.passes.report.sightings import Sighting, sightings
from tests.passes.post_grad import Compiled

pytestmark = pytest.mark.slow  # compiles a graph, without code generation


def of_tokens(scores: Tensor) -> Tensor:
    """As an indexer chooses, which takes all of a short text."""
    return scores.topk(min(1000, scores.shape[-1]), -1).indices.to(torch.int32)


def of_eight(scores: Tensor) -> Tensor:
    return scores[..., :8].topk(2, -1).indices.to(torch.int32)


@pytest.mark.parametrize("choice, of", [(of_tokens, None), (of_eight, 8)])
def test_what_is_chosen_from(choice: Callable[[Tensor], Tensor], of: int | None) -> None:
    seen: list[Sighting] = []
    compiled = Compiled(choice, lambda graph: seen.extend(sightings(graph)), dynamic=True)
    scores = torch.randn(3, 40)
    assert torch.equal(compiled(scores), choice(scores))
    assert [(one.of, one.is_sure) for one in seen] == [(of, False)]
