"""`bench halves`: a block over ranks in one batch and in two halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.bench import __main__ as cli
from moe_ops.bench import halves
from moe_ops.bench.halves import Cell, Spent, Stretched, slower_link, table
from moe_ops.bench.step import ATTENTION, Attention
from moe_ops.halves.plan import ON_CPU
from moe_ops.ranks import groups
from moe_ops.ranks.groups import Group, all_gather, all_to_all
from moe_ops.ranks.links import LINKS
from moe_ops.testing import LAYERS, Case
from tests.distributed.ranks import processes, results

TINY = Case(name="tiny", T=1, E=8, K=2, D=64, I=32)


def cell_of(tokens: int, slower: int = 1, of_ranks: int = 0) -> Cell:
    return Cell(
        layer="tiny", tokens=tokens, sequences=2, blocks=2, of_ranks=of_ranks, slower=slower,
        collective="gather", captured=True,
    )  # fmt: skip


def measured(rank: int, group: str) -> None:
    LAYERS["tiny"], ATTENTION["tiny"] = TINY, Attention(H=4, N=2, size=16, normed=False)
    halves.REPEATS["cpu"] = 2
    cells = [cell_of(8), cell_of(16, slower=3), cell_of(8, of_ranks=4)]
    found = list(halves.measure(cells, torch.device("cpu")))
    assert [s.cell for s in found] == cells
    for s in found:
        assert min(s.whole_us, s.halves_us, s.sent_us) > 0 and s.error < 0.02
        assert not s.splits and s.reason == ON_CPU and s.planned_us == s.whole_us
    assert len(table(found).splitlines()) == 4


@pytest.mark.slow
@pytest.mark.every
def test_a_block_is_measured_on_ranks(tmp_path: Path) -> None:
    processes(2, tmp_path, measured)


def test_a_table_says_what_each_way_gains() -> None:
    found = Spent(
        cell=cell_of(8, slower=4), whole_us=120, halves_us=100, planned_us=100, sent_us=30,
        splits=True, reason="", error=0.001,
    )  # fmt: skip
    line = table([found]).splitlines()[1].split()
    assert " ".join(line) == (
        "tiny 8 in 2 2 - 1/4 gather 120 us 30 (25%) 100 1.200 halves 1.200 1.0e-03"
    )


class Counted:
    """Collectives that note how many rows they are given."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        def call(t: Tensor, *args: Any) -> Any:
            self.rows.append(len(t))
            return getattr(self.real, name)(t, *args)

        return call


def stretched(rank: int, world: str) -> None:
    """Three times the rows, and the result of one."""
    group, t = Group.of(world), torch.arange(16.0).view(4, 4) + 100 * rank
    want = all_gather(t, group), all_to_all(t, [2, 2], [2, 2], group)
    counted = Counted(groups._functional)
    slow = Stretched(counted, 3)
    gathered = slow.all_gather_into_tensor(t, 2, world)
    swapped = slow.all_to_all_single(t, [2, 2], [2, 2], world)
    assert torch.equal(slow.wait_tensor(gathered), want[0])
    assert torch.equal(slow.wait_tensor(swapped), want[1])
    assert counted.rows == [12, 12, 24, 12] and not slow._ranks
    with pytest.raises(ValueError, match="has as many rows for all ranks"):
        slow.all_to_all_single(t, [1, 3], [1, 3], world)


def test_a_slower_link_carries_more_rows() -> None:
    results(2, stretched)


def test_a_slower_link_is_reckoned_and_ends() -> None:
    real, links = groups._functional, dict(LINKS)
    with slower_link(4):
        assert isinstance(groups._functional, Stretched)
        assert LINKS["cuda"].bytes_per_second == links["cuda"].bytes_per_second / 4
        assert LINKS["cuda"].pushed_per_second == links["cuda"].pushed_per_second
    assert groups._functional is real and links == LINKS
    with slower_link(1):
        assert groups._functional is real and links == LINKS


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--layer olmoe", "--layer takes qwen3_30b, mixtral_8x7b, gpt_oss_20b here, got olmoe"),
        ("--slower 1,4", "--slower stretches collectives, which push does not run"),
        ("--tokens 9", "--tokens 9 do not divide among --sequences 4"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["halves", *words.split()])
    assert text in capsys.readouterr().err


def test_cells_are_of_all_that_is_asked_for() -> None:
    words = "halves --tokens 1024,2048 --slower 1,4 --collective gather --eager"
    found = cli._halves_cells(cli.parse(words.split(" ")))
    assert [(c.slower, c.tokens) for c in found] == [(1, 1024), (1, 2048), (4, 1024), (4, 2048)]
    assert all(c.layer == "mixtral_8x7b" and not c.captured for c in found)
