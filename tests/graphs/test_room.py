"""What goes where memory does not suffice, and when nothing may."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.arena import Arena
from moe_ops.graphs import cuda_graph
from moe_ops.graphs.cuda_graph import Captured
from moe_ops.graphs.repeated import Repeated
from moe_ops.graphs.room import with_room
from moe_ops.graphs.runner import TIMES, Lanes, Size
from tests.chosen import one_in
from tests.graphs.recorder import Recorder, runner

CPU = torch.device("cpu")


class Full:
    """What lacks memory for so many calls, then returns 7; it counts calls and drops."""

    def __init__(self, fails: int, graphs: int = 3) -> None:
        self.fails = fails
        self.graphs = graphs
        self.calls = 0
        self.dropped = 0

    def run(self) -> int:
        self.calls += 1
        if self.calls <= self.fails:
            raise torch.OutOfMemoryError("no room")
        return 7

    def drop(self) -> str:
        self.dropped += 1
        graphs, self.graphs = self.graphs, 0
        return f"{graphs} graphs are dropped" if graphs else ""


def test_what_suffices_drops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    full = Full(0)
    assert with_room(full.run, full.drop) == 7
    assert (full.calls, full.dropped, caplog.messages) == (1, 0, [])


def test_without_memory_graphs_go_and_it_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    full = Full(1)
    with caplog.at_level(logging.WARNING, "moe_ops"):
        assert with_room(full.run, full.drop) == 7
    assert (full.calls, full.dropped) == (2, 1)
    assert caplog.messages == ["out of memory, so 3 graphs are dropped"]


@one_in(
    2,
    pytest.mark.parametrize(
        ("fails", "graphs", "calls"), [(2, 3, 2), (1, 0, 1)], ids=["twice", "none"]
    ),
)
def test_what_does_not_help_is_raised(fails: int, graphs: int, calls: int) -> None:
    full = Full(fails, graphs)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        with_room(full.run, full.drop)
    assert (full.calls, full.dropped) == (calls, 1)


def test_lanes_drop_graphs_and_what_nobody_uses() -> None:
    arena = Arena()
    held = arena.take("held", 100, CPU)
    lanes = Lanes(arena, Recorder(), Size)
    assert lanes.drop("tests") == ""
    arena.take("idle", 5000, CPU)
    assert lanes.drop("tests") == "buffers that nobody uses are freed"
    size = lanes.of_current(CPU).sizes.came("some")
    size.buffers["x"] = arena.take("x", 100, CPU)
    size.graph = Captured(lambda: None, None, 64)
    assert [use.purpose for use in arena.report()] == ["held", "x"]
    del size
    assert lanes.drop("tests") == "the graphs of tests are dropped"
    assert [use.purpose for use in arena.report()] == ["held"] and lanes.items() == []
    assert not held.retired and arena.take("held", 100, CPU) is held


@pytest.mark.parametrize("own", [True, False], ids=["of ours", "of the caller"])
def test_during_a_capture_nothing_goes(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if own:
        monkeypatch.setattr(cuda_graph._thread, "captures", True, raising=False)
    else:
        for name in ("is_initialized", "is_current_stream_capturing"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
    full = Full(1)
    with pytest.raises(torch.OutOfMemoryError):
        with_room(full.run, full.drop)
    assert (full.calls, full.dropped) == (1, 0)


def test_memory_is_freed_between_captures_of_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("freed"))
    full = Full(1)
    with cuda_graph.between_captures():  # as a thread that captures has it
        thread = threading.Thread(target=with_room, args=(full.run, full.drop))
        thread.start()
        while not full.dropped:
            pass
        order.append("captured")
    thread.join()
    assert order == ["captured", "freed"] and full.calls == 2


class Failing:
    """A function that lacks memory for the next `fails` calls."""

    fails = 0

    def __call__(self, w: Tensor, x: Tensor) -> list[Tensor]:
        if self.fails:
            self.fails -= 1
            raise torch.OutOfMemoryError("no room")
        return [x * w]


def compiled(function: Any, recorder: Recorder, arena: Arena) -> Callable[..., Any]:
    return Repeated(function, frozenset({0}), arena=arena, capture=recorder)


def captured(function: Any, recorder: Recorder, arena: Arena) -> Callable[..., Any]:
    run = runner(lambda x, w: function(w, x), recorder, arena, buckets=(4, 16))
    return lambda w, x: run(x, w)


OWNERS = {
    "backend": (compiled, "a compiled function"),
    "capture": (captured, "a captured function"),
}


@one_in(2, pytest.mark.parametrize(("owner", "whose"), OWNERS.values(), ids=OWNERS))
def test_owners_drop_their_graphs_and_go_on(
    owner: Any, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    function, recorder, arena, weight = Failing(), Recorder(), Arena(), torch.rand(8)
    run = owner(function, recorder, arena)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "moe_ops"):
        for fails, rows in [*[(0, 3)] * (TIMES + 1), (1, 7), *[(0, 7)] * TIMES]:
            function.fails, x = fails, torch.rand(rows, 8)
            assert torch.equal(run(weight, x)[0], x * weight)
        assert caplog.messages == [f"out of memory, so the graphs of {whose} are dropped"]
        function.fails = 2
        with pytest.raises(torch.OutOfMemoryError):
            run(weight, torch.rand(1, 8))
