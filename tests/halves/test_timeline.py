"""What is reckoned of a block in one batch and in two halves."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.halves import plan, timeline
from moe_ops.halves.found import exchanging
from moe_ops.halves.timeline import CONTENTION, Parts, Reckoned, in_halves, reckon
from moe_ops.layer import MoELayer
from moe_ops.parallel.config import ParallelConfig
from moe_ops.planning.cost import DEVICES
from moe_ops.ranks.links import LINKS
from moe_ops.ranks.transport import EXCHANGE, GATHER
from tests.distributed.attention_block import Block
from tests.distributed.ranks import fake_group
from tests.sources import ROOT

# Parts of both halves alike, when they end, and what of the link is hidden by then.
ALIKE = {
    "nothing_travels": (Parts(before=3, there=0, experts=5, back=0), 16),
    "all_but_the_last_way_back_is_hidden": (Parts(before=3, there=2, experts=5, back=4), 20),
    # The link is busy from the first half's dispatch on.
    "the_link_is_the_limit": (Parts(before=1, there=10, experts=1, back=10), 41),
    "experts_wait_for_the_second_dispatch": (Parts(before=1, there=9, experts=2, back=0), 21),
}


@pytest.mark.parametrize(("half", "ends"), ALIKE.values(), ids=ALIKE)
def test_halves_end_when_both_have_come_back(half: Parts, ends: float) -> None:
    hidden = 2 * half.in_turn - ends
    assert hidden >= 0
    assert math.isclose(in_halves(half, half), ends + CONTENTION * hidden)


def test_uneven_halves_wait_for_each_other() -> None:
    first = Parts(before=4, there=1, experts=6, back=1)
    absent = Parts(before=0, there=0, experts=0, back=0)
    assert in_halves(first, absent) == first.in_turn
    assert in_halves(absent, first) == first.in_turn


def test_blocks_in_a_row_hide_the_way_back_but_that_of_the_last_one() -> None:
    half = Parts(before=3, there=2, experts=5, back=3)
    ends = [19, 35, 51]  # what is computed, and one way back
    for blocks, end in enumerate(ends, 1):
        hidden = 2 * blocks * half.in_turn - end
        assert math.isclose(in_halves(half, half, blocks), end + CONTENTION * hidden)
    slow = Parts(before=1, there=10, experts=1, back=10)  # the link is busy all the time
    assert in_halves(slow, slow, 4) < 4 * in_halves(slow, slow)


def test_halves_never_end_before_what_one_thing_has_to_do() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        first, second = (Parts(**_random(generator)) for _ in range(2))
        ended = in_halves(first, second)
        assert ended >= first.before + first.experts + second.before + second.experts
        assert ended >= first.there + first.back + second.there + second.back
        assert ended <= first.in_turn + second.in_turn + 1e-6


def _random(generator: torch.Generator) -> dict[str, float]:
    names = ("before", "there", "experts", "back")
    return dict(zip(names, torch.rand(4, generator=generator).tolist(), strict=True))


def big_block(group: str) -> tuple[Block, Tensor]:
    """A block of Mixtral's widths, of which the four ranks hold two experts each."""
    layer = MoELayer(
        8, 2, 4096, 14336, parallel=ParallelConfig.of(dp=4, expert_parallel=True), tokens="own",
        group=group, max_num_tokens=8192, dtype=torch.bfloat16, device="meta",
    )  # fmt: skip
    block = Block(layer, 4096, 32, device="meta", dtype=torch.bfloat16)
    return block, torch.empty(4, 1024, 4096, dtype=torch.bfloat16, device="meta")


def on_h100(monkeypatch: pytest.MonkeyPatch, slower: float = 1.0) -> None:
    monkeypatch.setattr(timeline, "device_of", lambda d: DEVICES["NVIDIA H100 80GB HBM3"])
    link = LINKS["cuda"]
    rate = link.bytes_per_second / slower
    monkeypatch.setitem(LINKS, "cuda", replace(link, bytes_per_second=rate))


def reckoned(tokens: int, collective: str = GATHER, blocks: int = 1) -> Reckoned:
    with fake_group(4) as group:
        block, x = big_block(group)
        rows = (tokens, tokens // 2, tokens // 2)
        found = reckon([block] * blocks, x, exchanging([block], x), rows, collective)
    assert found is not None
    return found


def test_halves_pay_where_much_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    on_h100(monkeypatch, slower=8)
    found = reckoned(4096)
    assert found.sent_us > 0.2 * found.whole_us
    assert found.pays and found.whole_us / found.halves_us > 1.1


def test_halves_do_not_pay_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts read their weights twice."""
    on_h100(monkeypatch)
    assert not reckoned(64).pays
    assert not reckoned(64, EXCHANGE).pays


def test_halves_pay_in_graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_h100(monkeypatch, slower=8)
    with fake_group(4) as group:
        block, x = big_block(group)
        given = ([block], x, exchanging([block], x), (4096, 2048, 2048), GATHER)
        splits, reason = plan._reckoned(*given, captured=True)
        assert splits and "us are reckoned for two halves" in reason
        assert plan._reckoned(*given, captured=False) == (False, plan.FROM_PYTHON)


MEASURED = json.loads((ROOT / "benchmarks/results/halves_h200.json").read_text())["halves"]


@pytest.mark.parametrize("one", MEASURED, ids=lambda m: m["reason"][:16])
def test_what_was_measured_is_never_run_the_slower_way(one: dict[str, Any]) -> None:
    """With the gain that is asked for now, of what was reckoned then."""
    halves, whole = (int(n) for n in re.findall(r"(\d+)(?: us are| for one batch)", one["reason"]))
    found = Reckoned(whole_us=whole, halves_us=halves, sent_us=0)
    runs_in_halves = found.pays and one["cell"]["captured"]
    assert one["whole_us"] / (one["halves_us"] if runs_in_halves else one["whole_us"]) >= 0.98


def test_what_is_reckoned_is_said() -> None:
    found = Reckoned(whole_us=1234.4, halves_us=1000.2, sent_us=300.0)
    assert str(found) == (
        "1000 us are reckoned for two halves and 1234 for one batch, 300 of them on the way"
    )
