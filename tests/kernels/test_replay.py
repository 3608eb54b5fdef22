"""Recorded launches: the same numbers for other tensors, and no recording where that is not sure.

The kernels here run on a CPU; as compiled ones they take addresses, and read what lies there.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from moe_ops.kernels.triton import recorded
from moe_ops.kernels.triton import replay as module
from moe_ops.kernels.triton.replay import launch, replay
from tests.replaying import STREAM, on_a_cpu


def floats(at: Any, n: int) -> np.ndarray:
    """n floats at an address, or where a tensor or a TMA descriptor lies; no tensor, as a kernel
    is no operator of torch."""
    at = getattr(at, "base", at)
    address = at if isinstance(at, int) else at.data_ptr()
    return np.frombuffer((ctypes.c_float * n).from_address(address), dtype=np.float32)


@dataclass
class Descriptor:
    """As much of a TMA descriptor as a launch needs."""

    base: Any
    shape: tuple[int, ...]


class Kernel:
    """A kernel as Triton's are called: on tensors by `kernel[grid]`, compiled on addresses."""

    packed_metadata, function = "metadata", "function"

    def __init__(self, body: Callable[..., None], *names: str) -> None:
        self.body, self.arg_names = body, list(names)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launched(*args: Any, num_warps: int = 4, **named: Any) -> Kernel:
            rest = [named[name] for name in self.arg_names[len(args) :]]
            self.body(*args, *rest)
            return self

        return launched

    def run(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
        assert (y, z, stream, args[:5]) == (
            1,
            1,
            STREAM,
            ("function", "metadata", None, None, None),
        )
        self.body(*args[5:])


def _add(a: Any, b: Any, out: Any, n: int) -> None:
    floats(out, n)[:] = floats(a, n) + (0 if b is None else floats(b, n))


def _scale(a: Any, out: Any, n: int, by: float) -> None:
    floats(out, n)[:] = floats(a, n) * by


add = Kernel(_add, "a", "b", "out", "n")
scale = Kernel(_scale, "a", "out", "n", "by")


def two_steps(a: Tensor, b: Tensor | None, by: float) -> Tensor:
    """(a + b) * by, through memory between two launches."""
    host_code.append("two_steps")
    between, out = a.new_empty(a.shape), a.new_empty(a.shape)
    launch(add, (3,), a, b, between, n=a.numel(), num_warps=2)
    launch(scale, (3,), between, out, a.numel(), by)
    return out


host_code: list[str] = []


@pytest.fixture(autouse=True)
def repeated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    host_code.clear()
    with on_a_cpu(monkeypatch):
        yield


def called(*given: Any) -> Tensor:
    """`two_steps` replayed, compared with the formula."""
    *tensors, by = given
    out = replay(two_steps, tuple(tensors), (by,))
    assert isinstance(out, Tensor)
    a, b = tensors
    torch.testing.assert_close(out, (a + (0 if b is None else b)) * by, rtol=0, atol=0)
    return out


def test_like_calls_run_host_code_once() -> None:
    kept = []  # so that each call has other addresses
    for _ in range(5):
        tensors = torch.randn(4, 3), torch.randn(4, 3)
        kept.append((*tensors, called(*tensors, 2.0)))
    assert host_code == ["two_steps"]
    assert len({t.data_ptr() for call in kept for t in call}) == 15


def test_what_is_to_come_before_is_called_once_for_a_kind() -> None:
    before: list[int] = []

    def note() -> None:
        before.append(len(host_code))

    for shape in ((4, 3), (4, 3), (5, 3), (4, 3), (5, 3)):
        tensors = torch.randn(shape), torch.randn(shape)
        replay(two_steps, tensors, (2.0,), note)
    assert before == [0, 1] and len(host_code) == 2


def test_a_call_that_cannot_begin_runs_when_it_comes_again() -> None:
    def fail() -> None:
        raise ValueError("not yet")

    tensors = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.raises(ValueError, match="not yet"):
        replay(two_steps, tensors, (2.0,), fail)
    assert host_code == []
    called(*tensors, 2.0)


OTHERS = {
    "the same": (lambda: (torch.randn(4, 3), torch.randn(4, 3), 2.0), 1),
    "another number": (lambda: (torch.randn(4, 3), torch.randn(4, 3), 3.0), 2),
    "another shape": (lambda: (torch.randn(3, 4), torch.randn(3, 4), 2.0), 2),
    "no tensor": (lambda: (torch.randn(4, 3), None, 2.0), 2),
    "not aligned": (lambda: (torch.randn(13)[1:].view(4, 3), torch.randn(4, 3), 2.0), 2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_run_it_again(name: str) -> None:
    make, times = OTHERS[name]
    called(torch.randn(4, 3), torch.randn(4, 3), 2.0)
    called(*make())
    called(*make())
    assert len(host_code) == times


@pytest.mark.parametrize("first", [True, False])
def test_one_tensor_for_two_arguments(first: bool) -> None:
    """Whether it comes before a call that is recorded or after it."""
    both = torch.randn(4, 3)
    if first:
        called(both, both, 2.0)
    for _ in range(2):
        called(torch.randn(4, 3), torch.randn(4, 3), 2.0)
    called(both, both, 2.0)
    assert len(host_code) == 1 + first


def test_more_results_than_one_and_views_of_arguments() -> None:
    def rows(a: Tensor) -> tuple[Tensor, Tensor]:
        host_code.append("rows")
        even, odd = a.new_empty(3), torch.empty(3)
        launch(add, (1,), a[0], None, even, 3)
        launch(add, (1,), a[1:].transpose(0, 1), None, odd, 3)
        return even, odd

    for _ in range(3):
        a = torch.randn(2, 3)
        even, odd = replay(rows, (a,), ())
        assert torch.equal(even, a[0]) and torch.equal(odd, a[1])
    assert len(host_code) == 1


def chained(a: Tensor) -> Tensor:
    """16 a, by four launches through three tensors, of which two at a time are needed."""
    host_code.append("chained")
    now = a
    for _ in range(3):
        made = a.new_empty(a.shape)
        launch(scale, (1,), now, made, a.numel(), 2.0)
        now = made
    out = a.new_empty(a.shape)
    launch(scale, (1,), now, out, a.numel(), 2.0)
    return out


def test_a_buffer_holds_what_is_needed_at_one_time() -> None:
    for _ in range(4):
        a = torch.randn(640)
        out = replay(chained, (a,), ())
        assert isinstance(out, Tensor)
        torch.testing.assert_close(out, 16 * a, rtol=0, atol=0)
    (recording,) = module._recordings.values()
    assert host_code == ["chained"]
    assert recording is not None and recording.buffer_bytes == 2 * a.nbytes


def described(a: Tensor) -> Tensor:
    """a[1:], by TMA descriptors."""
    host_code.append("described")
    out = a.new_empty(a.shape)
    launch(add, (1,), Descriptor(a[1:], (5,)), None, Descriptor(out, (5,)), 5)
    return out


def test_descriptors_move_with_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MOST_ENCODED", 2)
    kept = []
    for _ in range(6):
        a = torch.randn(6)
        kept.append(a)
        out = replay(described, (a,), ())
        assert isinstance(out, Tensor) and torch.equal(out[:5], a[1:])
    assert len(host_code) == 1


def _filled(a: Tensor) -> Tensor:
    out = a.new_zeros(a.shape)
    launch(add, (1,), a, out, out, a.numel())
    return out


def _copied(a: Tensor) -> Tensor:
    out = a.new_empty(a.shape)
    launch(add, (1,), a.clone(), None, out, a.numel())
    return out


def _elsewhere(a: Tensor) -> Tensor:
    out = a.new_empty(a.shape)
    launch(add, (1,), a, ZEROS, out, a.numel())
    return out


def _given(a: Tensor) -> Tensor:
    launch(add, (1,), a, None, a, a.numel())
    return a


def _part(a: Tensor) -> Tensor:
    out = a.new_empty(2 * a.numel())
    launch(add, (1,), a, None, out, a.numel())
    return out[: a.numel()]


ZEROS = torch.zeros(4)


@pytest.mark.parametrize("run", [_filled, _copied, _elsewhere, _given, _part])
def test_what_launches_do_not_tell_is_not_recorded(run: Callable[..., Tensor]) -> None:
    """Work by operators of torch, memory that no argument holds, results that are views."""
    for _ in range(3):
        a = torch.randn(4)
        out = replay(run, (a,), ())
        assert isinstance(out, Tensor) and torch.equal(out, a)
    assert [*module._recordings.values()] == [None]


def test_no_launch_while_triton_interprets() -> None:
    interpreted = Kernel(_add, "a", "b", "out", "n")
    interpreted.__class__ = Interpreted

    def run(a: Tensor) -> Tensor:
        out = a.new_empty(a.shape)
        launch(interpreted, (1,), a, None, out, a.numel())
        return out

    a = torch.randn(4)
    assert torch.equal(replay(run, (a,), ()), a)
    assert [*module._recordings.values()] == [None]


class Interpreted(Kernel):
    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        launched = super().__getitem__(grid)
        return lambda *args, **named: [launched(*args, **named), None][1]


def test_an_error_of_the_host_code_is_raised_and_nothing_kept() -> None:
    def fails(a: Tensor) -> Tensor:
        raise ValueError("takes no such tensor")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such tensor"):
            replay(fails, (torch.randn(4),), ())
    assert not module._recordings
    called(torch.randn(4), None, 2.0)


def test_no_tensor_is_kept_alive() -> None:
    """Nor its memory, which views and descriptors of it would keep."""
    kinds = [(two_steps, torch.randn(4, 3), torch.randn(4, 3), 2.0), (described, torch.randn(6))]
    known = []
    while kinds:
        run, *given = kinds.pop()
        tensors = tuple(t for t in given if isinstance(t, Tensor))
        known += [weakref.ref(t.untyped_storage()) for t in tensors]
        out = replay(run, tensors, tuple(t for t in given if not isinstance(t, Tensor)))
        known.append(weakref.ref(out.untyped_storage()))
        del given, tensors, out
    gc.collect()
    assert [ref() for ref in known] == [None] * 5


def test_recordings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RECORDINGS", 3)
    for n in range(1, 9):
        called(torch.randn(n), torch.randn(n), 2.0)
        assert len(module._recordings) <= 3


def test_hooks_of_triton_see_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler's; only a tensor of a GPU repeats at all."""
    monkeypatch.undo()
    from triton import knobs

    on_gpu: Any = SimpleNamespace(is_cuda=True)
    assert module._repeats(on_gpu) and not module._repeats(torch.randn(1))
    hook = lambda metadata: None  # noqa: E731
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        try:
            assert not module._repeats(on_gpu)
        finally:
            chain.remove(hook)
    assert module._repeats(on_gpu)
