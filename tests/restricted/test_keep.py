"""Which experts a call keeps, and what it says of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops.restricted.keep import kept_of, routing_refusal

LAYERS = {"a.mlp.experts": 8, "b.mlp.experts": 4}
BLOCKS = {"a.mlp": "a.mlp.experts", "b.mlp": "b.mlp.experts"}

GIVEN: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "all_layers": ([2, 0], {"a.mlp.experts": (0, 2), "b.mlp.experts": (0, 2)}),
    "a_tensor": (torch.tensor([3, 1]), {"a.mlp.experts": (1, 3), "b.mlp.experts": (1, 3)}),
    "one_layer": ({"a.mlp.experts": range(6)}, {"a.mlp.experts": (0, 1, 2, 3, 4, 5)}),
    "by_block": ({"b.mlp": (3,)}, {"b.mlp.experts": (3,)}),
}


@pytest.mark.parametrize(("keep", "want"), GIVEN.values(), ids=GIVEN)
def test_ids_ascend(keep: Any, want: dict[str, tuple[int, ...]]) -> None:
    assert kept_of(keep, LAYERS, BLOCKS) == want


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": ({"c": [0]}, ValueError, r"keep names 'c', which is no layer of experts; there are"),
    "alike": ({"a.mlp.expert": [0]}, ValueError, r"did you mean 'a\.mlp\.experts'"),
    "twice": (
        {"a.mlp": [0], "a.mlp.experts": [1]}, ValueError, r"keep names a\.mlp\.experts twice",
    ),
    "no_layer": ({}, ValueError, r"keep is empty; give the ids of experts by names of layers"),
    "no_id": ([], ValueError, r"keep is empty; give at least one number from 0 on"),
    "beyond": ([7], ValueError, r"has the expert 7, but b\.mlp\.experts has 4: give ids from 0 to"),
    "negative": ([-1], ValueError, r"keep must be numbers from 0 on, got -1"),
    "same_id": ({"a.mlp": [1, 1]}, ValueError, r"keep\['a\.mlp\.experts'\] has the expert 1 twice"),
    "text": ("01", TypeError, r"keep must be several ints"),
    "float": ([0.5], TypeError, r"each of keep must be an int"),
    "number": (3, TypeError, r"keep must be several ints"),
}  # fmt: skip


@pytest.mark.parametrize(("keep", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_what_keep_cannot_be(keep: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        kept_of(keep, LAYERS, BLOCKS)


ROUTERS: dict[str, tuple[tuple[int, ...], dict[str, int], str | None]] = {
    "enough": ((0, 1), {"top_k": 2}, None),
    "too_few": ((0,), {"top_k": 2}, "keeps 1 experts, and a token has top_k=2; keep at least as"),
    "even": ((0, 1, 6, 7), {"top_k": 2, "n_group": 2, "topk_group": 1, "least": 2}, None),
    "uneven": (
        (0, 1, 2, 7), {"top_k": 2, "n_group": 2, "topk_group": 1},
        "keeps 3, 1 experts of its 2 groups of 4, which are of one size in a router; keep as many",
    ),
    "value_of_two": (
        (0, 7), {"top_k": 1, "n_group": 2, "topk_group": 1, "least": 2},
        "keeps 1 of the 4 experts of a group, whose value is that of its best 2; keep at least 2",
    ),
    "few_groups": (
        (0, 1, 4, 5), {"top_k": 3, "n_group": 2, "topk_group": 1},
        "keeps 2 experts of each group, and top_k=3 exceeds the 2 experts of topk_group=1 groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kept", "router", "why"), ROUTERS.values(), ids=ROUTERS)
def test_routers_choose_among_those_kept_or_say_why_not(
    kept: tuple[int, ...], router: dict[str, int], why: str | None
) -> None:
    found = routing_refusal(kept, 8, **router)
    assert (found is None) if why is None else (found or "").startswith(why)
