"""A module's call, compiled as a whole wherever its code is, and a word where nothing of it was.

Dynamo looks at each Python function that a compiled call enters and leaves those of torch to
Python. A module whose forward is torch's own, such as nn.Sequential, has no other function around
what it computes.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch._dynamo import config, eval_frame, trace_rules
from torch._dynamo.utils import counters
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from moe_ops.interop.code_objects import compile_call, with_own_code_object

log = logging.getLogger("moe_ops")

Call = Callable[..., Any]

# Stances of torch.compiler.set_stance under which every call runs as it was, or some may.
EAGER = frozenset({"force_eager"})
MAYBE_EAGER = EAGER | {"eager_on_recompile", "eager_then_compile"}
OFF = (
    "torch.compile is off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance or "
    "torch._dynamo.config.disable); turn it on"
)
KEPT = (
    "Dynamo found nothing in it that it compiles, as torch.compiler.disable, TorchScript or what "
    "ends a graph is around all of it; take that out (TORCH_LOGS=graph_breaks,dynamo names it)"
)
LIMIT = (
    "Dynamo has compiled it as often as torch._dynamo.config allows, and this call is for none of "
    "these graphs; let fewer things vary from call to call, or raise that limit, and then call "
    "torch._dynamo.reset() and compile again"
)

# What calls a module whose forward Dynamo does not look at. Modules of like parts share one, and
# with it their graphs.
_around: WeakValueDictionary[Any, FunctionType] = WeakValueDictionary()

# The functions that Dynamo began with where it compiled something, by the class of what was called;
# and those at its limit, which Dynamo looks at no more. Code objects would be equal if alike.
_begun: WeakKeyDictionary[type, WeakSet[FunctionType]] = WeakKeyDictionary()
_at_limit: WeakSet[FunctionType] = WeakSet()


class Watch:
    """Calls compiled code, and tells once, at WARNING, if Dynamo compiled nothing of it.

    What is `needed_for`, such as the option batch_invariant, must not run uncompiled: then that is
    a RuntimeError, each time, and so is a call at Dynamo's limit of graphs. `made` counts the
    graphs that the backend was given. Code without an op has no graph, and there is nothing to tell
    of it.
    """

    def __init__(self, name: str, made: Callable[[], int], needed_for: str = "") -> None:
        self._name, self._made, self._needed_for = name, made, needed_for
        self._settled: FunctionType | None = None
        self._has_told = self._is_at_limit = False

    def __call__(
        self, run: Call, kind: type, first: FunctionType, /, *args: Any, **kwargs: Any
    ) -> Any:
        """What `run` gives, a compiled call of this class that Dynamo begins with this function."""
        if self._settled is first and not self._needed_for:
            return run(*args, **kwargs)
        is_settled, limits = self._settled is first, _heard.limits
        before = (0, 0, 0) if is_settled else (self._made(), *_frames())
        out = run(*args, **kwargs)
        if _heard.limits > limits:
            _at_limit.add(first)
            self._is_at_limit = True
        if self._needed_for and _is_off(MAYBE_EAGER):
            self._tell(OFF)
        elif self._needed_for and self._is_at_limit:
            self._tell(LIMIT)
        elif not is_settled:
            self._look(kind, first, before)
        return out

    def _look(self, kind: type, first: FunctionType, before: tuple[int, int, int]) -> None:
        made, (ok, breaks) = before[0], before[1:]
        now, begun = _frames(), _begun.setdefault(kind, WeakSet())
        if self._made() > made or (now[0] > ok and now[1] == breaks):
            begun.add(first)
            self._settled = first
        elif _is_off(EAGER):
            self._tell(OFF)
        elif first in begun and first not in _at_limit:
            self._settled = first  # an equal backend has compiled it, whose graphs Dynamo takes
        elif first in begun:
            self._tell(LIMIT)
        else:
            self._tell(OFF if _is_off(MAYBE_EAGER) else KEPT)

    def _tell(self, reason: str) -> None:
        if self._needed_for:
            raise RuntimeError(
                f"{self._needed_for}: a call of {self._name} ran uncompiled: {reason}"
            )
        if not self._has_told:
            self._has_told = True
            log.warning("%s runs uncompiled, which is slower: %s", self._name, reason)


def compile_watched(function: Call, compile: Callable[[Call], Call], watch: Watch) -> Call:
    """A function, compiled and watched."""
    _listen()
    assert isinstance(function, FunctionType)
    run = compile(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return watch(run, FunctionType, function, *args, **kwargs)

    return call


def compile_whole(module: nn.Module, compile: Callable[[Call], Call], watch: Watch) -> Call:
    """`module._call_impl`, compiled and watched. Dynamo begins with the module's forward, by
    `compile_call`, or with a function of ours around the call where it does not look at that
    forward, as `torch.compile(module)` does: hooks are then in the graph."""
    _listen()
    of_forward = compile_call(module, compile)
    first = _First(module)

    @functools.cache
    def around() -> tuple[FunctionType, Call]:
        function = _function_around(module)
        return function, compile(MethodType(function, module))

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # inside a larger graph, where no function is the first
            return of_forward(*args, **kwargs)
        function = first()
        if function is None:
            if isinstance(module, LazyModuleMixin) and hasattr(module, "_initialize_hook"):
                module._infer_parameters(module, args, kwargs)  # a hook that Dynamo does not trace
            function, of_call = around()
            return watch(of_call, type(module), function, *args, **kwargs)
        return watch(of_forward, type(module), function, *args, **kwargs)

    return call


class _First:
    """The function that Dynamo begins with in a call of a module; None where it looks at none."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: Any = self  # no function
        self._first: FunctionType | None = None

    def __call__(self) -> FunctionType | None:
        forward = self._module.forward
        function = getattr(forward, "__func__", forward)
        if function is not self._known:  # it was replaced
            own = type(self._module)._call_impl
            is_torch = own is nn.Module._call_impl
            self._known, self._first = function, None if is_torch else _traced(own)
            self._first = self._first or _traced(function)
        return self._first


def _traced(function: Any) -> FunctionType | None:
    """The function that Dynamo begins with in a call of anything; None where it looks at none. What
    decorators of torch, which Dynamo skips, are around is called by them."""
    while True:
        if isinstance(function, MethodType):
            function = function.__func__
        elif isinstance(function, functools.partial):
            function = function.func
        elif not isinstance(function, FunctionType):
            function = inspect.getattr_static(type(function), "__call__", None)
            if not isinstance(function, FunctionType):  # C has no code that Dynamo sees
                return None
        elif not trace_rules.check(function):
            return function
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return None


def _function_around(module: nn.Module) -> FunctionType:
    parts = tuple(type(part) for part in module.modules())
    sizes = tuple(None if is_lazy(t) else (t.shape, t.dtype, t.device) for t in module.parameters())
    found = _around.get((parts, sizes))
    if found is None:
        name = f"forward_of_{type(module).__name__}"
        found = _around[parts, sizes] = with_own_code_object(_call_module, name)
    return found


def _call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self._call_impl(*args, **kwargs)


class _Heard(threading.local):
    """How often Dynamo came to its limit of graphs, in this thread."""

    limits = 0


_heard = _Heard()


class _Ear(logging.Handler):
    """Hears that from Dynamo's own warning, which is all that tells it."""

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("torch._dynamo hit config."):
            _heard.limits += 1


def _listen() -> None:
    dynamo = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(handler, _Ear) for handler in dynamo.handlers):
        dynamo.addHandler(_Ear(logging.WARNING))


def _frames() -> tuple[int, int]:
    """How many functions Dynamo has traced, and where it ended a graph ahead of their end."""
    return counters["frames"]["ok"], sum(counters["graph_break"].values())


def _is_off(stances: frozenset[str]) -> bool:
    return config.disable or eval_frame._stance.stance in stances
