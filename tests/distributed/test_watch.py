"""A replay that does not end names the rank that did not launch it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from moe_ops.ranks import watch as watch_module
from moe_ops.ranks.watch import Watch
from tests.distributed.ranks import meet, processes, results


class Reached:
    """An event of a device on which a replay ends once all ranks have launched it."""

    stores: Any = None
    ranks = 0
    made = 0

    def record(self) -> None:
        Reached.made += 1
        self.step = Reached.made
        Reached.stores.set(f"{dist.get_rank()}/{self.step}", "")

    def query(self) -> bool:
        every = [f"{rank}/{self.step}" for rank in range(Reached.ranks)]
        return bool(Reached.stores.check(every))


LIMIT = 2.0  # seconds; longer than ranks that launch at once are apart on a busy machine


def replays(rank: int, group: str, counts: tuple[int, ...]) -> None:
    """Rank r launches counts[r] replays, then stands still; without any it makes no watch. Before,
    all ranks are watched in more replays, which end."""
    store, every = dist.distributed_c10d._get_default_store(), range(len(counts))
    Reached.stores, Reached.ranks = dist.PrefixStore("before", store), len(counts)
    with Watch(group, seconds=30, event=Reached) as found:
        for _ in range(9):
            found.launched()
        while not Reached.stores.check([f"{r}/9" for r in every]):
            time.sleep(0.01)
        time.sleep(0.2)
        found.check()
    Reached.stores, Reached.made = dist.PrefixStore("test", store), 0
    least = min(counts)
    if not counts[rank]:
        meet("over", rank, every)
        return
    with Watch(group, seconds=LIMIT, event=Reached) as found:
        for step in range(counts[rank]):
            if step < least:
                meet(f"replay {step}", rank, every)
            found.launched()
        if counts[rank] > least:
            raised = raised_by(found)
        elif max(counts) == least:
            time.sleep(LIMIT + 0.5)
        meet("over", rank, every)
        if counts[rank] == least:
            found.check()
            return
        with pytest.raises(RuntimeError, match="did not end within"):
            found.launched()
    behind = [r for r, count in enumerate(counts) if count == least]
    assert f"replay {least + 1} of the group" in raised, raised
    assert f"rank {', '.join(map(str, behind))} did not launch it" in raised, raised


def raised_by(found: Watch) -> str:
    """What a watch raises within its limit and the time that a busy machine takes."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            found.check()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.02)
    raise AssertionError("a replay that does not end is not noticed")


@pytest.mark.parametrize(
    "counts", [(4, 2), *(pytest.param(c, marks=pytest.mark.every) for c in ((3, 3), (0, 5, 5)))],
    ids=str,
)  # fmt: skip
def test_ranks_that_do_not_launch_are_named(counts: tuple[int, ...], tmp_path: Path) -> None:
    processes(len(counts), tmp_path, replays, counts)


def aborting(rank: int, group: str) -> None:
    """NCCL's abort does not return while a graph is there: the watch and who closes it do not
    wait."""
    started, freed = threading.Event(), threading.Event()

    class Held:
        def abort(self) -> None:
            started.set()
            freed.wait()

    class Never:
        def record(self) -> None: ...

        def query(self) -> bool:
            return False

    try:
        with patch.object(watch_module, "resolve", lambda name: Held()):
            found = Watch(group, seconds=0.1, event=Never)
            found.launched()
            assert started.wait(10)
            with pytest.raises(RuntimeError, match=r"replay 1 .* did not end within 0\.1 s; all"):
                found.check()
            start = time.monotonic()
            found.close()
            assert time.monotonic() - start < 5
    finally:
        freed.set()


def test_no_one_waits_for_an_abort() -> None:
    results(1, aborting)


def in_turns(rank: int, group: str) -> None:
    """Replays that wait for each other are given the limit one by one, from the one before on."""
    clock, ended = Clock(), threading.Event()

    class Next:
        made = 0

        def record(self) -> None:
            Next.made += 1
            self.ends = 0.8 * Next.made

        def query(self) -> bool:
            clock.now += 0.1
            if clock.now >= self.ends == 4.0:
                ended.set()
            return clock.now >= self.ends

    with (
        patch.object(watch_module, "time", clock),
        Watch(group, seconds=1, event=Next) as found,
    ):
        for _ in range(5):
            found.launched()
        assert ended.wait(30), found.check()
        found.check()


class Clock:
    """Stands for `time`, and goes on when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_replays_in_a_row_have_the_limit_each() -> None:
    results(1, in_turns)


def alone(rank: int, group: str) -> None:
    with pytest.raises(ValueError, match="seconds=0 must be above 0"):
        Watch(group, seconds=0)
    with pytest.raises(ValueError, match="names no process group"):
        Watch("nobody")


def test_what_cannot_be_watched_says_so() -> None:
    results(1, alone)
