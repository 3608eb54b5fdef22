"""Captured calls on a CUDA GPU whose memory does not suffice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import moe_ops
from moe_ops.graphs.capture import GraphRunner

pytestmark = pytest.mark.gpu
MB = 1 << 20


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def leave() -> Iterator[Callable[[int], None]]:
    """Leaves this process so many bytes of the GPU beyond what it has."""
    total = torch.cuda.get_device_properties(0).total_memory

    def leave(nbytes: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved() + nbytes
        torch.cuda.set_per_process_memory_fraction(allowed / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


def wide(x: Tensor, w: Tensor) -> Tensor:  # [4096, 64], with 256 MB each for two values on the way
    return (x.repeat(1, 256) * w).sum(-1)


def test_graphs_go_where_memory_does_not_suffice_for_another(
    leave: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    run, x = GraphRunner(wide, buckets=(4096,)), torch.rand(4096, 64, device="cuda")
    first, other = (torch.full((1,), value, device="cuda") for value in (2.0, 3.0))
    torch.testing.assert_close(run(x, first), 512 * x.sum(-1))
    (report,) = run.report()
    assert report.bytes >= 256 * MB and report.refusal is None
    leave(64 * MB)
    with caplog.at_level(logging.WARNING, "moe_ops"):
        torch.testing.assert_close(run(x, other), 768 * x.sum(-1))
    assert caplog.messages == ["out of memory, so the graphs of a captured function are dropped"]
    assert [(r.hits, r.refusal) for r in run.report()] == [(1, None)]


def test_a_capture_that_lacks_memory_is_refused_and_drops_nothing() -> None:
    def function(x: Tensor) -> Tensor:
        if x.shape[0] == 8 and torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return x * 2

    run = GraphRunner(function, buckets=(4, 8))
    for rows in (3, 7, 3, 7):
        x = torch.rand(rows, 16, device="cuda")
        torch.testing.assert_close(run(x), x * 2)
    four, eight = sorted(run.report(), key=lambda r: r.tokens)
    assert (four.hits, four.refusal) == (2, None)
    assert eight.refusal is not None and "out of memory" in eight.refusal
    assert "out of memory" in str(moe_ops.graph_report(run))
    assert torch.rand(4, device="cuda").sum().item() > 0  # random numbers and memory work
