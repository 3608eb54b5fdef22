"""Calls of the ops that write down routings, and take these again, for every case."""

from __future__ import annotations

from typing import Any

import torch

from moe_ops.testing import Case

Calls = dict[str, dict[str, Any]]


def route_recording(case: Case, routed: Calls) -> Calls:
    """Calls of `route` with rings of more rows, so that they go over the end, and of fewer."""
    found: Calls = {}
    for i, (name, call) in enumerate(routed.items()):
        more = {**call, **_rings(case.T + 3, case.K, at=case.T // 2 + 4)}
        found[name] = more if i % 2 else {**more, "ring_weights_SK": _weights(case.T + 3, case.K)}
    few = {**routed["plain"], **_rings(max(1, case.T // 2), case.K, at=5)}
    return {**found, "few_rows": few, "none_before": {**few, **_rings(case.T + 1, case.K, at=0)}}


def _rings(S: int, K: int, at: int) -> dict[str, Any]:
    ids = torch.full((S, K), -1, dtype=torch.int16)
    return {"ring_ids_SK": ids, "at": torch.tensor([at])}


def _weights(S: int, K: int) -> torch.Tensor:
    return torch.full((S, K), -1.0)


def route_replaying(case: Case, routed: Calls) -> Calls:
    """Calls of `route` with experts that it would not choose, some rows chosen by it, more rows
    than tokens, and a column that comes again."""
    T, E, K = case.T, case.E, case.K
    given = torch.stack([torch.randperm(E)[:K] for _ in range(T + 2)]).to(torch.int16)
    some = given.clone()
    some[::2] = -1
    found = {
        name: {**call, "given_ids_SK": some if i % 2 else given}
        for i, (name, call) in enumerate(routed.items())
    }
    exact = {**routed["plain"], "given_ids_SK": given[:T].contiguous() if T else given}
    same = {**routed["renormalize"], "given_ids_SK": torch.full_like(given, E - 1)}
    return {**found, "as_many_rows": exact, "one_expert": same}
