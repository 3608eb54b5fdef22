"""Errors that came from outside: a signal handler of the caller's raises in the middle of whatever
runs. They are nobody's failure here, so code that lives with a failure lets them through."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, TracebackType
from typing import Any

# What runs while a graph is compiled: torch, what its compiler is made of, and ours.
COMPILERS = frozenset(sys.stdlib_module_names) | {
    *("torch", "functorch", "triton", "sympy", "mpmath", "numpy", "jinja2", "filelock", "cutlass"),
    *("depyf", __name__.partition(".")[0]),
}


def let_through(error: BaseException, *, compiling: bool = False) -> None:
    """Raise what interrupted the code that an error came out of; return if nothing did.

    A TimeoutError did, and what a function raised that handles a signal by now. While `compiling`
    no code of others runs, so all that code outside of `COMPILERS` raised did, too. A library may
    have raised the error from that one, or in place of it: what is raised here is the first.
    """
    first = None
    for link in _chain(error):
        if _is_from_outside(link, compiling):
            first = link
    if first is not None:
        context = first.__context__
        try:
            raise first
        finally:
            first.__context__ = context  # not what was made of it, which is being handled here


def call_compiled(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call code that torch.compile may have to compile first. What interrupts that is raised as it
    is, and not as the failure that Dynamo makes of it."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException

        if isinstance(error, TorchDynamoException):
            let_through(error, compiling=isinstance(error, BackendCompilerFailed))
        raise


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from or while they were handled."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_from_outside(error: BaseException, compiling: bool) -> bool:
    modules, codes = _frames(error.__traceback__)
    if not modules or not _is_of_compilers(modules[0]):
        return False  # it was caught outside: the caller was handling it while it called us
    if isinstance(error, TimeoutError) or codes & _handlers():
        return True
    return compiling and not all(map(_is_of_compilers, [*modules, type(error).__module__]))


def _frames(trace: TracebackType | None) -> tuple[list[str], set[CodeType]]:
    """The modules and the code that an error came through, the one that caught it first."""
    modules, codes = [], set()
    while trace is not None:
        modules.append(str(trace.tb_frame.f_globals.get("__name__", "")))
        codes.add(trace.tb_frame.f_code)
        trace = trace.tb_next
    return modules, codes


def _is_of_compilers(module: str) -> bool:
    return not module or module.partition(".")[0] in COMPILERS  # generated code may have no name


def _handlers() -> set[CodeType]:
    """The code of the functions that handle signals by now."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if callable(handler):
            function = handler if hasattr(handler, "__code__") else type(handler).__call__
            found.add(getattr(function, "__code__", None))
    return {code for code in found if code is not None}
