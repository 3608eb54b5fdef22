"""Ranks that differ, and ranks that end: every rank that is left raises an error that says who."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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


def trained(group: str, at: int) -> Any:
    """A dispatch of tokens; one tensor of them, by its place, has a gradient."""
    x_TD, weights_TK, ids_TK = given = tokens(2)
    given[at].requires_grad_()
    with torch.enable_grad():
        return dispatch_tokens(x_TD, weights_TK, ids_TK, *TABLES, 4, group)


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
    "gradients": (  # whose ways back would meet
        lambda g: trained(g, 0), lambda g: trained(g, 1),
        "differ in gradients (rank 0: 'x_TD', rank 1: 'weights_TK')",
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


def ended_meanwhile(rank: int, group: str) -> None:
    """A rank ends when one waits for it, and the first one, that comes later, knows already: it
    still tells who is there, which does not take the first one for the one that ended."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 2:
        store.set("waits", "")
    elif rank == 1:
        store.wait(["waits"])
        time.sleep(0.5)
        store.set("ends", "")
        os._exit(0)
    else:
        store.wait(["ends"])
        time.sleep(0.5)
    with pytest.raises(RuntimeError, match=r"moe_ops\.dispatch_tokens: rank 1 of the group"):
        call(group)
    meet("named", rank, (0, 2))
    os._exit(0)


def stuck(rank: int, world: str) -> None:
    """Ranks that do something else: the other raises, naming them, at the group's limit."""
    group = dist.new_group(timeout=timedelta(seconds=2)).group_name
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1, 2 of the group .* not answer rank 0: it"):
            call(group)
        assert 1 < time.monotonic() - start < 20  # and not the limit of the world
    meet("named", rank, range(3))
    os._exit(0)


@pytest.mark.parametrize(
    ("ranks", "body", "backend"),
    [
        (2, differ, "gloo"),
        (2, between_halves, "gloo"),
        (3, ended, "gloo"),
        (3, ended, None),  # torch's own choice
        (3, ended_meanwhile, "gloo"),
        (3, stuck, "gloo"),
    ],
    ids=["differ", "between_halves", "ended", "ended_no_backend", "ended_meanwhile", "stuck"],
)
def test_processes_with_gloo(
    ranks: int, body: Callable[[int, str], None], backend: str | None, tmp_path: Path
) -> None:
    processes(ranks, tmp_path, body, backend=backend)
