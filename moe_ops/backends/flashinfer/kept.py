"""What FlashInfer's backends keep between calls: wrappers, workspaces, what was tuned.

All of it is made at a first call that needs it, in any grad mode, and never while a CUDA graph is
captured: buffers made there would belong to the graph, and those made in inference mode could not
be written to outside of it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moe_ops import arena
from moe_ops.backends.flashinfer import package
from moe_ops.backends.flashinfer.options import current

T = TypeVar("T")
MOST = 1024  # things of a kind: more than a model has layers


class Kept(Generic[T]):
    """Things by key, the ones used longest ago dropped."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.RLock()
        self._held: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The thing of a key, made now if there is none. Raises RuntimeError if that would happen
        while a CUDA graph is captured."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                require_no_capture(self._what)
                with torch.inference_mode(False), torch.no_grad():
                    found = self._held[key] = make()
            self._held.move_to_end(key)
            if len(self._held) > MOST:
                self._held.popitem(last=False)
            return found

    def hold(self, key: Hashable, thing: T) -> None:
        """Keep a thing that was made elsewhere."""
        with self._lock:
            self._held[key] = thing

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._held.clear()


def capturing() -> bool:
    """Whether a CUDA graph is captured on the current stream."""
    return _has_gpu() and torch.cuda.is_current_stream_capturing()


_has_gpu = functools.cache(torch.cuda.is_available)  # which takes microseconds


def require_no_capture(what: str) -> None:
    """Raise RuntimeError while a CUDA graph is captured."""
    if capturing():
        raise RuntimeError(
            f"{what} is made at a first call, which may not be in the capture of a CUDA graph; "
            "call the layer once with as many tokens before"
        )


def tokens_of(call_tokens: int) -> int:
    """The tokens that buffers are made for: a power of two, or as the options say."""
    return max(1 << max(call_tokens - 1, 0).bit_length(), current().max_tokens)


_captured: Kept[arena.Buffer] = Kept("a buffer")  # read by graphs, so never freed


def workspace(purpose: str, nbytes: int, device: torch.device) -> Tensor:
    """A buffer of bytes from the arena, for work that is queued while its lock is held."""
    buffer = arena.take(f"FlashInfer {purpose}", nbytes, device)
    if capturing():
        _captured.hold(buffer.memory.data_ptr(), buffer)
    return buffer.memory


_tuned: Kept[bool] = Kept("what autotune measured")


NOT_TUNING = contextlib.nullcontext()


def tuning(key: Hashable) -> contextlib.AbstractContextManager[None]:
    """Inside, FlashInfer measures its tactics, if options ask for it and the key is new."""
    if not current().autotune or capturing() or key in _tuned:
        return NOT_TUNING
    return _measuring(key)


@contextlib.contextmanager
def _measuring(key: Hashable) -> Iterator[None]:
    autotune = package.module("flashinfer").autotune
    with autotune(True, cache=current().autotune_cache or None):
        yield
    _tuned.hold(key, True)
