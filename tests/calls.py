"""One call of every op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from moe_ops.testing import CASES, make_layer

EXPERTS = CASES[0].E


def calls(T: int) -> dict[str, tuple[Any, ...]]:
    """One call of every op, with T tokens."""
    found = calls_without_adapters(T)
    return {**found, **with_adapters(found)}


def calls_without_adapters(T: int) -> dict[str, tuple[Any, ...]]:
    layer = make_layer(replace(CASES[0], T=T))
    x, ids, weights = layer.x_TD, layer.ids_TK, layer.weights_TK
    chosen = ids[:, :2].to(torch.int16).contiguous()
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (T // EXPERTS)
    slots = torch.arange(EXPERTS, dtype=torch.int32)
    handle = (torch.empty(0, dtype=torch.int32), torch.empty(2, 0, dtype=torch.int64))
    return {
        "route": (layer.logits_TE, 2),
        "route_recording": (layer.logits_TE, 2, chosen, torch.zeros(1, dtype=torch.int64)),
        "route_replaying": (layer.logits_TE, 2, chosen),
        "quantize": (x,),
        "dispatch": (x, ids, EXPERTS),
        "expert_gemm": (x, layer.w13_EFD, ends),
        "expert_loads": (ids, EXPERTS),
        "activate": (x,),
        "combine": (x, weights[: T // 2], torch.arange(T, dtype=torch.int32)),
        "experts": (x, weights, ids, layer.w13_EFD, layer.w2_EDI),
        "moe": (x, layer.logits_TE, layer.w13_EFD, layer.w2_EDI, 2),
        "expert_wgrad": (x, x, ends),
        "expert_wgrad_onto": (x, x, ends, torch.zeros(EXPERTS, x.shape[1], x.shape[1])),
        "activate_backward": (
            x[:, : x.shape[1] // 2].contiguous(),
            x,
            weights[: T // 2],
            torch.arange(T, dtype=torch.int32),
        ),
        "experts_saving": (x, weights, ids, layer.w13_EFD, layer.w2_EDI),
        "experts_accumulating": (x, weights, ids, layer.w13_EFD, layer.w2_EDI),
        "experts_backward": (
            x,
            torch.zeros(T, layer.w13_EFD.shape[1]),
            torch.arange(T, dtype=torch.int32),
            ends,
            x,
            weights[:, :1].contiguous(),
            ids[:, :1].contiguous(),
            layer.w13_EFD,
            layer.w2_EDI,
        ),
        "dispatch_tokens": (x, weights, ids, slots * 0, slots, T),
        "combine_tokens": (x, ids, slots * 0, slots, *handle, T),
        "experts_over_ranks": (
            x,
            weights,
            ids,
            layer.w13_EFD,
            layer.w2_EDI,
            slots * 0,
            slots,
            T,
        ),
        "sum_ranks": (x,),
        "experts_batched": (
            x.expand(EXPERTS, -1, -1).contiguous(),
            torch.full_like(ends, T),
            layer.w13_EFD,
            layer.w2_EDI,
        ),
    }


def with_adapters(found: dict[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Calls of the ops of layers with adapters, from those of the same layers without."""
    *_, w13_EFD, _ = found["experts"]
    E, F, D = w13_EFD.shape
    adapter = (torch.ones(1), torch.ones(E, 4, D), torch.ones(E, F, 4))
    names = ("experts", "experts_saving", "experts_backward")
    return {f"experts_adapted{n.removeprefix('experts')}": (*found[n], *adapter) for n in names}


CALLS = calls(16)
