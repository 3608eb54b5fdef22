"""Arguments of the ops over ranks, for this process alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ops.conformance.tensors import strided, with_holes
from moe_ops.ops.experts_batched import LEFT_OUT
from moe_ops.ops.experts_over_ranks import why_not_apart
from moe_ops.registry.spec import OPS
from moe_ops.testing import Case, make_layer


def tables(num_experts: int) -> dict[str, Tensor]:
    """Experts of this process, of a rank that it is not, of every rank and of the token's own."""
    slots = torch.arange(num_experts, dtype=torch.int32)
    ranks = torch.tensor([0, 1, -1, -2], dtype=torch.int32).repeat(num_experts)[:num_experts]
    return {"rank_of_P": ranks, "slot_of_P": slots}


def dispatch_tokens(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    layer, E = make_layer(case, dtype), case.E
    x, ids = layer.x_TD, layer.ids_TK
    call = {
        "x_TD": x, "weights_TK": layer.weights_TK, "ids_TK": ids, **tables(E), "rows": case.T + 3,
    }  # fmt: skip
    q, scale = OPS["quantize"].reference(x, "float8_e4m3fn:row")
    return {
        "plain": call,
        "full": {**call, "rows": max(1, case.T)},
        "exchange": {**call, "collective": "exchange"},
        "holes": {**call, "ids_TK": with_holes(ids, E).long()},
        "nothing_here": {**call, "ids_TK": torch.full_like(ids, -1), "collective": "exchange"},
        "float8": {**call, "x_TD": q, "scale_TS": scale},
        "float8_exchange": {**call, "x_TD": q, "scale_TS": scale, "collective": "exchange"},
        "strided": {**call, "x_TD": strided(x), "ids_TK": strided(ids)},
    }


def combine_tokens(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    found = {}
    for name, given in dispatch_tokens(case, dtype).items():
        if "scale_TS" in given:
            continue
        *_, ids_GK, token_N, splits_2R = OPS["dispatch_tokens"].reference(**given)
        y = torch.randn(ids_GK.shape[0], case.D).to(dtype)
        y[(ids_GK < 0).all(1)] = float("nan")
        same = ("ids_TK", "rank_of_P", "slot_of_P", "rows", "collective")
        call = {n: given[n] for n in same if n in given}
        found[name] = {**call, "y_GD": y, "token_N": token_N, "splits_2R": splits_2R}
    return {**found, "strided": {**found["plain"], "y_GD": strided(found["plain"]["y_GD"])}}


def sum_ranks(case: Case, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    x = make_layer(case, dtype).x_TD
    return {"plain": {"part_TD": x}, "strided": {"part_TD": strided(x)}}


def experts_batched(calls: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Calls of `experts` that have no map, nor one scale of all tokens, each with all tokens in the
    batch of every expert."""
    found = {}
    for name, given in calls.items():
        format, static = given.get("x_format"), given.get("x_scale") is not None
        if "expert_map" in given or why_not_apart(format or "", static) is not None:
            continue
        x, E, scale = given["x_TD"], given["w13_EFD"].shape[0], given.get("x_scale_TG")
        batches = {
            "x_EMD": x.expand(E, -1, -1).contiguous(),
            "counts_E": torch.full((E,), len(x), dtype=torch.int32),
        }
        if scale is not None:
            batches["x_scale_EMG"] = scale.expand(E, -1, -1).contiguous()
        rest = {n: a for n, a in given.items() if n not in LEFT_OUT}
        found[name] = {**batches, **rest}
    return found
