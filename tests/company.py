"""Rows of a call of `experts` in company: the property that their bits are those that they have
alone, whatever stands beside them, and at whatever place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice

import torch
from torch import Tensor

from moe_ops.ops.experts import ExpertsCall
from tests.independent_rows import rows_of

MOST = 70  # rows beside those that are looked at
NEIGHBOURS = ("none", "copies", "nan", "huge", "padding", "others", "inf", "zeros")
ALL = slice(None)


def alone(call: ExpertsCall, run: Callable[[ExpertsCall], Tensor]) -> Tensor:
    """The results of each row in a call of its own."""
    return torch.cat([run(with_rows(call, *rows)) for rows in each_row(call)])


def each_row(call: ExpertsCall) -> Iterator[list[Tensor]]:
    for t in range(len(call.x_TD)):
        yield [rows[t : t + 1] for rows in (call.x_TD, call.ids_TK, call.weights_TK)]


def with_rows(call: ExpertsCall, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> ExpertsCall:
    return replace(call, x_TD=x_TD, ids_TK=ids_TK, weights_TK=weights_TK)


def batches(
    call: ExpertsCall, number: int, seed: int = 0
) -> Iterator[tuple[str, Tensor, Tensor, ExpertsCall]]:
    """Random batches: what stands beside, which rows of the call are among them, where, the call.

    Each kind of neighbours comes as often, from none to MOST of them."""
    made = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (1,), generator=made))

    rows = (call.x_TD, call.ids_TK, call.weights_TK)
    T, E, device = len(call.x_TD), call.w13_EFD.shape[0], call.x_TD.device
    for kind in islice(cycle(NEIGHBOURS), number):
        which = torch.randperm(T, generator=made)[: 1 + below(T)].to(device)
        n = len(which) + (0 if kind == "none" else 1 + below(MOST))
        copied = torch.randint(T, (n,), generator=made).to(device)
        x_TD, ids_TK, weights_TK = (t[copied].clone() for t in rows)
        if kind != "copies":
            chosen = [torch.randperm(E, generator=made)[: ids_TK.shape[1]] for _ in range(n)]
            ids_TK = torch.stack(chosen).to(ids_TK)
            x_TD = torch.randn(x_TD.shape, generator=made).to(x_TD)
        if kind in ("nan", "inf"):
            x_TD[:, ::3] = float(kind)
        elif kind == "huge":
            x_TD *= torch.finfo(x_TD.dtype).max / 8
        elif kind == "padding":
            x_TD[:], ids_TK[:], weights_TK[:] = 0, -1, 0
        elif kind == "zeros":
            x_TD[:], weights_TK[:] = 0, 0
        at = torch.randperm(n, generator=made)[: len(which)].to(device)
        for of_batch, own in zip((x_TD, ids_TK, weights_TK), rows, strict=True):
            of_batch[at] = own[which]
        yield kind, which, at, with_rows(call, x_TD, ids_TK, weights_TK)


def assert_invariant(
    run: Callable[[ExpertsCall], Tensor], call: ExpertsCall, number: int, seed: int = 0
) -> None:
    """Raise unless rows of a call have the same bits in so many batches as alone."""
    want = alone(call, run)
    assert bool(want.isfinite().all())
    for i, (kind, which, at, batch) in enumerate(batches(call, number, seed)):
        got = run(batch)[at]
        assert torch.equal(rows_of(got, ALL), rows_of(want[which], ALL)), f"batch {i}: {kind}"
