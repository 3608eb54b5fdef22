"""Who is told what became of a model's MoE layers: one line a compiled model, and what was left."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn
from torch._dynamo import callback_handler, eval_frame
from torch._dynamo.utils import graph_break_reasons
from torch._guards import CompileContext

from moe_ops.passes.report.found import Found, counts, is_watched, since
from moe_ops.passes.report.summary import Place, Summary, summarize
from moe_ops.passes.rewriting.context import Options

log = logging.getLogger("moe_ops")


class Rewriter(Protocol):
    """What is asked of a pipeline. Those of equal `identity` make equal graphs of equal ones."""

    options: Options
    found: list[Found]
    of_modules: OfModules

    @property
    def identity(self) -> tuple[object, ...]: ...


def refuse(summary: Summary) -> None:
    """Raise RuntimeError for experts that were left alone."""
    complaints = list(summary.complaints())
    if complaints:
        raise RuntimeError("\n".join(f"strict: {complaint}" for complaint in complaints))


class Voice:
    """Says each thing once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def complain(self, summary: Summary) -> None:
        for text in (*summary.complaints(), *summary.remarks()):
            self.say(logging.WARNING, text)

    def say(self, level: int, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            log.log(level, "%s", text)


class OfModel:
    """What is told of one compiled model, after calls of it or after compilations.

    `model` gives it, or None if it is gone; `found` is what its graphs have. breaks: how many
    places where graphs ended were listed before its own; None: those that are listed now.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module | None],
        pipeline: Rewriter,
        found: list[Found],
        breaks: int | None = None,
    ) -> None:
        self._model, self._pipeline, self._found = model, pipeline, found
        self._voice, self._told, self._heard = Voice(), False, (-1, -1)
        self._refused: Summary | None = None
        self._breaks = len(graph_break_reasons) if breaks is None else breaks

    def tell(self, at_last: bool = True) -> None:
        """Tell what is new since the last time; unless `at_last` more graphs may come of the call.
        Under `strict` raises RuntimeError for experts that were left alone, each time."""
        now = len(self._found), len(graph_break_reasons)
        if self._heard == now:
            if self._refused is not None:
                refuse(self._refused)
            return
        self._heard = now
        summary = self._summary(at_last)
        has_seen = len(summary.unseen) < summary.layers
        if not self._told and (has_seen or at_last or (not summary.layers and self._model())):
            self._told = has_seen or not summary.layers
            self._voice.say(logging.INFO, str(summary))
        if self._pipeline.options.strict:
            self._refused = summary
            refuse(summary)
        self._voice.complain(summary)

    def _summary(self, at_last: bool) -> Summary:
        model, found = self._model(), self._found
        if model is None:
            return summarize("A function", None, found)
        start = self._breaks if self._breaks <= len(graph_break_reasons) else 0
        places = [Place.of(reason) for reason in graph_break_reasons[start:]]
        if found:
            _remember(model, self._pipeline, found)
        found = found or _remembered(model, self._pipeline)
        return summarize(type(model).__name__, model, found, places, at_last)


# Dynamo takes the graphs of a backend with equal options for another model of equal parts, and then
# compiles nothing: what was found last for such a model holds for this one.
_Like = tuple[object, ...]
_last: WeakKeyDictionary[type[nn.Module], list[tuple[_Like, list[Found]]]] = WeakKeyDictionary()


def _like(model: nn.Module, pipeline: Rewriter) -> _Like:
    return pipeline.identity, [type(part) for part in model.modules()]


def _remember(model: nn.Module, pipeline: Rewriter, found: list[Found]) -> None:
    like, others = _like(model, pipeline), _last.setdefault(type(model), [])
    others[:] = [*(other for other in others if other[0] != like), (like, found)]


def _remembered(model: nn.Module, pipeline: Rewriter) -> list[Found]:
    like = _like(model, pipeline)
    return next((found for other, found in _last.get(type(model), ()) if other == like), [])


class OfModules:
    """What is told of the models that torch.compile runs with a pipeline. One that is gone is
    forgotten; all that is no module counts as one."""

    def __init__(self, pipeline: Rewriter) -> None:
        self._pipeline = pipeline
        self._models: WeakKeyDictionary[nn.Module, tuple[list[Found], OfModel]] = (
            WeakKeyDictionary()
        )
        self._functions = self._new(lambda: None)

    def hear(self, model: nn.Module | None, more: list[Found]) -> None:
        """Tell what was found in more graphs of a model."""
        found, of_model = self._functions
        if model is not None:
            if model not in self._models:
                self._models[model] = self._new(weakref.ref(model))
            found, of_model = self._models[model]
        found += more
        self._pipeline.found += more
        self._tell(of_model)

    def again(self) -> None:
        """Tell of the same models what else can be told: code that ends a graph may begin none."""
        for _, of_model in list(self._models.values()):
            self._tell(of_model)

    def _tell(self, of_model: OfModel) -> None:
        try:
            of_model.tell(at_last=False)
        except RuntimeError as refusal:
            # Dynamo's callbacks must not fail. What a graph alone shows was refused already.
            log.warning("%s", refusal)

    def _new(self, model: Callable[[], nn.Module | None]) -> tuple[list[Found], OfModel]:
        found: list[Found] = []
        return found, OfModel(model, self._pipeline, found, 0)


_lock = threading.Lock()
_waiting: list[tuple[Counter[str], Rewriter, Callable[[], nn.Module | None]]] = []
_heard: WeakValueDictionary[int, Rewriter] = WeakValueDictionary()  # equal ones are not the same


def listen(pipeline: Rewriter) -> None:
    """Tell what comes of the graph that is being compiled, when it is. Of a model of
    `moe_ops.compile` its own `OfModel` does so."""
    if is_watched() or CompileContext.try_get() is None:
        return
    with _lock:
        if _at_end not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(_at_end)
        _heard[id(pipeline)] = pipeline
        if not _waiting:
            model = _compiled_module()
            ref = (lambda: None) if model is None else weakref.ref(model)
            _waiting.append((counts(), pipeline, ref))


def _at_end(_: Any) -> None:
    with _lock:
        ended, _waiting[:] = list(_waiting), []
    for before, pipeline, model in ended:
        pipeline.of_modules.hear(model(), since(before))
    for pipeline in list(_heard.values()):
        pipeline.of_modules.again()


def _compiled_module() -> nn.Module | None:
    """The module that was given to torch.compile, or a method of which was, in whose call Dynamo
    compiles now."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == eval_frame.__file__:
            named = frame.f_locals
            candidates = (getattr(named.get("self"), "_orig_mod", None), named.get("fn"))
            for given in candidates:
                module = getattr(given, "__self__", given)
                if isinstance(module, nn.Module):
                    return module
        frame = frame.f_back
    return None
