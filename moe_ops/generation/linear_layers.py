"""Layers of transformers whose linear attention, state spaces and convolutions are ours where
these compute what the functions do that the layer calls by the names in its file; and indexers
whose pools are, or that get whole blocks."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.forward.kept import Stepping
from moe_ops.generation import blocks, pools
from moe_ops.generation.linear_samples import KINDS, Kind, agree, parameters_of
from moe_ops.interop.code_objects import with_globals
from moe_ops.interop.subclass import CopiedAsItWas, subclass

log = logging.getLogger("moe_ops")

Function = Callable[..., Any]
# What tells sequences apart that are packed into one; without a package transformers refuses it.
PACKED = ("cu_seqlens", "seq_idx")


class WithOurFunctions(CopiedAsItWas):
    """What stands before the class of a layer whose methods call our functions."""


class WithAllPools(WithOurFunctions):
    """What stands before the class of an indexer whose pools are ours where a compiler reads it."""

    def get_pooled_states(self, packed_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return pools.all_pools(self, packed_states)
        own: tuple[Tensor, Tensor, Tensor] = super().get_pooled_states(packed_states)  # type: ignore[misc]
        return own


class WithWholeBlocks(WithOurFunctions):
    """What stands before the class of an indexer that gets whole blocks where a compiler reads it.
    In steps it is the number of slots that says whether they are whole, which is the same in all.
    """

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, cache: Any, position_ids: Tensor
    ) -> Any:
        if torch.compiler.is_compiling() and not isinstance(cache, Stepping):
            cache = blocks.WholeBlocks(cache, self.block_size)  # type: ignore[attr-defined]
        return super().forward(hidden_states, position_embeddings, cache, position_ids)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Indexers:
    """Classes that have a method of the name `known_by`: what stands before those of which it
    `computes` the same, and the method that it changes."""

    known_by: str
    before: type
    changes: str
    computes: Callable[[Any], bool]


INDEXERS = (
    Indexers(pools.METHOD, WithAllPools, pools.METHOD, pools.drops_pools),
    Indexers(blocks.METHOD, WithWholeBlocks, "forward", blocks.fills_blocks),
)


def give_ours(twin: nn.Module, model: nn.Module) -> None:
    """Have the layers of a model's twin call our functions while they are compiled; uncompiled, and
    where a gradient may be wanted, they call their own. What is not understood stays as it is, with
    a logged reason."""
    own = {id(module) for module in model.modules()}  # some cannot be twinned, and are shared
    told: set[str] = set()
    for module in twin.modules():
        kind: Any = type(module)
        if id(module) in own or issubclass(kind, WithOurFunctions):
            continue
        indexers = [x for x in INDEXERS if x.known_by in methods_of(kind)]
        ours_of = next((x for x in indexers if x.computes(kind)), None)
        if ours_of is not None:
            module.__class__ = subclass(ours_of.before, kind)
            continue
        found = {name: in_place_of(function) for name, function in functions_of(kind).items()}
        left = {name for name, made in found.items() if made is None}
        left |= {x.changes for x in indexers}
        for name in left - told:
            told.add(name)
            text = "%s keeps its %s: ours is not known to compute the same"
            log.info(text, kind.__name__, name)
        ours = frozenset((name, made) for name, made in found.items() if made is not None)
        try:
            module.__class__ = with_functions(kind, ours) if ours else kind
        except ValueError as error:
            log.info("%s keeps its functions: %s", kind.__name__, error)


@functools.cache
def functions_of(kind: Any) -> dict[str, Function]:
    """The functions with the parameters of one of ours that the methods of a class call, by the
    names that these have in its file."""
    found = {}
    for method in methods_of(kind).values():
        for name, function in _called_by(method).items():
            if kind_of(function) is not None:
                found[name] = function
    return found


def methods_of(kind: type[nn.Module]) -> dict[str, Function]:
    """The methods of a class that are not those of every module."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    named = {name: value for parent in reversed(own) for name, value in vars(parent).items()}
    return {name: value for name, value in named.items() if inspect.isfunction(value)}


def _called_by(method: Function) -> dict[str, Function]:
    """The functions among the globals that a method, without its decorators, mentions."""
    function = inspect.unwrap(method)
    if not inspect.isfunction(function):
        return {}
    named = {n: function.__globals__.get(n) for n in function.__code__.co_names}
    return {n: f for n, f in named.items() if inspect.isfunction(f) or isinstance(f, nn.Module)}


def kind_of(function: Function) -> Kind | None:
    """The kind of function whose parameters one has."""
    if isinstance(function, nn.Module):
        return KINDS.get(parameters_of(type(function).forward)[1:])
    return KINDS.get(parameters_of(function))


def plain(function: Function) -> Function | None:
    """What a function of transformers was before it was decorated to be replaced, by a package's or
    one of the hub; None where that is not to be found, or another was already put in its place."""
    if isinstance(function, nn.Module):  # as the package `kernels` has functions
        held = [cell.cell_contents for cell in type(function).forward.__closure__ or ()]
        found = [value for value in held if inspect.isfunction(value)]
        if "forward" in vars(function) or len(found) != 1:
            return None
        (function,) = found
    return inspect.unwrap(function)


def in_place_of(function: Function) -> Function | None:
    """A function that computes by ours what one of transformers does, where a compiler reads it;
    None if it is not known to compute the same."""
    own = plain(function)
    return None if own is None else _in_place_of(function, own)


@functools.cache
def _in_place_of(function: Function, own: Function) -> Function | None:
    kind = kind_of(function)
    if kind is None or not agree(own, kind):
        return None
    ours = kind.ours

    @functools.wraps(own)
    def ours_or_own(*args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        if compiling and all(kwargs.get(name) is None for name in PACKED):
            out = ours(*args, **kwargs)
            if out is not None:
                return out
        return function(*args, **kwargs)

    return ours_or_own


@functools.cache
def with_functions(kind: Any, ours: frozenset[tuple[str, Function]]) -> type[nn.Module]:
    """The class with methods that find these functions by these names. Raises ValueError for a
    method that cannot be copied."""
    names = dict(ours)
    made: dict[str, Any] = {
        name: with_globals(method, names)
        for name, method in methods_of(kind).items()
        if names.keys() & _called_by(method).keys()
    }
    made |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (WithOurFunctions, kind), {**made, "__doc__": kind.__doc__})
