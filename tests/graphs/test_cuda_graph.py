"""One captured call, and the pool of several; no GPU is needed to refuse, or to count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ops.graphs import cuda_graph
from moe_ops.graphs.cuda_graph import Captured, CaptureError, GraphPool, capture_call
from tests.graphs.recorder import Recorder

CPU = torch.device("cpu")


def test_a_capture_on_another_device_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"need tensors on a CUDA GPU, got cpu; move them"):
        capture_call(lambda: None, device=CPU)


def test_without_a_gpu_a_capture_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(CaptureError, match="need a CUDA GPU"):
        capture_call(lambda: None)


def test_where_there_is_something_to_capture_with() -> None:
    assert not GraphPool().captures_on(CPU)
    assert GraphPool().captures_on(torch.device("cuda", 0))
    assert GraphPool(Recorder()).captures_on(CPU)


REFUSED = {
    "error": (ValueError("no mask"), "it fails: ValueError('no mask')"),
    "capture": (CaptureError("a sync"), "a sync"),
}


@pytest.mark.parametrize(("error", "reason"), REFUSED.values(), ids=REFUSED)
def test_errors_are_why_a_call_is_not_captured(error: Exception, reason: str) -> None:
    with pytest.raises(CaptureError) as raised, cuda_graph.refusing("it fails"):
        raise error
    assert str(raised.value) == reason


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), TimeoutError("too long")])
def test_a_want_of_memory_and_what_came_from_outside_are_no_reason(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, cuda_graph.refusing("it fails"):
        torch.utils._pytree.tree_map(raising(error), 1)
    assert raised.value is error


def raising(error: Exception) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        raise error

    return function


def test_a_pool_is_shared_while_it_has_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All graphs are captured on one stream, without which they share no memory."""
    calls: list[dict[str, Any]] = []

    class Graph:
        def replay(self) -> None: ...

    def capture(function: Callable[[], Any], state: Sequence[Tensor], **memory: Any) -> Captured:
        calls.append(memory)
        return Captured(Graph().replay, function(), 64)

    monkeypatch.setattr(cuda_graph, "_new_memory", lambda device: (object(), object()))
    pool = GraphPool(capture)
    made = [pool.capture(lambda: 7, device=CPU) for _ in range(2)]
    assert [one.output for one in made] == [7, 7]
    assert calls[0] == calls[1] and None not in calls[0].values()
    del made[0]
    made.append(pool.capture(lambda: 7, device=CPU))
    assert calls[2] == calls[0]
    made.clear()
    pool.capture(lambda: 7, device=CPU)
    assert calls[3]["pool"] is not calls[0]["pool"]
    assert calls[3]["stream"] is not calls[0]["stream"]
