"""Twins of models: modules of their own on the same weights, which follow what is done to the
model. What is done to a twin, such as another mode, a hook or a module in place of another, stays
with it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from moe_ops.interop.dicts import versions

Model = TypeVar("Model", bound=nn.Module)

# What of a module is its own in the twin: what holds its parts, its weights and buffers (which are
# the same) and its hooks.
TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
WATCHED = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
# What compiled code leaves on a module that it was made for; the second is of transformers.
COMPILED = frozenset(
    {"_compiled_call_impl", "_compiled_call", "_moe_ops_generation", "_moe_ops_fallback"}
)
SIMPLE = frozenset({bool, int, float, str, type(None), nn.Parameter})  # hold no module
MISSING = object()


class Contents:
    """What modules hold at a time: their attributes, parts, weights, buffers and hooks."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._kinds = list(map(type, modules))
        self._held = [
            held for m in modules for held in (vars(m), *(vars(m)[name] for name in WATCHED))
        ]
        self._full = [held for held in self._held if held]
        self._empty = [held for held in self._held if not held]
        self._versions = versions(self._full)
        self._values = tuple(_values(self._full))

    def same(self) -> bool:
        """Whether they hold the same; each call asks: a tenth of a millisecond for 48 layers, and
        half of one where something was written, were it what was there before."""
        if list(map(type, self._modules)) != self._kinds or any(self._empty):
            return False
        now = versions(self._full)
        if now is not None and now == self._versions:
            return True
        same = sum(map(len, self._full)) == len(self._values) and all(
            map(operator.is_, _values(self._full), self._values)
        )
        if same:
            self._versions = now
        return same


@dataclass(frozen=True, slots=True)
class Seen:
    """What a module of the model was when the twin was last like it."""

    kind: type
    attributes: dict[str, Any]
    tables: dict[str, dict[Any, Any]]


class Twin(Generic[Model]):
    """A twin of a model, `module`, and what keeps it like the model.

    Parameters and buffers are those of the model, so values are shared; no weight is copied. The
    twin's modules hold them in tables of their own. `follow` does to the twin what was done to the
    model since: another mode, attribute, weight, hook or module. What was done to the twin stays,
    unless the same was changed in the model; but buffers that came to another device or dtype with
    the twin's parameters, which are the model's, become the model's too. Modules that are no plain
    Python, as TorchScript's, are shared, and so is what only other objects hold. `adapt`, given the
    twin's module and the model, is called when the twin is like the model: at first, and after each
    change.
    """

    def __init__(
        self, model: Model, adapt: Callable[[Model, Model], None] = lambda module, model: None
    ) -> None:
        self.model = model
        self._adapt = adapt
        self.module: Model = copy.copy(model)
        self._pairs: dict[int, tuple[nn.Module, nn.Module]] = {id(model): (model, self.module)}
        self._seen: dict[int, Seen] = {}
        self._take_over()

    def follow(self) -> None:
        """Make the twin what the model has become."""
        if not all(map(operator.is_, _values(self._buffers), self._in_buffers)):
            self._give_moved()
        if not self._contents.same():
            self._take_over()

    def _take_over(self) -> None:
        pairs = self._pairs = dict(self._reached())
        for key, (module, twin) in pairs.items():
            seen = self._seen.get(key)
            if seen is None:
                self._fill(module, twin)
            else:
                self._update(module, twin, seen)
        self._contents = Contents([module for module, _ in pairs.values()])
        self._buffers = [vars(t)["_buffers"] for _, t in pairs.values() if vars(t)["_buffers"]]
        self._in_buffers = tuple(_values(self._buffers))
        self._seen = {key: _seen(module) for key, (module, _) in pairs.items()}
        self._adapt(self.module, self.model)

    def _give_moved(self) -> None:
        """Give the model the buffers that moved with the twin."""
        for module, twin in self._pairs.values():
            held = vars(module)["_buffers"]
            for name, t in vars(twin)["_buffers"].items():
                own = held.get(name)
                if t is None or own is None or (t.device, t.dtype) == (own.device, own.dtype):
                    continue
                if self._seen[id(module)].tables["_buffers"].get(name) is own:
                    held[name] = t
        self._in_buffers = tuple(_values(self._buffers))

    def _reached(self) -> Iterator[tuple[int, tuple[nn.Module, nn.Module]]]:
        """The modules of the model, by identity, with those of the twin, which new ones get."""
        left: list[nn.Module | None] = [self.model]
        reached: set[int] = set()
        while left:
            module = left.pop()
            if module is None or id(module) in reached or not _is_plain(module):
                continue
            reached.add(id(module))
            known = self._pairs.get(id(module))
            yield id(module), known or (module, object.__new__(type(module)))
            left += module._modules.values()

    def _fill(self, module: nn.Module, twin: nn.Module) -> None:
        for name, value in vars(module).items():
            if name in TABLES:
                own = vars(twin)[name] = value.copy()
                for key, held in value.items():
                    own[key] = self._mapped(held)
            elif name in COMPILED:
                vars(twin).pop(name, None)  # of the model, which is copied first
            else:
                vars(twin)[name] = self._mapped(value)

    def _update(self, module: nn.Module, twin: nn.Module, seen: Seen) -> None:
        if type(module) is not seen.kind and module is not self.model:
            twin.__class__ = type(module)
        now = _seen(module)
        self._change(vars(twin), now.attributes, seen.attributes)
        for name in now.tables.keys() | seen.tables.keys():
            held, before = now.tables.get(name, {}), seen.tables.get(name, {})
            self._change(vars(twin)[name], held, before)

    def _change(self, held: dict[Any, Any], now: dict[Any, Any], before: dict[Any, Any]) -> None:
        for key in before.keys() - now.keys():
            held.pop(key, None)
        for key, value in now.items():
            if before.get(key, MISSING) is not value:
                held[key] = self._mapped(value)

    def _mapped(self, value: Any) -> Any:
        """What stands in the twin for something that a module of the model holds: for a module its
        twin, and the same in lists, bound methods and partial functions, as forwards that were
        replaced are."""
        kind = type(value)
        if kind in SIMPLE:
            return value
        if isinstance(value, nn.Module):
            return self._pairs.get(id(value), (None, value))[1]
        if kind in (list, tuple):
            mapped = [self._mapped(x) for x in value]
            return kind(mapped) if any(map(operator.is_not, mapped, value)) else value
        if kind is dict:
            of_values = {key: self._mapped(x) for key, x in value.items()}
            changed = any(map(operator.is_not, of_values.values(), value.values()))
            return of_values if changed else value
        if kind is MethodType:
            owner = self._mapped(value.__self__)
            return value if owner is value.__self__ else MethodType(value.__func__, owner)
        if kind is partial:
            given = value.func, *value.args, *value.keywords.values()
            func, *args = map(self._mapped, given)
            if not any(map(operator.is_not, (func, *args), given)):
                return value
            n = len(value.args)
            made = partial(func, *args[:n], **dict(zip(value.keywords, args[n:], strict=True)))
            vars(made).update(vars(value))  # as functools.update_wrapper left it
            return made
        return value


def _is_plain(module: nn.Module) -> bool:
    """Whether all of a module is in its attributes, where a twin can have others."""
    own, others = vars(module), (torch.jit.ScriptModule, LazyModuleMixin)
    return (
        not isinstance(module, others)
        and type(module).__basicsize__ == nn.Module.__basicsize__
        and all(isinstance(own.get(name), dict) for name in TABLES)
    )


def _seen(module: nn.Module) -> Seen:
    own = vars(module)
    return Seen(
        kind=type(module),
        attributes={n: v for n, v in own.items() if n not in TABLES and n not in COMPILED},
        tables={name: own[name].copy() for name in TABLES if own[name]},
    )


def _values(held: list[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, held))
