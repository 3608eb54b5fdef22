"""`inductor_options` with which torch.compile runs our passes, and calls of what it compiled."""

from __future__ import annotations

import logging
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import mark_static, maybe_mark_dynamic
from torch._inductor import config as inductor_config

from moe_ops.checks.signature import described, did_you_mean
from moe_ops.graphs.report import GraphReport
from moe_ops.installed import inside_of_peft
from moe_ops.interop.interrupts import call_compiled
from moe_ops.interop.told import begin
from moe_ops.ops.by_choice import ask_in_graphs
from moe_ops.passes.inductor.pipeline import HOOK, Hook, Pipeline, as_tuple
from moe_ops.passes.inductor.sizes import call_oblivious
from moe_ops.passes.rewriting.context import Options
from moe_ops.registry.invariance import invariant, require_asked
from moe_ops.terminal import one_call, waiting_for

log = logging.getLogger("moe_ops")

Model = TypeVar("Model", bound=nn.Module)


def inductor_options(*, extra: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The `options` with which `torch.compile` runs our passes.

        torch.compile(model, options=moe_ops.inductor_options(stop_after="pick_backend"))

    The keywords are the fields of `Options`; `extra` are other options of Inductor (torch.compile
    takes either these or a mode). A hook that Inductor's config, or `extra`, holds already keeps
    running, before ours. What became of a model's MoE layers is logged as `compile` says, as soon
    as a graph has one. Raises TypeError for an unknown keyword, and TypeError, ValueError or
    FileNotFoundError for what an option cannot be.
    """
    known = [f.name for f in fields(Options)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(
            f"unknown options: {', '.join(unknown)}; there are {', '.join(known)}, and options of "
            f"Inductor go into extra={{...}}{did_you_mean(unknown[0], known)}"
        )
    merged = known_options(extra)
    before = merged.get(HOOK, getattr(inductor_config, HOOK))
    merged[HOOK] = Pipeline(Options(**options), chained=tuple(_without_ours(as_tuple(before))))
    return merged


def compiled_call(model: nn.Module) -> Compiled:
    """What a model that `compile` returned is called by. Raises ValueError for any other model."""
    call = getattr(inside_of_peft(model), "_compiled_call_impl", None)
    if not isinstance(call, Compiled):
        raise ValueError(
            f"this {type(model).__name__} is not compiled by moe_ops.compile; give the model that "
            "it returned"
        )
    return call


def pipeline_of(model: nn.Module) -> Pipeline:
    """The pipeline of a model that `compile` returned; its `runs` say what was done to each graph.

    Graphs that came from a cache have no run. Raises ValueError for any other model.
    """
    return compiled_call(model).pipeline


NOT_EXPORTED = (
    "batch_invariant of moe_ops.compile is not carried into a program of torch.export, whose "
    "linear layers are torch's; export the model itself, or layers made with batch_invariant"
)


class ByLayers(Protocol):
    """Runs a model layer by layer, or says why it does not run a call so; if that turns out on the
    way it says so itself and gives NotImplemented."""

    forwards: Any  # with their graphs
    refused: Counter[str]  # calls by the reason why they did not run so

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None: ...
    def tell(self, reason: str) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Exporting(Protocol):
    """Has a model call our ops while torch.export traces it."""

    def on_ops(self) -> AbstractContextManager[None]: ...
    def tell_of_strict(self) -> None: ...


class Compiled:
    """Calls compiled code such that one graph serves every number of tokens, see `compile`."""

    def __init__(
        self,
        function: Callable[..., Any],
        call: Callable[..., Any],
        pipeline: Pipeline,
        dynamic: bool | None = None,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        self.function = function
        self.call = call  # the same, compiled
        self.pipeline = pipeline
        self.dynamic = dynamic
        self.by_layers: ByLayers | None = None  # the same, where a model's layers can run alone
        self.before = before  # what comes before each call
        self.after = after  # and what comes after it
        self.batch_invariant = pipeline.options.batch_invariant
        if self.batch_invariant:
            ask_in_graphs()
        self.exporting: Exporting | None = None  # what puts ops into exported programs
        self.is_compiled = False
        self.graphs: Callable[[], GraphReport] = GraphReport

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside a larger model, it is that model's compiler that decides.
        if torch.compiler.is_compiling():
            return self._traced(*args, **kwargs)
        require_asked(self.batch_invariant)
        if self.before is not None:
            self.before()
        model = getattr(self.function, "__self__", None)
        if model is not None:
            begin(model, args, kwargs)
        with one_call(), invariant(self.batch_invariant):
            out = self._run(*args, **kwargs)
        if self.after is not None:
            self.after()
        return out

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """A call that torch.compile traces, or torch.export, whose graphs no pass of ours sees.

        Raises NotImplementedError for an export of what is to be batch invariant.
        """
        if self.batch_invariant and torch.compiler._is_exporting_flag:
            raise NotImplementedError(NOT_EXPORTED)
        if self.exporting is None or not torch.compiler.is_exporting():
            return self.call(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            self.exporting.tell_of_strict()
            return self.call(*args, **kwargs)
        with self.exporting.on_ops():
            return self.function(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.dynamic is False:
            with self._as_one_graph():
                return call_compiled(self.call, *args, **kwargs)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        inputs = [(x, token_dims(x)) for x in given if not isinstance(x, nn.Parameter)]
        if any(x.shape[dim] == 0 for x, dims in inputs for dim in dims):
            return self.function(*args, **kwargs)
        if self.by_layers is not None:
            reason = self.by_layers.refusal(args, kwargs)
            if reason is None:
                out = call_oblivious(self.by_layers, *args, **kwargs)  # once, not for each layer
                if out is not NotImplemented:
                    return out
            else:
                self.by_layers.tell(reason)
        for x, dims in inputs:
            self._mark(x, dims)
        with self._as_one_graph():
            return call_oblivious(call_compiled, self.call, *args, **kwargs)

    @contextmanager
    def _as_one_graph(self) -> Iterator[None]:
        """A context around a call of the whole model, the first of which compiles it."""
        if self.is_compiled:
            yield
            return
        model = getattr(self.function, "__self__", self.function)
        with waiting_for(f"compiling {type(model).__name__}"):
            yield
        self.is_compiled = True

    def _mark(self, x: Tensor, dims: Iterable[int]) -> None:
        """Mark weakly: a size that the model fixes after all is compiled again, not refused."""
        for dim in dims:
            if dim == 1 and x.shape[1] == 1 and self.dynamic is None:
                mark_static(x, 1)
            else:
                maybe_mark_dynamic(x, dim)


def token_dims(x: Tensor) -> range:
    """The dims of an input that count tokens: all of integers [T] and [B, S], all but the last of
    floats [T, D] and [B, S, D], none of other shapes."""
    dims = x.dim() - x.is_floating_point()
    return range(dims if dims <= 2 else 0)


def known_options(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of Inductor. Raises TypeError or ValueError for what has none."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise TypeError(
            f"extra must be a mapping of Inductor's options, got {described(extra)}; for example "
            "{'max_autotune': True}"
        )
    known = inductor_config.get_config_copy() if extra else {}  # as torch.compile looks names up
    for name in extra:
        if not isinstance(name, str) or name.replace("-", "_") not in known:
            raise ValueError(
                f"extra: Inductor has no option {name!r}; torch._inductor.config lists them"
                f"{did_you_mean(name, known)}"
            )
        kind = inductor_config.get_type(name.replace("-", "_"))  # type: ignore[attr-defined]
        if typing.get_origin(kind) is None and not isinstance(extra[name], kind):
            wanted = getattr(kind, "__name__", kind)
            raise TypeError(f"extra: {name} must be {wanted}, got {described(extra[name])}")
    return dict(extra)


def _without_ours(hooks: Iterable[Hook]) -> Iterable[Hook]:
    """The hooks, with those chained to a pipeline of ours in its place: it is not to run twice."""
    for hook in hooks:
        if isinstance(hook, Pipeline):
            yield from hook.chained
        else:
            yield hook
