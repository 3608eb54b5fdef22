"""Buffers that are allocated when first needed, stay where they are, and are shared.

A buffer belongs to a device, a stream and a purpose. Its contents last until the next taker's work
on that stream, so that all layers, graphs and models of a stream share it. Threads of one stream
take turns by its lock.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes; buffers grow in these steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaUse:
    """What one purpose holds; `retired_bytes` are of smaller buffers that something, such as a
    captured graph, still refers to."""

    device: str
    stream: int
    purpose: str
    bytes: int
    retired_bytes: int


@dataclass(eq=False)  # without slots, as `trim` asks by weak references who has it
class Buffer:
    """A buffer for one purpose, and what `Arena.lock` gives of its stream. Once `retired` a larger
    one has taken its place; whoever holds it may go on using it, and frees it by letting it go."""

    memory: Tensor  # bytes
    lock: threading.RLock
    retired: bool = False

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first bytes as a contiguous tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.memory[:nbytes].view(dtype).view(shape)


Key = tuple[torch.device, int, str]


class Arena:
    """Buffers by device, stream and purpose."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: dict[Key, Buffer] = {}
        self._retired: dict[Key, list[weakref.ref[Tensor]]] = {}
        self._users: dict[tuple[torch.device, int], threading.RLock] = {}

    def take(self, purpose: str, nbytes: int, device: torch.device) -> Buffer:
        """The buffer of `purpose` on the current stream, of at least `nbytes` bytes.

        It holds whatever its last user left. A buffer that is too small is retired and replaced,
        never moved or freed under its users. Ask for the largest size first, as each growth makes
        those who hold the old one capture again.

        Raises RuntimeError if it has to grow while a CUDA graph is captured.
        """
        stream = current_stream(device)
        key = (device, stream, purpose)
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is not None and buffer.memory.nbytes >= nbytes:
                return buffer
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                held = 0 if buffer is None else buffer.memory.nbytes
                raise RuntimeError(
                    f"the buffer for {purpose!r} has {held} bytes and needs {nbytes}, and cannot "
                    "grow while a CUDA graph is captured; run the largest size once before the "
                    "capture"
                )
            size = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
            with torch.inference_mode(False):  # to be written in any mode later
                memory = torch.empty(size, dtype=torch.uint8, device=device)
            new = Buffer(memory, self._user(device, stream))
            if buffer is not None:
                buffer.retired = True
                self._retired.setdefault(key, []).append(weakref.ref(buffer.memory))
            self._buffers[key] = new
            return new

    def lock(self, device: torch.device) -> threading.RLock:
        """What a thread holds while it needs the contents of buffers of the current stream.

        Threads may share a stream, as they do the default one.
        """
        with self._lock:
            return self._user(device, current_stream(device))

    def _user(self, device: torch.device, stream: int) -> threading.RLock:
        return self._users.setdefault((device, stream), threading.RLock())

    def report(self) -> list[ArenaUse]:
        """The bytes held for each purpose."""
        with self._lock:
            return [
                ArenaUse(
                    device=str(key[0]),
                    stream=key[1],
                    purpose=key[2],
                    bytes=buffer.memory.nbytes,
                    retired_bytes=self._alive(key),
                )
                for key, buffer in self._buffers.items()
            ]

    def release(self) -> None:
        """Retire every buffer: what nobody holds is freed."""
        with self._lock:
            for buffer in self._buffers.values():
                buffer.retired = True
            self._buffers.clear()
            self._retired.clear()

    def trim(self) -> int:
        """Free the buffers that nobody has, neither a graph nor a call, and return their bytes."""
        with self._lock:
            held = sum(buffer.memory.nbytes for buffer in self._buffers.values())
            known = {key: weakref.ref(buffer) for key, buffer in self._buffers.items()}
            self._buffers.clear()
            alive = ((key, ref()) for key, ref in known.items())
            self._buffers = {key: buffer for key, buffer in alive if buffer is not None}
            return held - sum(buffer.memory.nbytes for buffer in self._buffers.values())

    def _alive(self, key: Key) -> int:
        tensors = (ref() for ref in self._retired.get(key, ()))
        return sum(t.nbytes for t in tensors if t is not None)


def current_stream(device: torch.device) -> int:
    """The id of the stream on which work for a device is queued now."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    # What `torch.cuda.current_stream` makes an object of, which takes a microsecond.
    return int(torch._C._cuda_getCurrentStream(index)[0])


shared = Arena()
take, report, release = shared.take, shared.report, shared.release
