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
from moe_ops.layer import MoELayer, rebalance_layers, resize_layer
from moe_ops.ops.activate import Activation
from moe_ops.ops.experts import experts
from moe_ops.parallel.config import ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.ranks.agree import device_for, most_tokens
from tests.distributed.ranks import meet, processes, results, threads

E, D = 4, 8
MXFP4_INPUTS = QuantConfig(weights="mxfp4", inputs="mxfp4")  # which travel as floats
LAYOUT = next(iter(experts.layouts))  # which one does not matter
ORDERED = QuantConfig(weights="int4:1x32", ordered_input=True, per_expert_order=True)
TABLES = (torch.tensor([0, 0, 1, 1], dtype=torch.int32), torch.tensor([0, 1, 0, 1]).int())


def tokens(T: int, D: int = D, K: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(T, D), torch.ones(T, K), torch.zeros(T, K, dtype=torch.int64)


def call(group: str, T: int = 2, rows: int = 4, collective: str = "gather", **sizes: int) -> Any:
    return dispatch_tokens(*tokens(T, **sizes), *TABLES, rows, group, collective=collective)


def placed(group: str, ranks: tuple[int, ...], slots: tuple[int, ...]) -> Any:
    """A dispatch by tables of this rank's own."""
    tables = (torch.tensor(ranks, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32))
    return dispatch_tokens(*tokens(2), *tables, 4, group)


def over_ranks(group: str, collective: str = "gather", **options: Any) -> Tensor:
    I = 4  # noqa: E741
    F = 2 * I if options.get("gated", True) else I
    weights = (torch.ones(2, F, D), torch.ones(2, D, I))
    return experts_over_ranks(*tokens(2), *weights, *TABLES, 4, group, collective, **options)


def combined(group: str, moved: bool) -> Tensor:
    """A combine by other tables than those of the dispatch."""
    x_GD, _, _, _, *handle = call(group)
    ranks, slots = TABLES
    return combine_tokens(
        x_GD, tokens(2)[2], 1 - ranks if moved else ranks, slots, *handle, 4, group
    )


def layer_of(rank: int, group: str, ranks: int = 2, **options: Any) -> MoELayer:
    """A layer of this rank that can be balanced and resized."""
    given: dict[str, Any] = {
        "num_experts": 6, "top_k": 2, "hidden_size": 32, "intermediate_size": 32, "balanced": True,
        "tokens": "own", "group": group, "max_num_tokens": 8,
        "parallel": ParallelConfig.of(dp=ranks, dp_rank=rank, expert_parallel=True),
    }  # fmt: skip
    return MoELayer(**given, **options)


def forward(rank: int, group: str, **options: Any) -> Tensor:
    out_TD: Tensor = layer_of(rank, group, **options)(torch.ones(2, 32), torch.ones(2, 6))
    return out_TD


def resized(rank: int, group: str, **options: Any) -> None:
    layer = layer_of(rank, group, **options)
    resize_layer(layer, layer.parallel, group, over=group)


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
    "ranks_of_experts": (
        lambda g: placed(g, (0, 0, 1, 1), (0, 1, 0, 1)),
        lambda g: placed(g, (0, 1, 0, 1), (0, 1, 0, 1)), "differ in rank_of_P (rank 0: ",
    ),
    "slots_of_experts": (
        lambda g: placed(g, (0, 0, 1, 1), (0, 1, 0, 1)),
        lambda g: placed(g, (0, 0, 1, 1), (1, 0, 0, 1)), "differ in slot_of_P (rank 0: ",
    ),
    "slots_of_shards": (
        lambda g: placed(g, (-1, -1), (0, 1)), lambda g: placed(g, (-1, -1), (1, 0)),
        "differ in slot_of_P (rank 0: ",
    ),
    "ranks_on_the_way_back": (
        lambda g: combined(g, False), lambda g: combined(g, True),
        "moe_ops.combine_tokens: the ranks differ in rank_of_P (rank 0: ",
    ),
    "kind": (
        lambda g: over_ranks(g), lambda g: over_ranks(g, kind="gelu"),
        "differ in kind (rank 0: 'silu', rank 1: 'gelu')",
    ),
    "gated": (
        lambda g: over_ranks(g), lambda g: over_ranks(g, gated=False),
        "differ in gated (rank 0: True, rank 1: False)",
    ),
    "interleaved": (
        lambda g: over_ranks(g, "exchange"), lambda g: over_ranks(g, "exchange", interleaved=True),
        "differ in interleaved (rank 0: False, rank 1: True)",
    ),
    "alpha": (
        lambda g: over_ranks(g, alpha=1.702), lambda g: over_ranks(g),
        "differ in alpha (rank 0: 1.702, rank 1: 1.0)",
    ),
    "limit": (
        lambda g: over_ranks(g), lambda g: over_ranks(g, limit=7.0),
        "differ in limit (rank 0: None, rank 1: 7.0)",
    ),
    "up_shift": (
        lambda g: over_ranks(g, up_shift=1.0), lambda g: over_ranks(g),
        "differ in up_shift (rank 0: 1.0, rank 1: 0.0)",
    ),
    "format_of_weights": (
        lambda g: forward(0, g, quant="int8:row"), lambda g: forward(1, g),
        "differ in w_format (rank 0: 'int8:row', rank 1: '')",
    ),
    "format_of_inputs": (
        lambda g: forward(0, g, quant="mxfp4_w4a16"), lambda g: forward(1, g, quant=MXFP4_INPUTS),
        "differ in x_format (rank 0: '', rank 1: 'mxfp4')",
    ),
    "layout": (
        lambda g: over_ranks(g, layout=LAYOUT), lambda g: over_ranks(g),
        f"differ in layout (rank 0: '{LAYOUT}', rank 1: '')",
    ),
    "kind_of_ordered": (
        lambda g: forward(0, g, quant=ORDERED),
        lambda g: forward(1, g, quant=ORDERED, activation=Activation(kind="gelu")),
        "differ in kind (rank 0: 'silu', rank 1: 'gelu",
    ),
    "more": (
        lambda g: dispatch_tokens(*tokens(2), *TABLES, 4, g, alike='{"scale": 1}'),
        lambda g: dispatch_tokens(*tokens(2), *TABLES, 4, g, alike='{"scale": 2}'),
        "differ in scale (rank 0: 1, rank 1: 2)",
    ),
    "multiple_of_rows": (
        lambda g: most_tokens(3, g), lambda g: most_tokens(3, g, multiple=8),
        "moe_ops.most_tokens: the ranks differ in multiple (rank 0: 1, rank 1: 8)",
    ),
    "balanced_layers": (
        lambda g: rebalance_layers([layer_of(0, g)], g),
        lambda g: rebalance_layers([layer_of(1, g), layer_of(1, g)], g),
        "moe_ops.rebalance_layers: the ranks differ in layers (rank 0: 1, rank 1: 2)",
    ),
    "nodes": (
        lambda g: rebalance_layers([layer_of(0, g)], g),
        lambda g: rebalance_layers([layer_of(1, g)], g, nodes=2),
        "moe_ops.rebalance_layers: the ranks differ in nodes (rank 0: 1, rank 1: 2)",
    ),
    "resized_layers": (
        lambda g: resized(0, g), lambda g: resized(1, g, redundant_experts=2),
        "moe_ops.resize_layer: the ranks differ in P (rank 0: 6, rank 1: 8)",
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
        lambda g: over_ranks(g, "gather"), lambda g: over_ranks(g, "exchange"),
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


def ended(rank: int, group: str, name: str = "dispatch_tokens") -> None:
    """The last rank ends without a word: the others raise, naming it, long before the limit."""
    if rank == 2:
        os._exit(0)
    with pytest.raises(RuntimeError, match=rf"moe_ops\.{name}: rank 2 of the group") as raised:
        HOST[name](rank, group)
    assert "Timed out" not in str(raised.value)
    meet("named", rank, range(2))
    os._exit(0)  # the group cannot be taken down in order


# What ranks do together, by its name in errors.
HOST: dict[str, Callable[[int, str], Any]] = {
    "dispatch_tokens": lambda rank, group: call(group),
    "most_tokens": lambda rank, group: most_tokens(rank, group),
    "rebalance_layers": lambda rank, group: rebalance_layers([layer_of(rank, group, 3)], group),
    "resize_layer": lambda rank, group: resized(rank, group, ranks=3),
}


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
        words = (
            r"rank 1, 2 of the group .* not answer rank 0: it .* 2000ms"  # not the world's limit
        )
        with pytest.raises(RuntimeError, match=words):
            call(group)
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


@pytest.mark.parametrize("name", [name for name in HOST if name != "dispatch_tokens"])
def test_a_rank_that_ended_between_steps_is_named(name: str, tmp_path: Path) -> None:
    processes(3, tmp_path, ended, name)


def at_home(rank: int, group: str) -> Tensor:
    """The last expert is each rank's own, behind those that it holds: three, or two."""
    tables = (
        torch.tensor([0, 0, 0, 1, 1, -2]).int(),
        torch.tensor([0, 1, 2, 0, 1, 3 - rank]).int(),
    )
    x_TD, weights_TK, _ = tokens(2)
    held = torch.arange(1.0, 5.0 - rank)[:, None, None]
    ids_TK = torch.tensor([[5, 0], [5, 4]])
    return experts_over_ranks(
        x_TD, weights_TK, ids_TK, held.expand(-1, 8, D), held.expand(-1, D, 4), *tables, 2, group,
        "gather",
    )  # fmt: skip


def test_slots_of_a_ranks_own_experts_may_differ() -> None:
    first, second = results(2, at_home)
    assert torch.equal(first[0] - second[0], first[1] - second[1]), "all but the expert at home"
    assert not torch.equal(first, second)


@pytest.mark.parametrize("alike", ["[1]", "{", '{"a": "' + "b" * 512 + '"}'], ids=len)
def test_what_ranks_cannot_compare_is_refused(alike: str) -> None:
    with pytest.raises(ValueError, match="alike must be a JSON object of at most 512 bytes"):
        dispatch_tokens(*tokens(2), *TABLES, 4, alike=alike)


@pytest.mark.parametrize(
    ("backends", "device", "taken"),
    [
        ("cuda:nccl", "cpu", "cuda"), ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl,cpu:mpi", "cuda:1", "cpu"), ("cpu:mpi", "cpu", "cpu"),
    ],
)  # fmt: skip
def test_what_ranks_say_lies_where_their_group_takes_it(
    backends: str, device: str, taken: str
) -> None:
    """Also of a rank that has no layers, and so knows no device."""
    assert device_for(backends.split(","), torch.device(device)) == torch.device(taken)
