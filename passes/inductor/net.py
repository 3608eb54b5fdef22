"""Inductor with our passes and a net under it: a graph that it cannot compile as we rewrote it is
compiled as it was."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError

from moe_ops.interop.hooks import Hooks
from moe_ops.interop.interrupts import let_through
from moe_ops.passes.inductor import sizes
from moe_ops.passes.inductor.pipeline import HOOK, GraphRun, Pipeline
from moe_ops.passes.report.found import kept
from moe_ops.terminal import waiting_at_least_for

SOURCE = "_dynamo_source"  # of an input of the graph: where in the caller's arguments it is

log = logging.getLogger("moe_ops")

WITHOUT_INDUCTOR = (
    "Inductor of torch %s cannot compile the graph as it was either: %s. It runs op by op; "
    "strict=True raises this error. On CPUs, torch 2.11 writes C++ that does not compile for some "
    "attention masks (pytorch/pytorch#181621), which torch 2.13 does not"
)


class Net(torch._TorchCompileInductorWrapper):
    """A backend of torch.compile: Inductor with options that hold a `Pipeline`.

    If Inductor fails on a graph that the pipeline rewrote, the cause is logged, the first time at
    WARNING, and the graph is compiled without the rewriting. If that fails, too, the graph runs op
    by op, after a WARNING. `strict` and `batch_invariant` raise instead, and so does an error in a
    graph that was not rewritten. What is not of Inductor is raised, such as an error of a signal
    handler.

    Backends of equal options are equal, if they are for models of equal hooks: Dynamo takes the
    graph of an equal backend, and does not look at hooks. Whoever waits is told the `name`.

    Raises RuntimeError for an option that Inductor has not.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        dynamic: bool | None = None,
        hooks: Hooks = (),
        name: str = "a graph",
    ) -> None:
        super().__init__(None, dict(options), dynamic)
        pipeline = self.config[HOOK]
        assert isinstance(pipeline, Pipeline)
        self.pipeline = pipeline
        self.hooks = hooks
        self.waits_as = name  # `name` is torch's, by which it tells its own backend
        self.told = False
        self.made = 0  # graphs that it was given

    @property
    def needed_for(self) -> str:
        """The option under which nothing may run another way, or ""."""
        options = self.pipeline.options
        needed = (name for name in ("batch_invariant", "strict") if getattr(options, name))
        return next(needed, "")

    @sizes.assuming()  # also of the graph as it was, which might fail for the same reason
    def __call__(self, model_: fx.GraphModule, inputs_: list[Any], **kwargs: Any) -> Any:
        self.made += 1
        sizes.fix_traced()
        untouched, before = _copied(model_), len(self.pipeline.runs)
        try:
            with kept() as found, waiting_at_least_for(f"compiling {self.waits_as}"):
                compiled = super().__call__(model_, inputs_, **kwargs)
            self.pipeline.found += found
            return compiled
        except InductorError as error:
            let_through(error, compiling=True)
            rewritten = any(p.rewrites for run in self.pipeline.runs[before:] for p in run.passes)
            if self.needed_for or not rewritten or _out_of_memory(error):
                raise
            reason = self._tell(before, _cause_of(error))
            self.pipeline.found += [each.left_for(reason) for each in found]
        plain = Pipeline(chained=self.pipeline.chained, passes=())
        try:
            return compile_fx(untouched, inputs_, config_patches={**self.config, HOOK: plain})
        except InductorError as error:
            let_through(error, compiling=True)
            if _out_of_memory(error):
                raise
            log.warning(WITHOUT_INDUCTOR, torch.__version__, _cause_of(error))
            return untouched

    def _tell(self, before: int, cause: str) -> str:
        reason = f"Inductor cannot compile it as rewritten: {cause}"
        self.pipeline.runs[before:] = [GraphRun(skipped=reason)]
        log.log(
            logging.DEBUG if self.told else logging.WARNING,
            "moe_ops leaves a graph alone: %s. It runs as it was, which is slower; strict=True "
            "raises this error, and stop_after=NAME of a pass finds the one that leads to it",
            reason,
        )
        self.told = True
        return reason

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Net) or self.hooks != other.hooks:
            return False
        return bool(super().__eq__(other))

    def __hash__(self) -> int:
        return hash(self.pipeline)


def _cause_of(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """The module with a graph of its own, as Inductor works on the one that it is given."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, nodes)
    old = next(iter(reversed(module.graph.nodes)))
    graph.output(output).meta = copy.copy(old.meta)
    for node, twin in nodes.items():
        if hasattr(node, SOURCE):
            setattr(twin, SOURCE, getattr(node, SOURCE))
    copied = fx.GraphModule(module, graph)
    for name, value in vars(module).items():
        copied.__dict__.setdefault(name, value)  # what Dynamo noted of sources and parameters
    copied.meta = dict(module.meta)
    return copied


def _out_of_memory(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None
