"""Repeat the launches of an op without the host code that led to them.

A launch through Triton takes 20 to 40 microseconds of the host, and choosing tiles and allocating
what lies between launches as much again: a compiled forward of few tokens waits for that, layer by
layer. So the first call of a kind is recorded, and calls like it fill in the addresses of their
tensors and launch.

Two calls are alike if all that the host code can read is: the shapes, strides, dtypes and device of
the tensors, whether their addresses are multiples of 16, and the arguments that are no tensors. It
must not read values, and may launch only by `launch`: a call that does anything else on the device
is not recorded, nor is one whose tensors cannot be told apart by their addresses. Such calls run as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import driver

from moe_ops.kernels.triton.first_use import tell_of_first_compilation
from moe_ops.kernels.triton.lifetimes import Life, offsets
from moe_ops.kernels.triton.loading import load_one_at_a_time
from moe_ops.kernels.triton.recorded import Launch, Place, recorded
from moe_ops.kernels.triton.shadows import Shadow

Tensors = tuple[Tensor | None, ...]
R = TypeVar("R", bound=Tensor | tuple[Tensor, ...])
T = TypeVar("T")

MOST_RECORDINGS = 4096
_ALLOCATIONS = (
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
)


class Watcher(Protocol):
    """What is given launches in place of Triton."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None: ...


_watcher: ContextVar[Watcher | None] = ContextVar("moe_ops_watcher", default=None)
_recordings: dict[Hashable, _Recording | None] = {}


tell_of_first_compilation()
load_one_at_a_time()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel, or give the launch to who watches. Parameters need no defaults.

    Products and sums are one instruction, whatever is Triton's default: from 3.10 on it is two.
    """
    options["enable_fp_fusion"] = True
    watcher = _watcher.get()
    if watcher is None:
        kernel[grid](*args, **options)
    else:
        watcher.launch(kernel, grid, args, options)


@contextmanager
def launches_go_to(watcher: Watcher) -> Iterator[None]:
    """A context whose launches are a watcher's to make."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def replay(
    run: Callable[..., R],
    tensors: Tensors,
    rest: tuple[Hashable, ...],
    before: Callable[[], None] | None = None,
) -> R:
    """`run(*tensors, *rest)`; after the first call like this one, its launches alone.

    The first tensor tells the device, which is the current one while `run` runs, and while `before`
    does, which is called ahead of the first call. Raises what they raise.
    """
    first = tensors[0]
    assert first is not None
    if not _repeats(first):
        return run(*tensors, *rest)
    device = first.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return replay(run, tensors, rest, before)
    key = (run, rest, device, *[t if t is None else _kind(t) for t in tensors])
    recording = _recordings.get(key)
    if recording is not None:
        again: R = recording.run([0 if t is None else t.data_ptr() for t in tensors])
        return again
    known = key in _recordings
    if before is not None and not known:
        before()
    if known or _watcher.get() is not None or _shared(tensors):
        return run(*tensors, *rest)
    if len(_recordings) >= MOST_RECORDINGS:
        _recordings.clear()
    result, _recordings[key] = _record(run, tensors, rest)
    return result


def _repeats(t: Tensor) -> bool:
    """Whether launches on the device of a tensor can be repeated; not if Triton's hooks, by which a
    profiler watches, would miss them."""
    hooks = knobs.runtime
    if isinstance(t, Shadow):
        return False
    return t.is_cuda and not hooks.launch_enter_hook.calls and not hooks.launch_exit_hook.calls


def _shared(tensors: Tensors) -> bool:
    """Whether two of the tensors begin at one address, so that it does not tell which is meant."""
    addresses = [t.data_ptr() for t in tensors if t is not None]
    return len(set(addresses)) < len(addresses)


def _kind(t: Tensor) -> Hashable:
    return t.shape, t.stride(), t.dtype, t.data_ptr() % 16


@dataclass(slots=True, kw_only=True)
class _Recording:
    """The launches of a call. Its bases are the addresses of its tensors, of its results and of a
    buffer for all else that it allocates, in which tensors lie by their lives."""

    launches: list[Launch]
    device: torch.device
    results: list[tuple[tuple[int, ...], torch.dtype]]
    single: bool
    buffer_bytes: int
    stream_of: Callable[[int], int]

    def run(self, bases: list[int]) -> Any:
        """The results for tensors at these addresses, 0 for none."""
        device = self.device
        results = [torch.empty(s, dtype=dtype, device=device) for s, dtype in self.results]
        bases += [t.data_ptr() for t in results]
        if self.buffer_bytes:
            buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=device)
            bases.append(buffer.data_ptr())
        stream = self.stream_of(device.index)
        for launch in self.launches:
            launch.run(bases, stream)
        return results[0] if self.single else tuple(results)


class _Recorder(TorchDispatchMode):
    """Sees what a call allocates and launches, and whether it does anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.noted: list[tuple[Any, tuple[int, ...], list[Any]]] = []
        self.whole = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.made.append(out)
        elif not func.is_view:
            self.whole = False
        return out

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        compiled = kernel[grid](*args, **options)
        self.whole = self.whole and compiled is not None
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        self.noted.append((compiled, grid, [given[name] for name in kernel.arg_names]))


def _record(
    run: Callable[..., R], tensors: Tensors, rest: tuple[Hashable, ...]
) -> tuple[R, _Recording | None]:
    """The result of a call, and how to repeat it, or None if it cannot be recorded."""
    recorder = _Recorder()
    with launches_go_to(recorder), recorder:
        result = run(*tensors, *rest)
    results = [result] if isinstance(result, Tensor) else list(result)
    made = {(t.data_ptr(), tuple(t.shape)) for t in recorder.made if t.is_contiguous()}
    if not recorder.whole or any((t.data_ptr(), tuple(t.shape)) not in made for t in results):
        return result, None
    first = tensors[0]
    assert first is not None
    try:
        bases = _Bases(tensors, results, recorder)
        launches = [recorded(*noted, bases.place) for noted in recorder.noted]
    except _Unclear:
        return result, None
    return result, _Recording(
        launches=launches,
        device=first.device,
        results=[(tuple(t.shape), t.dtype) for t in results],
        single=isinstance(result, Tensor),
        buffer_bytes=bases.buffer_bytes,
        stream_of=driver.active.get_current_stream,
    )


class _Unclear(Exception):
    """An address lies in none of a call's tensors, or in more than one."""


class _Bases:
    """Tells to which tensor of a call an address belongs."""

    def __init__(self, tensors: Tensors, results: Sequence[Tensor], recorder: _Recorder) -> None:
        # Begin, end, place of the begin.
        self._spans: list[tuple[int, int, Place]] = []
        for index, t in enumerate((*tensors, *results)):
            if t is not None and t.numel():
                self._put(t, (index, 0))
        known = {t.data_ptr() for t in results}
        others = [t for t in recorder.made if t.numel() and t.data_ptr() not in known]
        at, self.buffer_bytes = offsets(_lives(others, recorder))
        for t, offset in zip(others, at, strict=True):
            self._put(t, (len(tensors) + len(results), offset))

    def _put(self, t: Tensor, place: Place) -> None:
        begin = t.data_ptr()
        self._spans.append((begin, begin + _bytes(t), place))

    def place(self, address: int) -> Place:
        begin, _, (base, offset) = _one_at(address, self._spans)
        return base, offset + address - begin


def _lives(made: Sequence[Tensor], recorder: _Recorder) -> list[Life]:
    """From the first to the last launch that is given an address in each of these tensors."""
    spans = [(t.data_ptr(), t.data_ptr() + _bytes(t), i) for i, t in enumerate(made)]
    launches: list[list[int]] = [[] for _ in made]
    for launch, (_, _, args) in enumerate(recorder.noted):
        for value in args:
            t = getattr(value, "base", value)  # of a TMA descriptor
            if isinstance(t, Tensor) and any(b <= t.data_ptr() < e for b, e, _ in spans):
                launches[_one_at(t.data_ptr(), spans)[2]].append(launch)
    return [
        Life(nbytes=_bytes(t), first=min(of, default=0), last=max(of, default=0))
        for t, of in zip(made, launches, strict=True)
    ]


def _one_at(address: int, spans: Sequence[tuple[int, int, T]]) -> tuple[int, int, T]:
    """The one span that begins at an address or, without any, holds it. Raises _Unclear."""
    found = [s for s in spans if s[0] == address]
    found = found or [s for s in spans if s[0] <= address < s[1]]
    if len(found) != 1:
        raise _Unclear
    return found[0]


def _bytes(t: Tensor) -> int:
    """The bytes from the first element of a tensor to the end of its last."""
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()
