"""A model while its routings are recorded or replayed: who is told of its calls, which of them
failed, and whether a layer runs several times in one.

A record has one choice of experts for each token and layer. Where a layer writes or reads stands
still during a call, so that warm-ups of a capture and what checkpoints compute again find the same
rows. The second run of a layer in one run of the model would find them, too. So after each run it
is looked whether there was one: in Python around the model, which every run passes that is not the
replay of a graph, and none is captured before a run was looked at.
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from moe_ops.interop.subclass import former_class, new_object, subclass
from moe_ops.interop.told import TOLD, Told, is_told_ahead, tell, watching
from moe_ops.recorded.bare import AT, GIVEN_IDS, GIVEN_WEIGHTS, RING_IDS, RING_WEIGHTS
from moe_ops.recorded.routing import called

WATCH, RUN, RUNS = "_moe_ops_watch", "_moe_ops_run", "_moe_ops_runs"
OURS = frozenset({TOLD, WATCH, RUN, RUNS})  # attributes that a copy of a module does not get
BUFFERS = frozenset({RING_IDS, RING_WEIGHTS, AT, GIVEN_IDS, GIVEN_WEIGHTS})
HELD = ("_buffers", "_non_persistent_buffers_set")


class Run:
    """Whether a layer ran in the run of the model that goes on, and whether it did so again. Two
    flags and no number: compiled code that reads them has one variant while all is well."""

    def __init__(self) -> None:
        self.ran = self.again = False
        self.is_checkpointed = False  # a module around it may be

    def note(self) -> None:
        if self.ran:
            self.again = True
        else:
            self.ran = True


class Watch:
    """Who is told of the calls of a model, and looks at the runs of its layers, by their names."""

    def __init__(self, model: nn.Module, told: Told, layers: Iterable[str]) -> None:
        self.model, self.told = model, told
        self.runs = {name: Run() for name in layers}
        self.is_tried = False  # what comes of a call, as it would be captured
        self.is_over = False  # copies of the model may outlive the context

    @torch.compiler.disable
    def start(self, *, is_tried: bool = False) -> None:
        self.is_tried = is_tried
        for run in self.runs.values():
            run.ran = run.again = False

    def tried(self) -> None:
        self.check()
        self.start(is_tried=True)

    @torch.compiler.disable
    def check(self) -> None:
        """Raise ValueError if a layer ran more than once in the run that ends."""
        again = [name for name, run in self.runs.items() if run.again]
        if again:
            more = f" and {len(again) - 1} more layers run" if len(again) > 1 else " runs"
            raise ValueError(
                f"{called(again[0])}{more} several times in one call of this "
                f"{type(self.model).__name__}, but a record has one choice of experts for each "
                "token and layer; record and replay a part of the model that runs each of its "
                "layers once"
            )


class Before:
    """A hook that tells of a call of a model, which failed until `After` runs."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        watch = self.watch
        if module is watch.model:  # a twin of it has the hook, too
            tell(watch.told, args, kwargs)
            watch.start()  # also where the call was told of ahead
            watch.told.end(done=False)


class After:
    """A hook that looks at a run of a model that is not compiled."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self.watch.model:
            self.watch.check()
            self.watch.told.end(done=True)


class CopiedWithout:
    """What stands before the class of a module whose copies, and what is pickled of it, are what it
    was before."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As the class before, which may have a say in copies, too.
        reduced = _as_before(self, lambda: self.__reduce_ex__(protocol))
        if len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        # For the function that stands there pickle asks that the class be that of the module.
        make = new_object if reduced[0] is copyreg.__newobj__ else reduced[0]  # type: ignore[attr-defined]
        return (make, reduced[1], _without_ours(reduced[2]), *reduced[3:])


class WatchedInCopies(CopiedWithout):
    """What is watched in plain copies, too. By such copies a compiled model runs layer by layer."""

    def __copy__(self) -> Any:
        copied = _as_before(self, lambda: copy.copy(self))
        vars(copied)[WATCH] = vars(self).get(WATCH)
        copied.__class__ = _before(type(self).__bases__[0], copied)
        return copied


class Counted(CopiedWithout, nn.Module):
    """What stands before the class of a module that each run of a layer runs once."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        run: Run = getattr(self, RUN)
        if not (run.is_checkpointed and _traces_training()):
            run.note()
        return super().forward(*args, **kwargs)


class CountedOutside(CopiedWithout, nn.Module):
    """What stands before the class of a module around counted ones that is called through a
    checkpoint: what Dynamo traces inside of that must change nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _traces_training():
            runs: tuple[Run, ...] = getattr(self, RUNS)
            for run in runs:
                run.note()
        return super().__call__(*args, **kwargs)


class Hooked(CopiedWithout, nn.Module):
    """What stands before the class of a model that is not compiled, whose hooks tell of calls."""


class Watched(WatchedInCopies, nn.Module):
    """What stands before the class of a compiled model, which tells of its calls itself and, with
    hooks, would run otherwise."""

    @torch.compiler.disable(recursive=False)  # what is compiled begins below
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _looked_at(self):
            return super().__call__(*args, **kwargs)

    def get_compiled_call(self, compile_config: Any) -> Any:
        """What transformers' own `generate` calls in place of the model."""
        call = _as_before(self, lambda: self.get_compiled_call(compile_config))

        def watched(*args: Any, **kwargs: Any) -> Any:
            with _looked_at(self):
                return call(*args, **kwargs)

        return watched


class WatchedInside(WatchedInCopies, nn.Module):
    """What stands before the class of a module in a compiled model that holds all its layers: while
    a forward is tried and captured it runs several times in one run of the model."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        call = super()._call_impl
        watch: Watch | None = vars(self).get(WATCH)
        if torch.compiler.is_compiling() or watch is None or not watch.is_tried:
            return call(*args, **kwargs)
        watch.start(is_tried=True)
        out = call(*args, **kwargs)
        watch.check()
        return out


@contextmanager
def _looked_at(model: nn.Module) -> Iterator[None]:
    """A context around a run of a compiled model, or of a copy by which it runs. Raises ValueError
    if a layer ran twice in it."""
    watch: Watch | None = vars(model).get(WATCH)
    if watch is None or watch.is_over:
        yield
        return
    told, done = watch.told, False
    # The model itself tells inside, of a call that may be refused then and is none.
    is_told = model is not watch.model or is_told_ahead()
    begun = told.begun
    watch.start()
    try:
        yield
        if not watch.is_tried:
            watch.check()
        done = True
    finally:
        if not done:
            watch.start()  # perhaps the model runs in another way now
        if is_told or told.begun != begun:
            told.end(done)


@contextmanager
def watched(
    model: nn.Module, told: Told, layers: dict[str, nn.Module], *, is_compiled: bool
) -> Iterator[None]:
    """A context in which somebody is told of a model's calls, and layers are counted; layers: what
    each of their runs runs once."""
    watch = Watch(model, told, layers)
    told.looks = watch
    with ExitStack() as stack:
        stack.callback(setattr, watch, "is_over", True)
        for name, module in layers.items():
            stack.enter_context(_with(module, Counted, {RUN: watch.runs[name]}))
        for outside, runs in _checkpointed(model, watch.runs):
            stack.enter_context(_with(outside, CountedOutside, {RUNS: runs}))
        if not is_compiled:
            before = model.register_forward_pre_hook(Before(watch), with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(model.register_forward_hook(After(watch)).remove)
        else:
            for module in _that_hold(model, [*layers]):
                stack.enter_context(_with(module, WatchedInside, {WATCH: watch}))
        first = Watched if is_compiled else Hooked
        stack.enter_context(_with(model, first, {TOLD: told, WATCH: watch}))
        stack.enter_context(watching(model))
        yield


def _checkpointed(
    model: nn.Module, runs: dict[str, Run]
) -> Iterator[tuple[nn.Module, tuple[Run, ...]]]:
    """The modules around layers that transformers may call through a checkpoint, with the runs of
    these layers."""
    found: dict[str, list[Run]] = {}
    for name, run in runs.items():
        *parents, _ = accumulate(name.split("."), "{}.{}".format)
        can = (
            p for p in parents if hasattr(type(model.get_submodule(p)), "gradient_checkpointing")
        )
        for path in [*can][-1:]:
            found.setdefault(path, []).append(run)
            run.is_checkpointed = True
    for path, inside in found.items():
        yield model.get_submodule(path), tuple(inside)


def _traces_training() -> bool:
    return torch.compiler.is_compiling() and torch.is_grad_enabled()


def _that_hold(model: nn.Module, layers: list[str]) -> Iterator[nn.Module]:
    """The modules in a model that hold all its layers, down to the first list."""
    *parents, _ = accumulate(layers[0].split("."), "{}.{}".format)
    for path in parents:
        module = model.get_submodule(path)
        if isinstance(module, nn.ModuleList) or not all(x.startswith(f"{path}.") for x in layers):
            return
        yield module


@contextmanager
def _with(module: nn.Module, first: type, attributes: dict[str, Any]) -> Iterator[None]:
    """A context in which a class stands before that of a module."""
    cls = _before(first, module)
    vars(module).update(attributes)
    _become(module, cls)
    try:
        yield
    finally:
        _become(module, former_class(module))
        for name in attributes:
            del vars(module)[name]


def _before(first: type, module: Any) -> Any:
    """A class before that of a module."""
    cls: Any = type(module)
    return subclass(first, cls)


def _become(module: nn.Module, cls: Any) -> None:
    object.__setattr__(module, "__class__", cls)  # what torch.compile wraps gives others away


def _as_before(module: Any, do: Callable[[], Any]) -> Any:
    """What a function gives while a module has the class that it had before."""
    cls = type(module)
    _become(module, former_class(module))
    try:
        return do()
    finally:
        _become(module, cls)


def _without_ours(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a module without what is there while it is watched, recorded or replayed."""
    tables = [state.get(name, {}) for name in ("_forward_pre_hooks", "_forward_hooks")]
    hooks = {n for table in tables for n, h in table.items() if isinstance(h, (Before, After))}
    kept = {name: value for name, value in state.items() if name not in OURS}
    for name, value in kept.items():
        ours = hooks if name.startswith("_forward_") else BUFFERS if name in HELD else ()
        if ours and isinstance(value, dict):
            kept[name] = type(value)((n, x) for n, x in value.items() if n not in ours)
        elif ours and isinstance(value, set):
            kept[name] = value - ours
    return kept
