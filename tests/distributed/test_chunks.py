"""Calls of more tokens than ranks send at once: in parts, with the result of one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from moe_ops import using
from moe_ops.backends import cpu
from moe_ops.layer import MoELayer, exchange
from moe_ops.layer import run as run_of_layers
from moe_ops.parallel.config import AUTO, HIGH_THROUGHPUT, ParallelConfig
from moe_ops.quant.config import QuantConfig
from moe_ops.testing import Tol, assert_close
from tests.distributed.one_path import always_panels
from tests.distributed.ranks import fake_group, processes, results, threads
from tests.layer.shards import randomize, take_share

CLOSE = Tol(1e-5, "a token's experts are summed in another order")
ROUNDED = Tol(0.2, "inputs are quantised, or taken in an order that the whole layer has not")
SIZES: dict[str, Any] = {
    "num_experts": 6, "top_k": 3, "hidden_size": 64, "intermediate_size": 32,
}  # fmt: skip
FP8 = QuantConfig(weights="float8_e4m3fn:32x32", inputs="float8_e4m3fn:1x32")
ORDERED = QuantConfig(weights="int4:1x32", ordered_input=True, per_expert_order=True)
MOST = 4


def make(rank: int, world: str, whole: MoELayer, options: dict[str, Any], most: int) -> MoELayer:
    """A rank's share; `config` of the options is of the group."""
    options = dict(options)
    asked = options.pop("config", {"dp": dist.get_world_size()})
    tp = asked.get("tp", 1)
    config = ParallelConfig.of(
        **{"expert_parallel": True, **asked}, tp_rank=rank % tp, dp_rank=rank // tp
    )
    more = {}
    if tp > 1:
        pairs = [dist.new_group([first, first + 1]) for first in range(0, config.size, 2)]
        more = {"tp_group": pairs[rank // 2].group_name}
    layer = MoELayer(
        **{**SIZES, **options}, parallel=config, tokens="own", group=world, max_num_tokens=most,
        **more,
    )  # fmt: skip
    return take_share(whole, layer)


def own(rank: int, tokens: tuple[int, ...], layer: MoELayer) -> tuple[Tensor, Tensor]:
    place = rank // (layer.exchange.sharers)
    g = torch.Generator().manual_seed(place)
    return torch.randn(tokens[place], 64, generator=g), torch.randn(tokens[place], 6, generator=g)


def run(
    rank: int, world: str, whole: MoELayer, options: dict[str, Any], tokens: tuple[int, ...],
    rows: int | None,
) -> bool:  # fmt: skip
    """Whether the bits of a call are those of one exchange; close they have to be."""
    layer = make(rank, world, whole, options, MOST)
    given = own(rank, tokens, layer)
    got = layer(*given, rows=rows)
    at_once = make(rank, world, whole, options, 64)
    want = at_once(*given, rows=max(*tokens, 1))
    assert_close(got, want, CLOSE, f"rank {rank}")
    if layer.shared_experts is None:
        assert_close(got, whole(*given), CLOSE if layer.quant is None else ROUNDED)
    if layer.loads is not None:
        assert torch.equal(layer.loads, at_once.loads)
        assert torch.equal(layer.physical_loads, at_once.physical_loads)
    return torch.equal(got, want)


def on_one_path(rank: int, world: str, *args: Any) -> bool:
    """What `run` says of one backend, which many and few rows would not choose alike."""
    with using("cpu", "experts"):
        return run(rank, world, *args)


TOKENS: dict[str, tuple[int, ...]] = {
    "uneven": (11, 0, 3), "even": (8, 8), "one_more": (5, 4), "none": (0, 0), "one": (0, 9),
    "as_many": (4, 2),
}  # fmt: skip


@pytest.mark.parametrize("asks", [True, False], ids=["asked", "agreed"])
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_parts_give_the_bits_of_one_call(
    tokens: tuple[int, ...], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, sent = max(*tokens, 1), Counter()
    exchanged = run_of_layers._exchanged

    def noted(held: Any, ranks: Any, rows: int, routed: Any) -> Tensor:
        if ranks.exchange.most == MOST:
            sent[rows] += 1
            assert len(routed.x_TD) <= rows
        return exchanged(held, ranks, rows, routed)

    monkeypatch.setattr(run_of_layers, "_exchanged", noted)
    monkeypatch.setattr(cpu, "least_panel_rows", always_panels)
    whole = randomize(MoELayer(**SIZES, bias=True))
    rows = None if asks else most
    assert all(results(len(tokens), on_one_path, whole, {"bias": True}, tokens, rows))
    agreed = max(most, MOST) if asks else most
    parts = [min(MOST, agreed - start) for start in range(0, agreed, MOST)]
    assert sent == Counter(parts * len(tokens)), "every rank sends all parts"


OPTIONS: dict[str, dict[str, Any]] = {
    "exchange": {"config": {"dp": 2, "collective": HIGH_THROUGHPUT}},
    "auto": {"config": {"dp": 2, "collective": AUTO}},
    "shards": {"config": {"dp": 2, "expert_parallel": False}},
    "replicas": {"redundant_experts": 2, "balanced": True},
    "fused_shared": {"shared_experts": 1},
    "shared": {"shared_experts": nn.Linear(64, 64), "shared_reduction": "replicated"},
    "fp8": {"quant": FP8},
    "ordered": {"quant": ORDERED},
    "neighbours": {"config": {"dp": 2, "tp": 2}, "balanced": True},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_mean_in_parts_what_they_mean_at_once(options: dict[str, Any]) -> None:
    apart = ("config", "redundant_experts", "balanced", "shared_reduction")
    alone = {k: v for k, v in options.items() if k not in apart}
    if isinstance(alone.get("shared_experts"), nn.Module):
        del alone["shared_experts"]
    whole = randomize(MoELayer(**{**SIZES, **alone}))
    ranks = options.get("config", {"dp": 2}).get("tp", 1) * 2
    for rows in (None, 10):
        results(ranks, run, whole, options, (9, 2), rows)


def gradients(rank: int, world: str, whole: MoELayer, tokens: tuple[int, ...], most: int) -> Any:
    layer = make(rank, world, whole, {"bias": True}, most)
    x, logits = (t.requires_grad_() for t in own(rank, tokens, layer))
    with torch.enable_grad():
        loss = layer(x, logits).square().sum()
        return torch.autograd.grad(loss, [x, logits, *layer.parameters()])


def test_gradients_are_those_of_one_call() -> None:
    whole, tokens = randomize(MoELayer(**SIZES, bias=True)), (9, 0, 5)
    found, want = (results(3, gradients, whole, tokens, most) for most in (MOST, 16))
    for rank, pairs in enumerate(zip(found, want, strict=True)):
        for got, whole_grad in zip(*pairs, strict=True):
            assert_close(got, whole_grad, Tol(1e-5, "sums in another order"), f"rank {rank}")


def otherwise(rank: int, world: str, tokens: int, rows: int | None, most: int) -> None:
    layer = make(rank, world, MoELayer(**SIZES), {}, most if rank else MOST)
    layer(torch.randn(tokens, 64), torch.randn(tokens, 6), rows=rows if rank else 10)


def test_ranks_that_disagree_are_named_before_anything_is_sent() -> None:
    for error in threads(2, otherwise, 3, 11, MOST):
        assert "moe_ops.MoELayer: the ranks differ in rows (rank 0: 10, rank 1: 11)" in str(error)
    for error in threads(2, otherwise, 3, 10, MOST + 1):
        assert "MoELayer: the ranks differ in max_num_tokens (rank 0: 4, rank 1: 5)" in str(error)
    for error in threads(2, otherwise, 12, 10, MOST):
        assert isinstance(error, ValueError)
        assert "more tokens than the agreed rows=10: rank 0 has 12, rank 1 has 12" in str(error)
    for error in threads(2, otherwise, 3, None, MOST):
        assert isinstance(error, (ValueError, RuntimeError)) and "differ" in str(error)


def captured(rank: int, world: str) -> None:
    layer = make(rank, world, MoELayer(**SIZES), {}, MOST)
    assert layer(torch.randn(4, 64), torch.randn(4, 6)).shape == (4, 64)
    assert layer(torch.randn(9, 64), torch.randn(9, 6), rows=9).shape == (9, 64)
    with pytest.raises(ValueError, match=r"9 tokens are more than max_num_tokens=4, and ranks can"):
        layer(torch.randn(9, 64), torch.randn(9, 6))
    with pytest.raises(ValueError, match="10 tokens are more than rows=9, and ranks cannot ask"):
        layer(torch.randn(10, 64), torch.randn(10, 6), rows=9)


def test_a_captured_call_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "is_captured", lambda x_TD: True)
    results(2, captured)


def counted(rank: int, world: str) -> int:
    layer = make(rank, world, MoELayer(**SIZES), {}, MOST)
    given = torch.randn(9, 64), torch.randn(9, 6)
    if rank == 1:
        layer(*given)
        return 0
    with FlopCounterMode(display=False) as flops:
        layer(*given)
    return flops.get_total_flops()


def test_who_counts_operations_asks_too() -> None:
    assert results(2, counted)[0] > 0


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (0, ValueError, "rows=0 must be at least 1"),
        (-3, ValueError, "rows=-3 must be at least 1"),
        (1.5, TypeError, "rows must be an int, got"),
        (True, TypeError, "rows must be an int, got"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows: Any, error: type[Exception], text: str) -> None:
    for raised in threads(2, wrong_rows, rows):
        assert isinstance(raised, error) and text in str(raised)


def wrong_rows(rank: int, world: str, rows: Any) -> None:
    layer = make(rank, world, MoELayer(**SIZES), {}, MOST)
    layer(torch.randn(9, 64), torch.randn(9, 6), rows=rows)


def compiled(rank: int, world: str) -> None:
    torch.manual_seed(0)
    whole = randomize(MoELayer(**SIZES))
    layer = make(rank, world, whole, {}, MOST)
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for most in (4, 9):
        x, logits = torch.randn(most - rank, 64), torch.randn(most - rank, 6)
        assert_close(run(x, logits, rows=most), whole(x, logits), CLOSE, f"{most} tokens")
    with pytest.raises(ValueError, match="more tokens than the agreed rows=4: rank 0 has 9, rank"):
        run(torch.randn(9 - rank, 64), torch.randn(9 - rank, 6))


def one_of_four(group: str) -> MoELayer:
    """A layer without memory, for graphs that are traced and not run."""
    return MoELayer(
        **SIZES, parallel=ParallelConfig.of(dp=4, expert_parallel=True), tokens="own",
        group=group, max_num_tokens=MOST, internal_gate=True, device="meta",
    )  # fmt: skip


@pytest.mark.parametrize(("rows", "parts"), [(None, 1), (4, 1), (5, 2), (12, 3)])
def test_a_graph_holds_all_parts(rows: int | None, parts: int) -> None:
    found = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.extend(n for n in graph.graph.nodes if "experts_over_ranks" in str(n.target))
        return graph

    torch.compiler.reset()
    with fake_group(4) as group, torch.no_grad():
        layer = one_of_four(group)
        compiled = torch.compile(layer, fullgraph=True, backend=keep)
        assert compiled(torch.empty(3, 64, device="meta"), rows=rows).shape == (3, 64)
    assert len(found) == parts


@pytest.mark.parametrize("tokens", [0, 3, 12])
def test_a_graph_holds_parts_of_no_tokens_and_their_order(tokens: int) -> None:
    """Inductor would leave out what gives nothing, for which other ranks wait, and reorder."""
    found: Counter[str] = Counter()

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.update(str(n.target).rpartition(".")[2] for n in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    with fake_group(4) as group, torch.no_grad():
        layer = one_of_four(group)
        run = torch.compile(layer, fullgraph=True, backend=keep)
        assert run(torch.empty(tokens, 64, device="meta"), rows=12).shape == (tokens, 64)
    assert (found["kept"], found["after"]) == (3, 2)


def by_inductor(rank: int, world: str) -> None:
    torch.manual_seed(0)
    whole = randomize(MoELayer(**SIZES))
    layer = make(rank, world, whole, {}, MOST)
    run = torch.compile(lambda x, logits, rows: x + layer(x, logits, rows=rows))
    for tokens in ((3, 0), (9, 4), (9, 0), (12, 1)):  # of each rank
        x, logits = torch.randn(tokens[rank], 64), torch.randn(tokens[rank], 6)
        assert_close(run(x, logits, tokens[0]), x + whole(x, logits), CLOSE, f"{tokens}")


def trained_by_inductor(rank: int, world: str) -> None:
    torch.manual_seed(0)
    layer = make(rank, world, randomize(MoELayer(**SIZES)), {}, MOST)
    run = torch.compile(lambda x, logits, rows: x + layer(x, logits, rows=rows))
    for tokens in ((3, 0), (9, 0), (9, 4)):  # of each rank: one part, and three
        x, logits = (torch.randn(tokens[rank], n, requires_grad=True) for n in (64, 6))
        with torch.enable_grad():
            outs = x + layer(x, logits, rows=tokens[0]), run(x, logits, tokens[0])
            wrt = [x, logits, *layer.parameters()]
            want, got = (torch.autograd.grad(out.square().sum(), wrt) for out in outs)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b, CLOSE, f"{tokens}")


@pytest.mark.every
@pytest.mark.parametrize("body", [by_inductor, trained_by_inductor])
def test_ranks_without_tokens_take_part_in_compiled_calls(body: Any, tmp_path: Path) -> None:
    processes(2, tmp_path, body)


@pytest.mark.every
def test_compiled_calls_run_in_parts(tmp_path: Path) -> None:
    processes(2, tmp_path, compiled)
