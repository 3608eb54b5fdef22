"""The runner of captured calls: which sizes are kept, what a graph reads, what became of it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from moe_ops.arena import Arena
from moe_ops.graphs.cuda_graph import CaptureError, GraphPool
from moe_ops.graphs.repeated import Repeated
from moe_ops.graphs.runner import TIMES, Lanes, Recent, Size, put
from tests.graphs.recorder import Recorder

CPU = torch.device("cpu")


def test_sizes_that_came_long_ago_are_forgotten() -> None:
    sizes = Recent(Size, most=2)
    first = sizes.came("a")
    assert sizes.came("a") is first and first.seen == 2
    sizes.came("b")
    sizes.came("a")
    sizes.came("c")
    assert [(key, size.seen) for key, size in sizes.items()] == [("a", 3), ("c", 1)]
    assert sizes.renew("a") is not first and sizes.came("a").seen == 2
    sizes.forget("a")
    assert [key for key, _ in sizes.items()] == ["c"] and sizes.graphs == 0
    with pytest.raises(TypeError, match="unhashable"):
        sizes.came([])


def test_what_became_of_a_capture_is_kept_and_told(caplog: pytest.LogCaptureFixture) -> None:
    size, pool = Size(), GraphPool(Recorder(CaptureError("a sync")))
    out = torch.zeros(2)
    with caplog.at_level(logging.INFO, "moe_ops"):
        size.capture(pool, lambda: out + 1, device=CPU, what="calls")
        assert (size.is_ready, size.bytes, size.refusal) == (False, 0, "a sync")
        size.capture(pool, lambda: out + 1, device=CPU, what="calls")
        size.capture(pool, lambda: out + 1, device=CPU)
    assert (size.is_ready, size.bytes, size.refusal, size.replays) == (True, 64, None, 0)
    out.fill_(3)
    assert size.replay().tolist() == [4, 4] and size.replays == 1
    told, took = caplog.messages
    assert told == "calls run uncaptured: a sync"
    assert took.startswith("a graph of calls took ")


def test_a_graph_whose_buffers_were_replaced_is_not_ready() -> None:
    arena, size, x = Arena(), Size(), torch.zeros(3)
    assert size.take(arena, "ids", "tests", (4, 2), x).shape == (4, 2)
    size.capture(GraphPool(Recorder()), lambda: x + 1, device=CPU)
    assert size.is_ready
    Size().take(arena, "ids", "tests", (400, 2), x)
    assert size.is_retired and not size.is_ready
    assert [use.purpose for use in arena.report()] == ["ids of tests"]


def test_an_input_is_copied_unless_it_is_there_already() -> None:
    class Watched(torch.Tensor):
        copies = 0

        def copy_(self, *args: object) -> Tensor:  # type: ignore[override]
            Watched.copies += 1
            return super().copy_(*args)  # type: ignore[arg-type]

    memory = torch.arange(6.0)
    buffer = memory[:4].view(2, 2).as_subclass(Watched)
    put(memory[:4].view(2, 2), buffer)
    assert Watched.copies == 0
    assert memory[:4].tolist() == [0, 1, 2, 3]
    for x in (torch.ones(2, 2), torch.rand(2, 2).t(), torch.ones(2, 2, dtype=torch.bool)):
        assert put(x, buffer) is buffer and torch.equal(memory[:4].view(2, 2), x.float())
    assert Watched.copies == 3


def test_lanes_of_a_stream_share_its_lock_and_their_sizes_are_listed() -> None:
    arena = Arena()
    lanes = Lanes(arena, Recorder(), Size)
    lane = lanes.of_current(CPU)
    assert lanes.of_current(CPU) is lane and lane.lock is arena.lock(CPU)
    lane.sizes.came("a")
    assert [key for key, _ in lanes.items()] == ["a"] and lanes.graphs == 0
    lanes.forget()
    assert lanes.items() == []


def test_compiled_functions_share_the_buffers_of_their_inputs() -> None:
    arena, recorder, weight = Arena(), Recorder(), torch.rand(8)
    runs = [
        Repeated(function, frozenset({0}), arena=arena, capture=recorder)
        for function in (lambda w, x: [x * w], lambda w, x: [x + w])
    ]
    for _ in range(TIMES + 2):
        for rows in (3, 1, 2):
            x = torch.rand(8, rows).t()  # whose strides the code may count on
            assert torch.equal(runs[0](weight, x)[0], x * weight)
            assert torch.equal(runs[1](weight, x)[0], x + weight)
    assert recorder.captures == 6 and recorder.replayed == 12
    assert [use.purpose for use in arena.report()] == ["input 1 of compiled calls"]
    x = torch.rand(500, 8)
    for _ in range(TIMES):
        runs[0](weight, x)
    x = torch.rand(8, 3).t()  # of a graph whose buffer was replaced
    assert torch.equal(runs[1](weight, x)[0], x + weight) and recorder.captures == 8
