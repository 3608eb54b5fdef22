"""`explain`: what the passes make of a model, without generating or running any code."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from moe_ops.checks.options import check_flag, check_ints, check_text, check_type, check_writable
from moe_ops.checks.signature import described
from moe_ops.installed import is_transformers_model, require_transformers
from moe_ops.interop.switches import Switched
from moe_ops.passes import PIPELINE
from moe_ops.passes.explain import codes, regions, unfound
from moe_ops.passes.explain.explanation import Explanation, LayerText, PassTotal
from moe_ops.passes.explain.html import page
from moe_ops.passes.explain.trace import Trace, inside, lines, plain_module, run_compiled, trace
from moe_ops.passes.inductor.compiled import Compiled, inductor_options
from moe_ops.passes.inductor.pipeline import HOOK, GraphRun, Pipeline, name_of
from moe_ops.passes.pick_backend import call_of, generic_op, pick_backend
from moe_ops.passes.report.summary import summarize
from moe_ops.passes.rewriting.context import Context, Note
from moe_ops.planning.cost import Device, device_of
from moe_ops.planning.plan import Plan
from moe_ops.prepared import HoldsExperts

Inputs = Mapping[str, Any] | Sequence[Any]


def explain(
    model: Callable[..., Any],
    inputs: Inputs | Tensor,
    *,
    html: str | None = None,
    depyf: str | None = None,
    tokens: Sequence[int] | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Explanation:
    """What `moe_ops.compile` would make of a model, or of any callable, for one call of it.

        print(moe_ops.explain(model, {"input_ids": ids}))

    inputs: keyword arguments as a mapping, positional ones as a sequence, or a tensor, the model's
    first argument. tokens: the numbers of tokens, from 1 on, to give bytes, operations and floor
    times for; None takes that of the inputs. `dynamic`
    and `options` are those of `moe_ops.compile`. html: a file to write one self-contained page to.
    depyf: a folder for depyf's dumps, our stages among them; it alone compiles and runs the model.

    The model runs on tensors without memory: it, its inputs, and what was compiled before stay as
    they are, and weights may be fake (built under a FakeTensorMode) and larger than the machine.
    Code that needs values, after a graph break, ends the explanation there, see `stopped`.

    Raises TypeError for an unknown option, ImportError if depyf is wanted and not installed, and
    before it begins TypeError, ValueError or OSError for what an argument cannot be.
    """
    if not callable(model):
        raise TypeError(f"model must be a module or another callable, got {described(model)}")
    if is_transformers_model(model):
        require_transformers("moe_ops.explain of a model of transformers")
    args, kwargs = _arguments(inputs)
    if tokens is not None:
        tokens = check_ints("tokens", tokens, least=1)
    if dynamic is not None:
        check_flag("dynamic", dynamic)
    if html is not None:
        check_writable("html", html)
    if depyf is not None:
        check_type("depyf", depyf, (str, os.PathLike), "the path of a folder")
    merged = inductor_options(**options)
    dumps = None if depyf is None else _depyf(model)
    watch = _Watch.of(merged[HOOK])
    found = trace(model, args, kwargs, watch, dynamic)
    explanation = _explanation(model, watch, found, tokens)
    if html is not None:
        Path(html).write_text(page(explanation), encoding="utf-8")
    if dumps is not None:
        merged = inductor_options(**options | {"dump": True})
        with warnings.catch_warnings():
            # Told to whoever calls depyf: one call is what was asked for here.
            warnings.filterwarnings("ignore", ".*You are trying to debug `torch.compile`")
            run_compiled(model, args, kwargs, merged, dynamic, dumps.prepare_debug(depyf))
    return explanation


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional and keyword arguments of a call."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        for name in inputs:
            check_text("the name of an input", name)
        return (), inputs
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise TypeError(
            "inputs must be keyword arguments as a mapping, such as {'input_ids': ids}, positional "
            f"ones as a sequence, or a tensor, got {described(inputs)}"
        )
    return tuple(inputs), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """What was done to one graph, and its nodes before and after."""

    run: GraphRun
    calls: regions.Calls
    before: list[tuple[str, str]]
    after: list[tuple[str, str]]


@dataclass(eq=False)
class _Watch:
    """A hook that runs the passes and keeps what there is to tell."""

    pipeline: Pipeline
    graphs: list[_Graph] = field(default_factory=list)
    linears: list[codes.LinearsInCodes] = field(default_factory=list)
    _calls: regions.Calls = field(default_factory=dict)
    _first: torch.device | None = None  # of the first of our ops

    @staticmethod
    def of(pipeline: Pipeline) -> _Watch:
        """A watch over the passes of a pipeline, which stays as it is."""
        watch, at = _Watch(pipeline), PIPELINE.index(pick_backend)
        passes = (*PIPELINE[:at], watch._note_calls, *PIPELINE[at:])
        watch.pipeline = Pipeline(pipeline.options, pipeline.chained, passes)
        return watch

    def __call__(self, graph: fx.Graph) -> None:
        self._calls, before = {}, list(lines(graph))
        self.pipeline(graph, is_inference=True)
        run, after = self.pipeline.runs[-1], list(lines(graph))
        self.graphs.append(_Graph(run=run, calls=self._calls, before=before, after=after))

    def _note_calls(self, graph: fx.Graph, context: Context) -> int:
        """A pass that changes nothing."""
        self.linears += codes.in_codes(graph)
        for node in graph.nodes:
            op = generic_op(node)
            if op is not None:
                self._calls[node.name] = call = call_of(op, node)
                self._first = self._first or op.arguments.first(call).device
        return 0

    def device(self) -> Device:
        """The device on which our ops run."""
        return device_of(self._first or torch.device("cpu"))

    def totals(self) -> tuple[PassTotal, ...]:
        """What each pass did, summed over all graphs."""
        runs = [run for graph in self.graphs for run in graph.run.passes]
        return tuple(
            PassTotal(
                name=name,
                rewrites=sum(run.rewrites for run in runs if run.name == name),
                ms=sum(1e3 * run.seconds for run in runs if run.name == name),
            )
            for name in dict.fromkeys(run.name for run in runs)
            if name != self._note_calls.__name__
        )


def _explanation(
    model: Any, watch: _Watch, found: Trace, tokens: Sequence[int] | None
) -> Explanation:
    device, seen, first = watch.device(), [], None
    for graph in watch.graphs:
        for layer in regions.layers(graph.run, graph.calls, device, tokens):
            seen.append(replace(layer.region, padding=_padding(model, layer.region.layers[0])))
            first = first or (graph, layer.block)
    runs = [graph.run for graph in watch.graphs]
    looked = [run.found for run in runs if run.found is not None]
    title, call = _title(model), getattr(model, "_compiled_call_impl", None)
    return Explanation(
        title=title,
        summary=str(summarize(title, plain_module(model), looked, found.places)),
        device=device,
        regions=regions.grouped(seen),
        left_alone=regions.left_alone((*_unrun(model), *(n for run in runs for n in run.refusals))),
        instead=() if seen else unfound.seen(looked, found.breaks),
        passes=watch.totals(),
        plan=Plan(device=device.name, choices=tuple(c for run in runs for c in run.choices)),
        graphs=found.graphs,
        breaks=tuple(found.breaks),
        stopped=found.stopped,
        layer=None if first is None else _layer_text(*first),
        linears=codes.grouped(watch.linears),
        captured=call.graphs() if isinstance(call, Compiled) else None,
    )


def _padding(model: Any, layer: str) -> str:
    """What the module that has the experts of a layer says of sizes that it rounds up."""
    module = plain_module(model)
    for name in ("", *layer.split(".")):
        if isinstance(module, HoldsExperts):
            return module.padding
        module = getattr(module, name, None) if name else module
    return module.padding if isinstance(module, HoldsExperts) else ""


def _unrun(model: Any) -> Iterator[Note]:
    """What modules say of why no op runs them."""
    model = plain_module(model)
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        reason = module.refusal() if isinstance(module, Switched) else None
        if reason is not None:
            yield Note(rule="adapters", node="", layer=name, text=reason)


def _layer_text(graph: _Graph, block: str) -> LayerText:
    before, after = (inside(part, block) for part in (graph.before, graph.after))
    return LayerText(module=block, before=before, after=after)


def _title(model: Any) -> str:
    model = plain_module(model)
    return type(model).__name__ if isinstance(model, nn.Module) else name_of(model)


def _depyf(model: Any) -> Any:
    """The package depyf. Raises ImportError if it is not installed, ValueError for a model that
    cannot run."""
    tensors = model.parameters() if isinstance(model, nn.Module) else ()
    if any(isinstance(t, FakeTensor) for t in tensors):
        raise ValueError(
            "depyf dumps what is compiled for real, and runs it, but the weights of this "
            f"{type(model).__name__} are fake; give a smaller model with weights"
        )
    try:
        return importlib.import_module("depyf")
    except ImportError as error:
        raise ImportError(
            "explain(depyf=...) needs depyf: pip install 'torch-moe-ops[debug]', or depyf itself"
        ) from error
