"""Two halves of a batch in a block over ranks: numbers, the order of exchanges, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops import plan_halves, two_halves, using
from moe_ops.backends import cpu
from moe_ops.halves import HalvesPlan, plan
from moe_ops.layer import MoELayer, exchange
from moe_ops.parallel.config import AUTO, HIGH_THROUGHPUT, LOW_LATENCY
from moe_ops.quant.config import QuantConfig
from moe_ops.ranks import exchange as exchange_of_ranks
from moe_ops.ranks import gather
from moe_ops.testing import Tol, assert_close
from tests.distributed.attention_block import SIZES, Block, share_of_block, whole_block
from tests.distributed.one_path import always_panels
from tests.distributed.ranks import processes, results, threads

CLOSE = Tol(1e-5, "products of fewer rows are summed in another order")
FP8 = QuantConfig(weights="float8_e4m3fn:32x32", inputs="float8_e4m3fn:1x32")
TOKENS = 5  # of a sequence


def given(rank: int, sequences: int, tokens: int = TOKENS) -> Tensor:
    return torch.randn(sequences, tokens, 64, generator=torch.Generator().manual_seed(rank))


Sequences = tuple[int, ...]
SEQUENCES: dict[str, Sequences] = {
    "even": (4, 4), "uneven_halves": (3, 5), "one_on_a_rank": (1, 4), "none_on_a_rank": (0, 3),
    "three_ranks": (2, 0, 3), "none_twice": (0, 0, 2),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "gather": {},
    "exchange": {"config": {"dp": 2, "expert_parallel": True, "collective": HIGH_THROUGHPUT}},
    "auto": {"config": {"dp": 2, "expert_parallel": True, "collective": AUTO}},
    "shards": {"config": {"dp": 2}},
    "fused_shared": {"shared_experts": 1},
    "replicas": {"redundant_experts": 2, "balanced": True},
    "biases": {"bias": True},
    "fp8": {"quant": FP8},
    "wider": {"hidden_multiple": 48},
}  # fmt: skip
APART = ("config", "redundant_experts", "balanced", "hidden_multiple")


def in_both_ways(
    rank: int, world: str, whole: Block, options: dict[str, Any], many: Sequences
) -> bool:
    """Whether halves give the bits of one batch; close they have to be."""
    mine = share_of_block(whole, rank, len(many), world, **options)
    x = given(rank, many[rank])
    found = plan_halves(mine, x, halves=True)
    assert found.split and found.reason == "halves=True"
    want = mine(x)
    if mine.experts.loads is not None:
        counted = mine.experts.loads.clone()
    got = two_halves(mine, x, plan=found)
    assert got.shape == x.shape
    assert_close(got, want, CLOSE, f"rank {rank}")
    if mine.experts.loads is not None:
        assert torch.equal(mine.experts.loads, 2 * counted)
    return torch.equal(got, want)


@pytest.mark.parametrize("many", SEQUENCES.values(), ids=SEQUENCES)
def test_halves_give_the_bits_of_one_batch(
    many: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "least_panel_rows", always_panels)

    def run(rank: int, world: str) -> bool:
        with using("cpu", "experts"):
            return in_both_ways(rank, world, whole, {"config": config}, many)

    whole, config = whole_block(), {"dp": len(many), "expert_parallel": True}
    assert all(results(len(many), run))


@pytest.mark.parametrize("many", [(3, 4), (0, 3)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_mean_in_halves_what_they_mean_in_one_batch(
    options: dict[str, Any], many: Sequences
) -> None:
    whole = whole_block(**{k: v for k, v in options.items() if k not in APART})
    results(2, in_both_ways, whole, options, many)


@pytest.mark.parametrize("transport", [gather, exchange_of_ranks], ids=["gather", "exchange"])
def test_exchanges_of_both_halves_alternate_on_every_rank(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half is sent before the experts run on the first one, also where it is empty."""
    collective = HIGH_THROUGHPUT if transport is exchange_of_ranks else AUTO
    config = {"dp": 3, "expert_parallel": True, "collective": collective}
    many, order = (3, 1, 0), {rank: [] for rank in range(3)}

    def noted(name: str, start: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        rank = torch.distributed.get_rank()
        tokens = args[0].x_TD if name == "send" else (args[1] if transport is gather else args[2])
        order[rank].append(f"{name} {len(tokens) if torch.is_tensor(tokens) else tokens}")
        wait = start(*args)

        def waited() -> Any:
            order[rank].append(f"{name} waits")
            return wait()

        return waited

    for name, attribute in (("send", "start_dispatch"), ("back", "start_combine")):
        start = getattr(transport, attribute)
        monkeypatch.setattr(transport, attribute, partial(noted, name, start))

    def run(rank: int, world: str) -> None:
        mine = share_of_block(whole, rank, 3, world, config=config)
        x = given(rank, many[rank])
        two_halves(mine, x, plan=plan_halves(mine, x, halves=True))

    whole = whole_block()
    results(3, run)
    for rank, (first, second) in enumerate([(10, 5), (5, 0), (0, 0)]):
        started = [step for step in order[rank] if not step.endswith("waits")]
        assert [step.split()[0] for step in started] == ["send", "send", "back", "back"]
        assert [step.split()[1] for step in started[:2]] == [str(first), str(second)]
        steps = [step if step.endswith("waits") else step.split()[0] for step in order[rank]]
        waits = ["send waits", "back", "send waits", "back", "back waits", "back waits"]
        assert steps == ["send", "send", *waits]


def in_a_row(rank: int, world: str, many: Sequences) -> None:
    wholes = [whole_block(), whole_block(shared_experts=1)]
    blocks = nn.ModuleList(
        share_of_block(whole, rank, len(many), world, **options)
        for whole, options in zip(wholes, ({}, {"shared_experts": 1}), strict=True)
    )
    x = given(rank, many[rank])
    found = plan_halves(blocks, x, halves=True)
    assert found.split
    want = blocks[1](blocks[0](x))
    assert_close(two_halves(blocks, x, plan=found), want, CLOSE)
    unsplit = plan_halves(blocks, x, halves=False)
    assert_close(two_halves(list(blocks), x, plan=unsplit), want, CLOSE)


@pytest.mark.parametrize("many", [(4, 3), (0, 2), (1, 1, 2)], ids=str)
def test_blocks_run_one_after_the_other(many: Sequences) -> None:
    results(len(many), in_a_row, many)


def masked(rank: int, world: str, whole: Block) -> None:
    mine = share_of_block(whole, rank, 2, world)
    x = given(rank, 3)
    chances = torch.rand(3, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(rank))
    mask = (chances < 0.5) | torch.eye(TOKENS, dtype=torch.bool)
    found = plan_halves(mine, x, halves=True)
    for each in (mask, mask[:1], None):
        got = two_halves(mine, x, plan=found, attention_mask=each)
        assert_close(got, mine(x, attention_mask=each), CLOSE)
    with pytest.raises(ValueError, match=r"attention_mask has the shape \[2, 1, 5, 5\], and x 3"):
        two_halves(mine, x, plan=found, attention_mask=mask[:2])
    with pytest.raises(ValueError, match="attention_mask is a str, which cannot be split"):
        two_halves(mine, x, plan=found, attention_mask="causal")


def test_masks_are_split_by_sequences() -> None:
    results(2, masked, whole_block())


@pytest.mark.every
def test_halves_run_on_gloo(tmp_path: Path) -> None:
    processes(2, tmp_path, on_gloo)


def on_gloo(rank: int, world: str) -> None:
    """Several calls, as a message that is left behind would meet another one."""
    whole = whole_block()
    for config in ({"collective": AUTO}, {"collective": HIGH_THROUGHPUT}):
        options = {"config": {"dp": 2, "expert_parallel": True, **config}}
        for many in ((4, 4), (3, 0), (1, 2)):
            in_both_ways(rank, world, whole, options, many)


def planned(
    rank: int, world: str, whole: Block, options: dict[str, Any], many: Sequences,
    halves: bool | None,
) -> HalvesPlan:  # fmt: skip
    """The plan of a call, whose result is that of one batch."""
    mine = share_of_block(whole, rank, len(many), world, **options)
    x = given(rank, many[rank])
    found = plan_halves(mine, x, halves=halves)
    assert_close(two_halves(mine, x, plan=found), mine(x), CLOSE, f"rank {rank}")
    return found


WHOLE: dict[str, tuple[dict[str, Any], Sequences, bool | None, str]] = {
    "one_sequence": ({}, (1, 1), True, "no rank has two sequences"),
    "unwanted": ({}, (4, 4), False, "halves=False"),
    "on_cpus": ({}, (4, 4), None, plan.ON_CPU),
    "in_parts": (
        {"max_num_tokens": 9}, (4, 4), True, "a half of 10 tokens is sent in parts of 9",
    ),
    "ordered": (
        {"quant": QuantConfig(weights="int4:1x32", ordered_input=True, per_expert_order=True)},
        (2, 2), True, "rank 0: each of its experts takes columns in an order of its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "many", "halves", "why"), WHOLE.values(), ids=WHOLE)
def test_one_batch_runs_with_the_reason(
    options: dict[str, Any], many: Sequences, halves: bool | None, why: str
) -> None:
    whole = whole_block(**{k: v for k, v in options.items() if k == "quant"})
    for found in results(len(many), planned, whole, options, many, halves):
        assert not found.split and found.reason == why
        assert str(found) == f"one batch of up to {max(many) * TOKENS} tokens a rank: {why}"


def with_gradients(rank: int, world: str) -> None:
    mine = share_of_block(whole_block(), rank, 2, world)
    x = given(rank, 2)
    found = plan_halves(mine, x, halves=True)
    assert found.split
    with torch.enable_grad():
        refused = plan_halves(mine, x, halves=True)
        assert not refused.split and refused.reason == "rank 0: a gradient is asked for"
        two_halves(mine, x, plan=refused).sum().backward()
        assert mine.qkv.weight.grad is not None
        with pytest.raises(ValueError, match="two_halves has no gradients, and one is asked for"):
            two_halves(mine, x, plan=found)


def test_gradients_are_those_of_one_batch() -> None:
    results(2, with_gradients)


def compiled(rank: int, world: str) -> None:
    mine = share_of_block(whole_block(), rank, 2, world)
    x = given(rank, 2)
    mine.experts.compile(backend="eager")
    found = plan_halves(mine, x, halves=True)
    assert found.reason == "rank 0: experts is compiled, and runs from its start to its end"


def test_compiled_parts_run_in_one_batch() -> None:
    results(2, compiled)


def test_one_rank_reckons_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose devices differ would not find the same."""

    def reckoned(*args: Any) -> tuple[bool, str]:
        rank = torch.distributed.get_rank()
        return rank == 0, f"rank {rank} says so"

    monkeypatch.setattr(plan, "_reckoned", reckoned)
    for found in results(3, planned, whole_block(), {}, (2, 2, 2), None):
        assert found.split and found.reason == "rank 0 says so"
        assert str(found) == ("two halves of up to 5 and 5 tokens a rank by gather: rank 0 says so")


class Twice(Block):
    """Exchanges tokens twice in a call."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(super().forward(x))


class Never(Block):
    """Exchanges nothing."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return x + 1


MISUSES: dict[str, tuple[type[Block], str]] = {
    "twice": (Twice, "the block exchanges tokens more than once in a call"),
    "never": (Never, "the block did not come to its exchange of tokens"),
}


def misused(rank: int, world: str, kind: type[Block]) -> None:
    mine = share_of_block(whole_block(), rank, 2, world)
    mine.__class__ = kind
    x = given(rank, 2)
    two_halves(mine, x, plan=plan_halves(mine, x, halves=True))


@pytest.mark.parametrize(("kind", "text"), MISUSES.values(), ids=MISUSES)
def test_blocks_exchange_once(kind: type[Block], text: str) -> None:
    for error in threads(2, misused, kind):
        assert isinstance(error, RuntimeError) and text in str(error)


def refused(rank: int, world: str) -> None:
    mine = share_of_block(whole_block(), rank, 2, world)
    x = given(rank, 4)
    with pytest.raises(
        ValueError, match=r"x must be \[sequences, tokens, hidden_size\], got \[20,"
    ):
        two_halves(mine, x.flatten(0, 1))
    with pytest.raises(TypeError, match="x must be a tensor, got"):
        two_halves(mine, [x])
    with pytest.raises(TypeError, match=r"block must be an nn\.Module or a sequence of them, got"):
        plan_halves(lambda x: x, x)
    with pytest.raises(ValueError, match="block=Linear has no module that exchanges tokens of a"):
        plan_halves(nn.Linear(64, 64), x)
    with pytest.raises(ValueError, match="block=MoELayer has no module that exchanges tokens of a"):
        plan_halves(MoELayer(**SIZES), x)
    with pytest.raises(ValueError, match=r"exchanges tokens in 0\.experts, 1\.experts, and halves"):
        plan_halves(nn.Sequential(mine, share_of_block(whole_block(), rank, 2, world)), x)
    found = plan_halves(mine, x, halves=True)
    with pytest.raises(ValueError, match="x has 25 tokens, 15 and 10 in its halves, and the plan"):
        two_halves(mine, given(rank, 5), plan=found)
    with pytest.raises(
        ValueError, match="x has 20 tokens, 20 and 0 in its halves, and the plan is"
    ):
        two_halves(mine, given(rank, 1, 20), plan=found)
    pushed = share_of_block(
        whole_block(), rank, 2, world,
        config={"dp": 2, "expert_parallel": True, "collective": LOW_LATENCY},
    )  # fmt: skip
    assert "rank 0: push waits for other ranks" in plan_halves(pushed, x, halves=True).reason


def refused_in_a_row(rank: int, world: str) -> None:
    mine, x = share_of_block(whole_block(), rank, 2, world), given(rank, 4)
    with pytest.raises(ValueError, match="block is empty; give an nn"):
        plan_halves([], x)
    with pytest.raises(TypeError, match=r"block must be an nn\.Module or a sequence of them, got"):
        plan_halves([mine, None], x)
    with pytest.raises(ValueError, match="block=Linear has no module that exchanges tokens"):
        plan_halves([mine, nn.Linear(64, 64)], x)
    other = share_of_block(
        whole_block(), rank, 2, world,
        config={"dp": 2, "expert_parallel": True, "collective": HIGH_THROUGHPUT},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"its blocks exchange tokens over .* by 'gather' and"):
        plan_halves([mine, other], x)


@pytest.mark.parametrize("body", [refused, refused_in_a_row])
def test_what_cannot_be_is_refused(body: Callable[..., None]) -> None:
    results(2, body)


def differ(rank: int, world: str) -> None:
    mine = share_of_block(whole_block(), rank, 2, world)
    plan_halves(mine, given(rank, 2), halves=rank == 0)


def test_ranks_that_ask_for_something_else_are_named() -> None:
    for error in threads(2, differ):
        assert isinstance(error, RuntimeError)
        assert "two_halves: the ranks differ in halves (rank 0: 'True', rank 1: 'Fa" in str(error)


def captured(rank: int, world: str, patch: Callable[[bool], None]) -> None:
    mine = share_of_block(whole_block(), rank, 2, world)
    x = given(rank, 2)
    found = plan_halves(mine, x, halves=True, captured=True)
    want = mine(x)
    torch.distributed.barrier()
    patch(True)
    with pytest.raises(ValueError, match="ranks cannot agree on halves while a CUDA graph is capt"):
        two_halves(mine, x)
    assert_close(two_halves(mine, x, plan=found), want, CLOSE)


def test_a_captured_call_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"captured": False}
    for module in (plan, exchange):
        monkeypatch.setattr(module, "is_captured", lambda x: state["captured"])
    results(2, captured, lambda value: state.update(captured=value))
