"""Ranks that differ, and ranks that end: every rank that is left raises an error that says who."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import combine_tokens, dispatch_tokens, experts_over_ranks, sum_ranks
from tests.distributed.ranks import meet, processes, threads

E, D = 4, 8
TABLES = (torch.tensor([0, 0, 1, 1], dtype=torch.int32), torch.tensor([0, 1, 0, 1]).int())


def tokens(T: int, D: int = D, K: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(T, D), torch.ones(T, K), torch.zeros(T, K, dtype=torch.int64)


def weights(I: int = 4) -> tuple[Tensor, Tensor]:  # noqa: E741
    return torch.ones(2, 2 * I, D), torch.ones(2, D, I)


def call(group: str, T: int = 2, rows: int = 4, collective: str = "gather", **sizes: int) -> Any:
    return dispatch_tokens(*tokens(T, **sizes), *TABLES, rows, group, collective=collective)


# What the first rank does, what the other does, and what both say.
Act = Callable[[str], Any]
DIFFER: dict[str, tuple[Act, Act, str]] = {
    "rows": (
        lambda g: call(g, rows=4), lambda g: call(g, rows=8),
        "differ in rows (rank 0: 4, rank 1: 8)",
    ),
    "collective": (
        lambda g: call(g), lambda g: call(g, collective="exchange"),
        "differ in collective (rank 0: 'gather', rank 1: 'exchange')",
    ),
    "width": (lambda g: call(g), lambda g: call(g, D=16), "differ in D (rank 0: 8, rank 1: 16)"),
    "top_k": (lambda g: call(g), lambda g: call(g, K=3), "differ in K (rank 0: 2, rank 1: 3)"),
    "dtype": (
        lambda g: dispatch_tokens(*tokens(1), *TABLES, 2, g),
        lambda g: dispatch_tokens(tokens(1)[0].bfloat16(), *tokens(1)[1:], *TABLES, 2, g),
        "differ in dtype (rank 0: 'float32', rank 1: 'bfloat16')",
    ),
    "op": (
        lambda g: call(g), lambda g: sum_ranks(torch.ones(2, D), g),
        "differ in op (rank 0: 'dispatch_tokens', rank 1: 'sum_ranks')",
    ),
    "tokens_of_a_sum": (
        lambda g: sum_ranks(torch.ones(2, D), g), lambda g: sum_ranks(torch.ones(3, D), g),
        "differ in rows (rank 0: 2, rank 1: 3)",
    ),
    "plan": (
        lambda g: experts_over_ranks(*tokens(2), *weights(), *TABLES, 4, g, "gather"),
        lambda g: experts_over_ranks(*tokens(2), *weights(), *TABLES, 4, g, "exchange"),
        "differ in collective (rank 0: 'gather', rank 1: 'exchange')",
    ),
    "too_many": (
        lambda g: call(g, T=2, rows=2), lambda g: call(g, T=3, rows=2),
        "more tokens than the agreed rows=2: rank 1 has 3",
    ),
}  # fmt: skip


def act(rank: int, group: str, acts: tuple[Act, Act]) -> Any:
    return acts[rank](group)


@pytest.mark.parametrize(("first", "second", "text"), DIFFER.values(), ids=DIFFER)
def test_ranks_that_differ_all_say_so(first: Act, second: Act, text: str) -> None:
    for error in threads(2, act, (first, second)):
        assert isinstance(error, (RuntimeError, ValueError)), error
        assert text in str(error) and "moe_ops." in str(error)


def differ(rank: int, group: str) -> None:
    """Real messages; after the error the group serves as before."""
    for first, second, text in DIFFER.values():
        with pytest.raises((RuntimeError, ValueError)) as raised:
            (first, second)[rank](group)
        assert text in str(raised.value)
    assert torch.equal(sum_ranks(torch.ones(3, 2), group), torch.full((3, 2), 2.0))


def between_halves(rank: int, group: str) -> None:
    """A rank raises between dispatch and combine, and calls the next op: the others say where."""
    sent = call(group)
    text = "differ in op (rank 0: 'combine_tokens', rank 1: 'dispatch_tokens')"
    with pytest.raises(RuntimeError) as raised:
        if rank == 0:
            combine_tokens(sent[0], tokens(2)[2], *TABLES, *sent[4:], 4, group)
        else:
            call(group)  # of the next step
    assert text in str(raised.value)
    y_TD = combine_tokens(call(group)[0], tokens(2)[2], *TABLES, *sent[4:], 4, group)
    assert y_TD.shape == (2, D)


def ended(rank: int, group: str) -> None:
    """The last rank ends without a word: the others raise, naming it, long before the limit."""
    if rank == 2:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"moe_ops\.dispatch_tokens: rank 2 of the group"):
        call(group)
    meet("named", rank, range(2))
    os._exit(0)  # the group cannot be taken down in order


def stuck(rank: int, group: str) -> None:
    """A rank that does something else: the other raises, naming it, at the group's limit."""
    if rank == 0:
        with pytest.raises(
            RuntimeError, match=r"rank 1 of the group .* does not answer rank 0: it"
        ):
            call(group)
        os._exit(0)
    import time

    time.sleep(4)
    os._exit(0)


@pytest.mark.parametrize(
    ("ranks", "body", "seconds"),
    [(2, differ, 30), (2, between_halves, 30), (3, ended, 20), (2, stuck, 2)],
    ids=["differ", "between_halves", "ended", "stuck"],
)
def test_processes_with_gloo(
    ranks: int, body: Callable[[int, str], None], seconds: float, tmp_path: Path
) -> None:
    processes(ranks, tmp_path, body, seconds=seconds)
