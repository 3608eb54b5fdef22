"""Compile what calls would launch, all at once, by threads, and run nothing.

Triton compiles a variant of a kernel where it is first launched. Constants, the types of arguments
and whether 16 divides them tell variants apart, and calls on shadows (`shadows.py`) tell which they
ask for. Most of a compilation is outside Python, so that threads share the processors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor import config
from triton import AsyncCompileMode, FutureKernel, knobs
from triton.compiler import CompiledKernel

from moe_ops.interop.interrupts import let_through
from moe_ops.kernels.triton.recorded import Address
from moe_ops.kernels.triton.replay import launches_go_to
from moe_ops.kernels.triton.shadows import Shadow, Shadows

log = logging.getLogger("moe_ops")


@dataclass(frozen=True, slots=True)
class Collected:
    """Launches that are not made: kernels with their arguments."""

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        self.launches.append((kernel, tuple(map(_typed, args)), options))


def collected(calls: Iterable[Callable[[], object]]) -> Collected:
    """What calls on shadows launch, by `launch` of `replay.py`. One that raises would do so where
    it is made: what it launched before is kept."""
    found = Collected()
    with launches_go_to(found), Shadows():
        for call in calls:
            try:
                call()
            except Exception as error:
                let_through(error)
                log.info("a call is not compiled ahead: %s: %s", type(error).__name__, error)
    return found


def compiles() -> bool:
    """Whether Triton compiles kernels, and does not interpret them."""
    return not knobs.runtime.interpret


def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
    """Compile for the current device what calls on shadows launch, and load it; those that come
    first are begun first. A launch of what does not compile raises what it raised without this."""
    if not compiles():
        return
    launches = collected(calls).launches
    pool = ThreadPoolExecutor(config.compile_threads, "moe_ops compiles")
    try:
        with AsyncCompileMode(pool, ignore_errors=True):
            made = [
                kernel.warmup(*args, grid=(1,), **options) for kernel, args, options in launches
            ]
        if torch.cuda.is_available():
            device = torch.cuda.current_device()
            wait([pool.submit(_load, kernel, device) for kernel in _compiled(made)])
    finally:
        pool.shutdown(wait=False)  # what interrupts has not to wait for what was begun


def _compiled(made: Iterable[Any]) -> list[CompiledKernel]:
    """The kernels that a launch found or began, each once, without those that do not compile."""
    kernels = [x.kernel if isinstance(x, FutureKernel) else x for x in made]
    return [*{id(k): k for k in kernels if isinstance(k, CompiledKernel)}.values()]


def _load(kernel: CompiledKernel, device: int) -> None:
    """Load a kernel as its first launch does, for which older versions of Triton also have a C
    compiler make a function for its arguments. One that does not fit raises there, again."""
    with torch.cuda.device(device):
        kernel.run  # noqa: B018 (a property that loads)


def _typed(value: Any) -> Any:
    """What Triton asks of an argument."""
    return Address(value.data_ptr(), value.dtype) if isinstance(value, Shadow) else value
