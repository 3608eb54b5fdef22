"""Backends of other packages: found by entry points, and loaded when backends are first asked for.

An entry point of the group `moe_ops.backends` names a module, whose import registers backends, or a
function that does so when it is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from types import ModuleType

import torch
from torch.utils._python_dispatch import _disable_current_modes

GROUP = "moe_ops.backends"
log = logging.getLogger("moe_ops")

_lock = RLock()
_waiting: list[EntryPoint] | None = None  # None: nobody has looked yet
# What undoes the registrations of the package that is being loaded; None while none is.
_undo: ContextVar[list[Callable[[], None]] | None] = ContextVar("moe_ops_outside", default=None)


def load() -> None:
    """Load the backends of all installed packages, once. One that raises is logged and left out,
    with whatever it had registered by then."""
    global _waiting
    if _waiting == [] or _undo.get() is not None:  # also asked by a package that is being loaded
        return
    with _lock:
        if _waiting is None:
            _waiting = sorted(
                entry_points(group=GROUP), key=lambda point: (point.name, point.value)
            )
        while _waiting:
            _load(_waiting[0])
            _waiting.pop(0)  # only now, so that an interrupt leaves none out


def registered(undo: Callable[[], None]) -> None:
    """Say how to undo a registration, in case the package that made it cannot be loaded."""
    undone = _undo.get()
    if undone is not None:
        undone.append(undo)


def _load(point: EntryPoint) -> None:
    undo: list[Callable[[], None]] = []
    token = _undo.set(undo)
    try:
        with _as_if_alone():
            found = point.load()
            if callable(found):
                found()
            elif not isinstance(found, ModuleType):
                raise TypeError(
                    f"it must name a module or a function, not a {type(found).__name__}"
                )
    except BaseException as error:  # whatever code of others raises
        for back in reversed(undo):
            back()
        if not isinstance(error, Exception):
            raise
        package = "a package without a name" if point.dist is None else point.dist.name
        log.warning(
            "the entry point %r of %s in %s is left out, as it raised %s: %s",
            f"{point.name} = {point.value}", GROUP, package, type(error).__name__, error,
        )  # fmt: skip
    finally:
        _undo.reset(token)


@contextmanager
def _as_if_alone() -> Iterator[None]:
    """Let a module that is imported make tensors like any other, whoever asks: a compiler with
    tensors that have no memory, or a call in inference mode."""
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        yield
