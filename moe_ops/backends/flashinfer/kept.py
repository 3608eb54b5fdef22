"""What FlashInfer's backends keep between calls: wrappers, sizes, what was tuned.

All of it is made at a first call that needs it, in any grad mode, and never while a CUDA graph is
captured: buffers made there would belong to the graph, and those made in inference mode could not
be written to outside of it. So the first run of what was made is outside of that mode too, and so
is all measuring: FlashInfer makes buffers there that it keeps. What one call needs is not kept, and
may be made in a capture.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from moe_ops.backends.flashinfer import package
from moe_ops.backends.flashinfer.options import FlashInferOptions, current

T = TypeVar("T")
MOST = 1024  # things of a kind that belong to no tensor


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """A context in which new tensors are plain ones, so that any mode may write to them later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Kept(Generic[T]):
    """Things by key. Of those made here that belong to no tensor, the ones made longest ago are
    dropped; graphs may read what belongs to one, so that it stays as long as the tensor."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.RLock()
        self._held: dict[Hashable, T] = {}
        self._loose: deque[Hashable] = deque()  # keys of what belongs to no tensor
        self.found = self._held.get  # what every call asks, without a lock

    def get(self, key: Hashable, make: Callable[[], T], of: Sequence[Tensor] = ()) -> T:
        """The thing of a key, made now if there is none. It is dropped with the first of the
        tensors that it is `of`, which it must not keep alive: it holds aliases
        (`moe_ops/registry/derived.py`).

        Raises RuntimeError if it would have to be made while a CUDA graph is captured.
        """
        found = self._held.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._held.get(key)
            if found is None:
                require_no_capture(self._what)
                with plainly():
                    found = make()
                self._held[key] = found
                if not of:
                    self._loose.append(key)
                if len(self._loose) > MOST:
                    self._held.pop(self._loose.popleft(), None)
                for t in of:
                    weakref.finalize(_owner(t), self._held.pop, key, None).atexit = False
            return found

    def similar(self, key: tuple[Hashable, ...]) -> T | None:
        """A thing whose key has the same parts but for the first, if there is one."""
        held = list(self._held.items())  # at once, as threads may add some meanwhile
        return next((t for k, t in held if isinstance(k, tuple) and k[1:] == key[1:]), None)

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
            self._loose.clear()


def _owner(t: Tensor) -> Tensor:
    """A tensor, or the one that it is a view of: which a caller keeps for longer than one call."""
    return t if t._base is None else t._base


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


def tokens_of(call_tokens: int, options: FlashInferOptions) -> int:
    """The tokens that buffers are made for: a power of two, or as the options say."""
    return max(1 << max(call_tokens - 1, 0).bit_length(), options.max_tokens)


_tuned: Kept[bool] = Kept("what autotune measured")


class Runs:
    """The runs of a function or wrapper of FlashInfer: the most tokens that one had so far. For
    more it may make buffers, which it keeps and writes to in later runs."""

    __slots__ = ("most",)

    def __init__(self) -> None:
        self.most = 0

    def around(
        self, tokens: int, measuring: contextlib.AbstractContextManager[None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """What goes around a run with so many tokens, which makes its results inside."""
        if measuring is None and tokens <= self.most:
            return AS_IT_IS
        return self._first(tokens, measuring or AS_IT_IS)

    @contextlib.contextmanager
    def _first(
        self, tokens: int, measuring: contextlib.AbstractContextManager[None]
    ) -> Iterator[None]:
        with plainly(), measuring:
            yield
        self.most = max(self.most, tokens)


AS_IT_IS = contextlib.nullcontext()


def tuning(
    key: Hashable, bucket: int | None = None
) -> contextlib.AbstractContextManager[None] | None:
    """What lets FlashInfer measure its tactics in a run, if options ask for it and the key is new;
    with a `bucket` for so many tokens alone, else for every number that it has in its tables."""
    if not current().autotune or capturing() or (key, bucket) in _tuned:
        return None
    return _measuring(key, bucket)


@contextlib.contextmanager
def _measuring(key: Hashable, bucket: int | None) -> Iterator[None]:
    measuring = package.call(
        package.found("flashinfer", "autotune"),
        True,
        cache=current().autotune_cache or None,
        tuning_buckets=None if bucket is None else (bucket,),
    )
    with measuring:
        yield
    _tuned.hold((key, bucket), True)
