"""A replay that does not end names the rank that did not launch it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from moe_ops.ranks import watch as watch_module
from moe_ops.ranks.watch import Watch
from tests.distributed.ranks import LONG, meet, processes, results


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


LIMIT = 2.0  # seconds by a clock that goes on when it is told to


class Clock:
    """Stands for `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end, "what was waited for does not come"
        time.sleep(0.01)


def replays(rank: int, group: str, counts: tuple[int, ...]) -> None:
    """Rank r launches counts[r] replays, then stands still; without any it makes no watch. Before,
    all ranks are watched in more replays, which end."""
    store, every = dist.distributed_c10d._get_default_store(), range(len(counts))
    Reached.stores, Reached.ranks = dist.PrefixStore("before", store), len(counts)
    with Watch(group, seconds=LONG, event=Reached) as found:
        for _ in range(9):
            found.launched()
        until(lambda: said_by(found) == (9, 9))
        found.check()
    Reached.stores, Reached.made = dist.PrefixStore("test", store), 0
    least, clock = min(counts), Clock()
    if not counts[rank]:
        meet("said", rank, every)
        meet("over", rank, every)
        return
    with (
        patch.object(watch_module, "time", clock),
        Watch(group, seconds=LIMIT, event=Reached) as found,
    ):
        for _ in range(counts[rank]):
            found.launched()
        until(lambda: said_by(found) == (counts[rank], least))
        meet("said", rank, every)
        clock.now += LIMIT + 0.5
        if counts[rank] > least:
            until(lambda: bool(raised_by(found)))
        meet("over", rank, every)
        if counts[rank] == least:
            found.launched()
            return
        with pytest.raises(RuntimeError, match="did not end within"):
            found.launched()
    raised = raised_by(found)
    behind = [r for r, count in enumerate(counts) if count == least]
    assert f"replay {least + 1} of the group" in raised, raised
    assert f"rank {', '.join(map(str, behind))} did not launch it" in raised, raised


def said_by(found: Watch) -> tuple[int, ...]:
    """How many replays its rank has launched, and how many have ended, as other ranks read it."""
    return tuple(map(int, found._store.get(str(dist.get_rank())).split()))


def raised_by(found: Watch) -> str:
    try:
        found.check()
    except RuntimeError as error:
        return str(error)
    return ""


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
            assert started.wait(LONG)
            with pytest.raises(RuntimeError, match=r"replay 1 .* did not end within 0\.1 s; all"):
                found.check()
            closing = threading.Thread(target=found.close, daemon=True)
            closing.start()
            closing.join(LONG)
            assert not closing.is_alive()
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
        assert ended.wait(LONG), found.check()
        found.check()


def test_replays_in_a_row_have_the_limit_each() -> None:
    results(1, in_turns)


def alone(rank: int, group: str) -> None:
    with pytest.raises(ValueError, match="seconds=0 must be above 0"):
        Watch(group, seconds=0)
    with pytest.raises(ValueError, match="names no process group"):
        Watch("nobody")


def test_what_cannot_be_watched_says_so() -> None:
    results(1, alone)
