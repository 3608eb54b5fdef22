"""The ops over ranks as a compiler sees them, for a group of many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops import OPS, combine_tokens, dispatch_tokens, experts, experts_over_ranks
from moe_ops.passes.inductor.cache_key import environment_key
from moe_ops.passes.inductor.compiled import inductor_options
from moe_ops.testing import TOL, assert_close
from tests.distributed.ranks import fake_group, processes
from tests.distributed.shares import Spread, Whole, run_share

RANKS, ROWS = 64, 4
PER_RANK = torch.arange(RANKS, dtype=torch.int32)


def arguments(name: str, group: str, collective: str) -> tuple[Any, ...]:
    T, D, K = 3, 8, 2
    x, weights = torch.randn(T, D), torch.rand(T, K)
    ids = torch.randint(RANKS, (T, K))
    tables = (PER_RANK, torch.zeros_like(PER_RANK))
    if name == "sum_ranks":
        return x, group
    if name == "dispatch_tokens":
        return x, weights, ids, *tables, ROWS, group, None, collective
    if name == "experts_over_ranks":
        held = (torch.randn(1, 2 * D, D), torch.randn(1, D, D))
        return x, weights, ids, *held, *tables, ROWS, group, collective
    gathered = collective == "gather"
    G = RANKS * ROWS if gathered else 5
    splits = torch.zeros(2, 0 if gathered else RANKS, dtype=torch.int64)
    if not gathered:
        splits[:, 0] = torch.tensor([3, 5])
    token = torch.zeros(0 if gathered else 3, dtype=torch.int32)
    y = torch.randn(G, D)
    return y, ids, *tables, token, splits, ROWS, group, collective


NAMES = ("dispatch_tokens", "combine_tokens", "experts_over_ranks", "sum_ranks")


@pytest.mark.parametrize("name", NAMES)
def test_schema_and_fake_are_true_for_many_ranks(name: str) -> None:
    with fake_group(RANKS) as group:
        args = arguments(name, group, "gather")
        # What the others would send is whatever memory holds, so results are not compared.
        torch.library.opcheck(
            OPS[name].overload, args, test_utils=("test_schema", "test_faketensor")
        )
        waiting = OPS[name].waiting
        if waiting is not None:
            torch.library.opcheck(
                waiting, args, {"plan": "gather"}, test_utils=("test_schema", "test_faketensor")
            )


def test_graphs_of_groups_of_other_sizes_are_cached_apart() -> None:
    keys = [environment_key()]
    for size in (2, 64):
        with fake_group(size):
            keys.append(environment_key())
    assert len(set(keys)) == 3
    with fake_group(64):
        assert environment_key() == keys[2]
    assert environment_key() == keys[0]


def in_halves(x: Tensor, weights: Tensor, ids: Tensor, group: str, collective: str) -> Tensor:
    tables = (PER_RANK, torch.zeros_like(PER_RANK))
    sent = dispatch_tokens(x, weights, ids, *tables, ROWS, group, collective=collective)
    return combine_tokens(sent[0] * 2, ids, *tables, *sent[4:], ROWS, group, collective)


@pytest.mark.parametrize("collective", ["gather", "exchange", "push"])
def test_halves_trace_into_one_graph_for_any_number_of_tokens(collective: str) -> None:
    torch.compiler.reset()
    seen: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(graph)
        # Not run: the ranks that do not exist send no rows. x is one of the arguments.
        return lambda *args: [next(t for t in args if getattr(t, "shape", ())[1:] == (8,))]

    with fake_group(RANKS) as group:
        run = torch.compile(in_halves, fullgraph=True, dynamic=True, backend=keep)
        given = arguments("dispatch_tokens", group, collective)[:3]
        for T in (3, 2):
            assert run(*(t[:T].clone() for t in given), group, collective).shape == (T, 8)
    assert len(seen) == 1
    text = str(seen[0].graph)
    assert text.count("moe_ops.dispatch_tokens") == text.count("moe_ops.combine_tokens") == 1
    assert text.count("moe_ops.kept") == 2, "what gives nothing here would be left out"


def compiled(rank: int, group: str, whole: Whole, collective: str) -> None:
    """A rank's compiled share gives its bits, in one graph, and one of other tokens too."""

    def share(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return experts_over_ranks(
            x, weights, ids, *held.values(), *whole.tables(), whole.spread.rows, group, collective
        )

    held = whole.held(rank, whole.tables())
    run = torch.compile(share, fullgraph=True, dynamic=True, options=inductor_options())
    want = run_share(rank, group, whole, collective)
    got = run(*whole.own(rank))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["auto", pytest.param("exchange", marks=pytest.mark.every)])
def test_compiled_shares_of_two_processes(collective: str, tmp_path: Path) -> None:
    whole = Whole.of(Spread(name="two", tokens=(5, 3)), torch.float32)
    processes(2, tmp_path, compiled, whole, collective)


def beside_one_without_tokens(rank: int, group: str) -> None:
    """Exchanges that do not need each other, of ranks with tokens and without, in compiled code,
    which reads the last result first."""
    whole = Whole.of(Spread(name="one", tokens=(3, 0)), torch.float32)
    tables, rows = whole.tables(), whole.spread.rows
    w13, w2 = list(whole.held(rank, tables).values())[:2]

    def at_once(x: Tensor, weights: Tensor, ids: Tensor, collective: str) -> Tensor:
        return experts_over_ranks(
            x, weights, ids, w13, w2 * 2, *tables, rows, group, collective
        )  # fmt: skip

    def halves(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        sent = dispatch_tokens(x, weights, ids, *tables, rows, group)
        y = experts(sent[0], *sent[2:4], w13, w2)
        return combine_tokens(y, ids, *tables, *sent[4:], rows, group)

    def apart(x: Tensor, weights: Tensor, ids: Tensor, collective: str) -> tuple[Tensor, Tensor]:
        one = at_once(x, weights, ids, collective)
        return halves(x * 3, weights, ids) * 2, one + 1

    x, weights, ids = whole.own(rank)
    run = torch.compile(apart, fullgraph=True)
    for collective in ("exchange", "gather"):
        outs = (f(x, weights, ids, collective) for f in (run, apart))
        for a, b in zip(*outs, strict=True):
            assert_close(a, b, TOL["experts", torch.float32], collective)
    leaves = [t.requires_grad_() for t in (x, weights, w13, w2)]
    with torch.enable_grad():
        sums = [sum(t.square().sum() for t in f(x, weights, ids, "gather")) for f in (run, apart)]
        got, want = (torch.autograd.grad(s, leaves) for s in sums)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, TOL["experts", torch.float32], "gradients")


@pytest.mark.every
def test_ranks_without_tokens_take_part_in_compiled_exchanges(tmp_path: Path) -> None:
    processes(2, tmp_path, beside_one_without_tokens)
