"""What links are reckoned to take, and which transport `auto` takes by that, held against what was
measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ops.ranks.links import LINKS, MOST_BYTES, Traffic
from moe_ops.ranks.packed import row_bytes
from moe_ops.ranks.transport import PUSH
from moe_ops.testing import LAYERS

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.mark.parametrize(("ranks", "rows"), [(2, 16384), (4, 16384), (64, 512)])
def test_gather_takes_no_more_memory_beyond_an_exchange_than_its_limit(
    ranks: int, rows: int
) -> None:
    traffic = Traffic(ranks=ranks, experts=256, top_k=8, there=14400, back=14336)
    link = replace(LINKS["cuda"], wait_us=1e9)  # or the time would be the limit
    most = traffic.most_gathered(link)
    assert most is not None and most >= rows
    needed = traffic.bytes("exchange", most) + most * traffic.visited / (ranks - 1) * 28736
    beyond = [ranks * more * 28736 - needed for more in (most, 2 * most + 2)]
    assert beyond[0] <= MOST_BYTES * 1.01 < beyond[1]


# Cells in which `auto` takes more, as memory is limited.
BEHIND = {("ep_layers_four_h200", "mixtral_8x7b", 16384): 1.07}


@pytest.mark.parametrize(
    ("file", "ranks"), [("ep_layers_four_h200", 4), ("ep_layers_push_h100", 2)]
)
def test_auto_takes_what_was_measured_to_be_fastest(file: str, ranks: int) -> None:
    """Of the transports within 5 % of the fastest, in layers of bfloat16."""
    spent = json.loads((RESULTS / f"{file}.json").read_text())["spent"]
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for one in spent:
        if one["how"] != "auto":
            cells.setdefault((one["what"], one["size"]), {})[one["how"]] = one["us"]
    assert len(cells) >= 10
    for (name, rows), us in cells.items():
        case, link = LAYERS[name], LINKS["cuda"]
        row = [(case.D, torch.bfloat16), (case.K, torch.float32), (case.K, torch.int32)]
        traffic = Traffic(
            ranks=ranks, experts=case.E, top_k=case.K, there=row_bytes(row), back=2 * case.D
        )
        gathered = traffic.most_gathered(link)
        taken = "gather" if gathered is None or rows <= gathered else "exchange"
        taken = PUSH if rows <= traffic.most_pushed(link) else taken
        most = BEHIND.get((file, name, rows), 1.05)
        assert us[taken] <= most * min(us.values()), f"{name}, {rows} tokens: {taken} of {us}"
