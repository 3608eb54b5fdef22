"""Which experts a call keeps, and whether a router can choose among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from moe_ops.checks.options import check_ints
from moe_ops.checks.signature import did_you_mean
from moe_ops.ops.route import beyond_groups

MOST_LISTED = 3
Keep = Mapping[str, Iterable[int]] | Iterable[int]


def kept_of(
    keep: Keep, layers: Mapping[str, int], blocks: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """The ids that each layer keeps, ascending; only of the layers that `keep` names, if it does.

    layers: the number of experts by the name of a layer. blocks: layers by the name of the block
    that holds one, which may stand for it. Raises TypeError or ValueError, naming `keep`.
    """
    if not isinstance(keep, Mapping):
        return {name: _ids("keep", keep, name, E) for name, E in layers.items()}
    given: dict[str, Any] = {}
    for key, ids in keep.items():
        name = blocks.get(key, key)
        if name not in layers:
            few = ", ".join([*layers][:MOST_LISTED]) + ", ..." * (len(layers) > MOST_LISTED)
            hint = did_you_mean(str(key), [*layers, *blocks])
            raise ValueError(
                f"keep names {key!r}, which is no layer of experts; there are {few}{hint}"
            )
        if name in given:
            raise ValueError(f"keep names {name} twice, once by its block; name it once")
        given[name] = ids
    if not given:
        raise ValueError(
            "keep is empty; give the ids of experts by names of layers, or those of all layers"
        )
    return {name: _ids(f"keep[{name!r}]", ids, name, layers[name]) for name, ids in given.items()}


def _ids(argument: str, given: Any, layer: str, num_experts: int) -> tuple[int, ...]:
    ids = check_ints(argument, given.tolist() if isinstance(given, Tensor) else given, least=0)
    if max(ids) >= num_experts:
        raise ValueError(
            f"{argument} has the expert {max(ids)}, but {layer} has {num_experts}: give ids from 0 "
            f"to {num_experts - 1}"
        )
    twice = next((e for e, n in Counter(ids).items() if n > 1), None)
    if twice is not None:
        raise ValueError(f"{argument} has the expert {twice} twice; give each once")
    return tuple(sorted(ids))


def least_of_group(group_reduce: str) -> int:
    """How many experts of a group its value is made of, given how `route` makes it."""
    return 2 if group_reduce == "top2sum" else 1


def routing_refusal(
    kept: tuple[int, ...],
    num_experts: int,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    least: int = 1,
) -> str | None:
    """Why a router cannot choose among these experts as it would with logits of -inf for the
    others, or None. least: how many experts of a group its value is made of."""
    if len(kept) < top_k:
        return f"keeps {len(kept)} experts, and a token has top_k={top_k}; keep at least as many"
    if n_group == 1:
        return None
    size = num_experts // n_group
    each = Counter(e // size for e in kept)
    counts = [each[g] for g in range(n_group)]
    if len(set(counts)) > 1:
        return (
            f"keeps {', '.join(map(str, counts))} experts of its {n_group} groups of {size}, which "
            "are of one size in a router; keep as many of each group"
        )
    if counts[0] < least:
        return (
            f"keeps {counts[0]} of the {size} experts of a group, whose value is that of its best "
            f"{least}; keep at least {least} of each"
        )
    beyond = beyond_groups(len(kept), top_k, n_group, topk_group)
    return beyond and f"keeps {counts[0]} experts of each group, and {beyond}; keep more"
