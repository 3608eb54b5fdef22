"""Layers with a recurrence over many tokens that transformers computes by loops in Python.

A compiler unrolls such a loop, into other code for each number of chunks. So the module with the
loop runs uncompiled, and what is beside it in its layer through a region of its own.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
from types import CodeType
from typing import Any

from torch import nn

from moe_ops.forward.regions import Region, call_module, decoder_layers
from moe_ops.interop.code_objects import forward_of, names_in

STATE = "update_recurrent_state"  # what a module with such a loop calls of its cache


class AroundLoops:
    """A region in which modules with loops, and those that they are in, run from Python."""

    def __init__(self, region: Region, divided: dict[nn.Module, nn.Module]) -> None:
        self._region = region
        self._divided = divided

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        divided = self._divided.get(module)
        if divided is None:
            return self._region(module, *args, **kwargs)
        return call_module(divided, *args, **kwargs)


def around_loops(model: nn.Module, region: Region) -> Region:
    """The region for the layers of a model; the one given, if none of them has loops."""
    layers = model.get_submodule(decoder_layers(model)).children()
    divided = {layer: _divided(layer, region) for layer in layers if _loops_inside(layer)}
    return AroundLoops(region, divided) if divided else region


def _loops(module: nn.Module) -> bool:
    """Whether a function that loops computes a state that a module keeps. Functions of ours, which
    may stand in place of one that does, do not."""
    forward = forward_of(module)
    names = names_in(forward)
    if STATE not in names:
        return False
    called = [f for name in names if inspect.isfunction(f := forward.__globals__.get(name))]
    return any(not _is_ours(f) and _has_loop(inspect.unwrap(f).__code__) for f in called)


def _is_ours(function: Any) -> bool:
    name: str = function.__globals__["__name__"]
    return name.startswith("moe_ops.")


def _has_loop(code: CodeType) -> bool:
    inside = (part for part in code.co_consts if isinstance(part, CodeType))
    own = any(step.opname == "FOR_ITER" for step in dis.get_instructions(code))
    return own or any(map(_has_loop, inside))


def _loops_inside(module: nn.Module) -> bool:
    return any(map(_loops, module.modules()))


def _divided(module: nn.Module, region: Region) -> nn.Module:
    """A copy of a module with loops inside, which runs what else is in it through the region."""
    if _loops(module):
        return module
    divided = copy.copy(module)
    divided._modules = {
        name: child and (_divided if _loops_inside(child) else _through)(child, region)
        for name, child in module._modules.items()
    }
    return divided


def _through(module: nn.Module, region: Region) -> nn.Module:
    routed = copy.copy(module)
    routed._compiled_call_impl = functools.partial(region, module)
    return routed
