"""Buffers by device, stream and purpose."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from moe_ops import arena
from moe_ops.arena import Arena

CPU = torch.device("cpu")


def test_one_buffer_serves_all_who_need_no_more() -> None:
    a = Arena()
    large = a.take("x", 5000, CPU)
    assert a.take("x", 100, CPU) is large
    assert a.take("y", 100, CPU) is not large
    assert large.view((3, 5), torch.float32).shape == (3, 5)
    assert [(use.purpose, use.bytes) for use in a.report()] == [("x", 5120), ("y", 512)]


def test_a_buffer_that_is_too_small_is_retired_but_not_freed_under_its_user() -> None:
    a = Arena()
    small = a.take("x", 512, CPU)
    view = small.view((128,), torch.float32).fill_(7)
    large = a.take("x", 513, CPU)
    assert small.retired and not large.retired
    assert (view == 7).all()
    assert a.report()[0].retired_bytes == 512
    del small, view
    gc.collect()
    assert a.report()[0].retired_bytes == 0


def test_buffers_of_inference_mode_are_normal_tensors() -> None:
    with torch.inference_mode():
        buffer = Arena().take("x", 8, CPU)
    assert not buffer.memory.is_inference()
    buffer.view((2,), torch.float32).add_(1)


def test_growth_during_a_capture_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    a, device = Arena(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(arena, "current_stream", lambda device: 0)
    with pytest.raises(RuntimeError, match=r"'x' has 0 bytes and needs 8.*largest size once"):
        a.take("x", 8, device)


def test_threads_get_the_same_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.01)  # for other threads to find no buffer, if they could look
        return empty(*args, **kwargs)

    a, empty = Arena(), torch.empty
    monkeypatch.setattr(torch, "empty", slow)
    with ThreadPoolExecutor(8) as pool:
        buffers = list(pool.map(lambda _: a.take("x", 1000, CPU), range(64)))
    assert len({id(b) for b in buffers}) == 1


def test_a_stream_of_a_device_has_one_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    a, stream = Arena(), 0
    monkeypatch.setattr(arena, "current_stream", lambda device: stream)
    first = a.lock(CPU)
    a.release()  # a thread may hold it still
    assert a.lock(CPU) is first
    assert a.lock(torch.device("cuda", 0)) is not first
    assert Arena().lock(CPU) is not first
    stream = 1
    assert a.lock(CPU) is not first


def test_release_lets_go_of_everything() -> None:
    a = Arena()
    buffer = a.take("x", 8, CPU)
    a.release()
    assert buffer.retired and a.report() == []


def test_trim_frees_what_nobody_has() -> None:
    a = Arena()
    held = a.take("x", 8, CPU)
    a.take("y", 5000, CPU)
    assert a.trim() == 5120 and a.trim() == 0
    assert a.take("x", 8, CPU) is held and not held.retired
    del held
    assert a.trim() == 512 and a.report() == []
