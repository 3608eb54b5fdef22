"""Batches in which some rows of a call stand beside others, for tests of invariant calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from moe_ops.ops.experts import ExpertsCall

OTHERS = ("random", "copies", "nan", "huge", "padding")
HUGE = 1e4
Batch = tuple[str, ExpertsCall, Tensor]


def batches(call: ExpertsCall, count: int, most: int, seed: int = 0) -> Iterator[Batch]:
    """(a name, the batch, the row of each of the call's rows in it): `count` batches of up to
    `most` rows, of which the call's are some, in any order, beside rows of each kind of OTHERS in
    turn. Those of padding belong to no expert."""
    draw = torch.Generator().manual_seed(seed)
    x_TD, T, E = call.x_TD, call.x_TD.shape[0], call.w2_EDI.shape[0]
    for i in range(count):
        kind = OTHERS[i % len(OTHERS)]
        rows = int(torch.randint(T, most + 1, (), generator=draw))
        at_T = torch.randperm(rows, generator=draw)[:T]
        x_BD = torch.randn(rows, x_TD.shape[1], generator=draw)
        if kind == "copies":
            x_BD = x_TD.float().cpu()[torch.randint(T, (rows,), generator=draw)]
        elif kind == "nan":
            x_BD[:, 3] = float("nan")
        elif kind == "huge":
            x_BD *= HUGE
        given = torch.randint(T, (rows,), generator=draw)
        ids_BK = call.ids_TK.cpu()[given]
        if kind == "random":
            ids_BK = torch.rand(rows, E, generator=draw).argsort(1)[:, : ids_BK.shape[1]]
        elif kind == "padding":
            ids_BK = torch.full_like(ids_BK, -1)
            x_BD.fill_(float("nan"))
        weights_BK = call.weights_TK.cpu()[given]
        batch = [
            t.to(like.device, like.dtype).index_copy(0, at_T.to(like.device), like)
            for t, like in (
                (x_BD, x_TD), (weights_BK, call.weights_TK), (ids_BK, call.ids_TK)
            )
        ]  # fmt: skip
        made = dict(zip(BATCHED, batch, strict=True))
        yield f"{kind} {i}, {rows} rows", replace(call, **made), at_T


BATCHED = ("x_TD", "weights_TK", "ids_TK")


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)
