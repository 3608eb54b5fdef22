"""`explain` names the transport of a layer, why not another one, and when links take the time."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops import sum_ranks
from moe_ops.ops.sum_ranks import SumRanksCall
from moe_ops.parallel.config import ALLGATHER, AUTO, HIGH_THROUGHPUT, ParallelConfig
from moe_ops.planning.cost import cost
from moe_ops.ranks.links import LINKS
from tests.chosen import one_in
from tests.distributed.ranks import fake_group


@one_in(
    2,
    pytest.mark.parametrize(
        ("collective", "rows", "backend"),
        [
            (ALLGATHER, 8, "gather"),
            (HIGH_THROUGHPUT, 8, "exchange"),
            (AUTO, 8, "gather"),
            (AUTO, 4096, "exchange"),
        ],
    ),
)
@torch.no_grad()
def test_the_transport_of_a_layer_is_named(collective: str, rows: int, backend: str) -> None:
    with fake_group(8) as group:
        layer = moe_ops.MoELayer(
            64, 8, 128, 16, internal_gate=True, tokens="own", group=group, max_num_tokens=rows,
            parallel=ParallelConfig.of(dp=8, expert_parallel=True, collective=collective),
        )  # fmt: skip
        found = moe_ops.explain(layer, (torch.randn(4, 128),))
    (choice,) = (c for c in found.plan.choices if c.op == "experts_over_ranks")
    assert [r.backend for r in choice.ranges] == [backend]
    assert f"runs on      experts_over_ranks: {backend}" in str(found)
    other = "exchange" if backend == "gather" else "gather"
    asked = f"collective='{backend}' was asked for"
    assert choice.refusals == ({} if collective == AUTO else {other: asked})
    if rows == 8:
        (line,) = (text for text in str(found).splitlines() if text.endswith("link"))
        assert line.split()[:2] == ["8", backend]


@torch.no_grad()
def test_the_way_of_a_sum_is_named() -> None:
    part_TD = torch.randn(4, 128)
    with fake_group(8) as group:
        plan = moe_ops.explain(lambda x: sum_ranks(x * 2, group), (part_TD,)).plan
        found = cost("sum_ranks", SumRanksCall(part_TD, group), 4)
    (choice,) = (c for c in plan.choices if c.op == "sum_ranks")
    assert [r.backend for r in choice.ranges] == ["shares"]
    assert found is not None
    assert found.link_us == LINKS["cpu"].sum_us(False, 8, part_TD.nbytes) > 500
