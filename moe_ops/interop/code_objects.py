"""Functions with code objects of their own: Dynamo keeps few compiled variants of a code object,
whoever runs it."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

from torch import nn

from moe_ops.interop.hooks import has_hooks

Call = Callable[..., Any]

# The code object of a decorated forward, and ours in its place, which models of one class share.
_codes: WeakKeyDictionary[type, tuple[types.CodeType, types.CodeType]] = WeakKeyDictionary()


def with_own_code_object(function: Call, name: str) -> types.FunctionType:
    """The function with a code object of its own, which has this name."""
    assert isinstance(function, types.FunctionType)
    return _with_code(function, function.__code__.replace(co_name=name))


def with_globals(function: Call, given: Mapping[str, Any]) -> Call:
    """A copy of a function that finds these globals beside those of its module, which it finds as
    they are now. A decorated function is copied in copies of its decorators.

    Raises ValueError for a decorator that keeps it elsewhere than in its closure.
    """
    assert isinstance(function, types.FunctionType)
    inner = getattr(function, "__wrapped__", None)
    found, cells = function.__globals__, function.__closure__
    if inner is None:
        found = vars(_module_with(found["__name__"], tuple(given.items())))
    else:
        copied = with_globals(inner, given)
        cells = tuple(types.CellType(copied) if _holds(c, inner) else c for c in cells or ())
        if not any(_holds(cell, copied) for cell in cells):
            raise ValueError(f"{function.__qualname__} does not hold what it decorates")
    made = types.FunctionType(
        function.__code__, found, function.__name__, function.__defaults__, cells
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    if inner is None:
        del made.__wrapped__  # type: ignore[attr-defined]
    else:
        made.__wrapped__ = copied  # type: ignore[attr-defined]
    return made


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty
        return False


@functools.cache
def _module_with(name: str, given: tuple[tuple[str, Any], ...]) -> types.ModuleType:
    """A module like another, with other values for some of its names. It is imported, as Dynamo
    looks globals up by their module's name."""
    made = types.ModuleType(f"{name}_with_{id(given):x}")
    vars(made).update({**vars(sys.modules[name]), **dict(given), "__name__": made.__name__})
    sys.modules[made.__name__] = made
    return made


def compile_call(module: nn.Module, compile: Callable[[Call], Call]) -> Call:
    """`module._call_impl`, compiled by a code object of the module's class.

    Dynamo compiles the first function that is not of torch: `forward`. A decorator has one code
    object for all that it decorates, and transformers decorates the forwards of all its models, so
    that a few of them would use up what Dynamo allows one code object. From 2.14 on torch has one
    code object for all that its own decorators made, such as `no_grad`. Modules with hooks, and
    those whose `forward` was replaced since, are called as a whole, as torch does that.
    """
    whole = compile(module._call_impl)
    forward = type(module).forward
    if not _is_of_a_decorator(forward) or type(module)._call_impl is not nn.Module._call_impl:
        return whole
    alone = compile(_alone(module, forward))

    def call(*args: Any, **kwargs: Any) -> Any:
        is_there = getattr(module.forward, "__func__", None) is forward
        return (alone if is_there and not has_hooks(module) else whole)(*args, **kwargs)

    return call


def _is_of_a_decorator(forward: Call) -> TypeGuard[types.FunctionType]:
    """Whether a decorator made it."""
    return isinstance(forward, types.FunctionType) and hasattr(forward, "__wrapped__")


def _alone(module: nn.Module, forward: types.FunctionType) -> Call:
    """What runs a module's forward, by a code object of its class. Dynamo compiles no code of a
    decorator of torch, which looks like torch's own, so that a call of it is compiled instead."""
    if str(forward.__globals__["__name__"]).partition(".")[0] != "torch":
        code = _code_of(type(module), forward.__code__)
        return types.MethodType(_with_code(forward, code), module)

    def call(*args: Any, **kwargs: Any) -> Any:
        return module.forward(*args, **kwargs)

    assert isinstance(call, types.FunctionType)
    return _with_code(call, _code_of(type(module), call.__code__))


def _code_of(kind: type[nn.Module], code: types.CodeType) -> types.CodeType:
    known = _codes.get(kind)
    if known is None or known[0] is not code:
        known = _codes[kind] = code, code.replace(co_name=f"forward_of_{kind.__name__}")
    return known[1]


def _with_code(function: types.FunctionType, code: types.CodeType) -> types.FunctionType:
    made = types.FunctionType(
        code, function.__globals__, code.co_name, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def forward_of(module: nn.Module) -> Any:
    """The forward that a module's class defines, without what decorators put around it."""
    return inspect.unwrap(type(module).forward)


def names_in(function: Any) -> tuple[str, ...]:
    """The global names and attributes that a function's own code mentions."""
    return function.__code__.co_names if hasattr(function, "__code__") else ()
