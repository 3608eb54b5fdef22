"""`compile`: a twin of a model with our passes and, if it is of transformers, our `generate`."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._inductor import list_mode_options

from moe_ops.checks.options import check_flag
from moe_ops.checks.shapes import check_choice
from moe_ops.checks.signature import described
from moe_ops.forward.reported import graphs_of
from moe_ops.forward.whole import Watch, compile_watched, compile_whole
from moe_ops.graphs.capture import GraphRunner
from moe_ops.graphs.cuda_graph import GraphPool
from moe_ops.graphs.repeated import Repeated
from moe_ops.graphs.report import GraphReport, SizeReport, refusals
from moe_ops.installed import inside_of_peft, is_transformers_model, require_transformers
from moe_ops.interop.compile_workers import start_workers
from moe_ops.interop.hooks import hooks_of
from moe_ops.interop.interrupts import call_compiled
from moe_ops.kernels import gpus
from moe_ops.passes import explain as explaining
from moe_ops.passes.inductor.compiled import (
    Compiled,
    compiled_call,
    inductor_options,
    known_options,
)
from moe_ops.passes.inductor.layer_region import LayerRegion
from moe_ops.passes.inductor.net import Net
from moe_ops.passes.inductor.pipeline import HOOK
from moe_ops.passes.inductor.recompiles import tell_of_limit
from moe_ops.passes.report.telling import OfModel
from moe_ops.twin import Twin

log = logging.getLogger("moe_ops")

Model = TypeVar("Model", bound=nn.Module)


# A step is many kernels of a few microseconds: where a GPU can, they begin while the ones before
# them end (PDL), as ours do and as ours allow. GPUs of AMD know nothing of it.
STEP_OPTIONS = {"triton.enable_pdl": not gpus.is_amd()}


def compile(
    model: Model,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Model:
    """A compiled twin of `model`: the same class, weights and attributes, another `forward`.

    The twin has modules of its own on the parameters and buffers of the model. So values, dtype,
    device and `requires_grad` are shared, and so is the configuration of a transformers model. What
    else is done to the twin stays with it: `train()`, a hook, an adapter, a module or a weight in
    place of another. What is done to the model reaches the twin with its next call.

    `model` itself stays as it was, but for one thing: on a GPU the first `generate` stores experts
    of 16 bits that lie by columns, as those of GPT-OSS do, by rows, in place. Their values, names
    and checkpoints stay, their strides do not, and their addresses change: capture after it what
    reads them by address, such as a CUDA graph of your own, and run `model` in no thread meanwhile.

    `generate` and whatever else calls the twin runs compiled code. `options` and `extra` are those
    of `inductor_options`, `fullgraph` and `mode` those of torch.compile. Only inference is
    rewritten: call it under `torch.inference_mode()`.

    `dynamic` says which sizes may vary without another graph:
    None: the tokens of tensors given to the model directly: dims 0 and 1 of integers [B, S] and of
      floats [B, S, D], dim 0 of integers [T] and of floats [T, D]; 1 is no exception. A sequence
      of one token [B, 1] has a graph of its own, as attention functions branch on it. Where one of
      these sizes is 0 there is nothing to be quick at: the model's own code runs, uncompiled.
    True: the same without that exception, which takes an attention that does not branch; besides,
      torch.compile treats every other size as dynamic.
    False: none; each shape has its graph.
    A size on which the model branches costs one more graph. The marks stay on the tensors given.

    A forward of a transformers model runs layer by layer, like layers by one compiled code, and on
    a GPU sizes that come a third time are captured; `graph_report` lists these. It runs as one
    graph with `fullgraph` or `dynamic`, with hooks, for a gradient, for hidden states, attentions
    or router logits, and with caches other than transformers' dynamic ones of keys and values; the
    reason is logged at INFO. Results are the caller's: no later call changes them.

    Linear attention, state spaces and the convolutions before them are our ops in compiled code,
    and prompts of all lengths have one graph. Each is computed by ours only if it gives, on a few
    numbers, what the model's own function does; which does not is logged at INFO.

    The twin of a transformers model has our `generate`, with transformers' arguments and results:
    prompts of any length run through one compiled layer, then each step is one CUDA graph (on a
    GPU), by batch and length rounded up to powers of two. Unsupported calls and models fall back to
    transformers' `generate`, with a logged reason; with batch_invariant they raise
    NotImplementedError. That compiles nothing that it would not of `model`: the prompt and the
    steps run the model's own code, with the experts that `model` has. Only steps that transformers
    itself compiles, with a static cache on a GPU, have our passes.

    After the first call the logger moe_ops says at INFO how many of the model's MoE layers and
    routers run on our ops, and on which backends; also where compiled code came from a cache. What
    was left alone, now or later, it says at WARNING, with the reason; under `strict` that is a
    RuntimeError for experts.

    Of a PeftModel of peft the model inside is compiled, and so its `generate`; experts that its
    `target_parameters` wrap run with their weights and adapters apart. Of another module that only
    holds a transformers model `forward` is compiled and `generate` is not, which is logged: give
    the model inside.

    torch.export of a compiled model of transformers, or of a module that holds it, gives a program
    with our ops, where it is not strict and no gradient may be wanted; else a WARNING says why not.

    Compile again where a forward hook was added or removed: torch.compile does not see that. With
    hooks `generate` is transformers' own, as a captured step does not call them.

    A call of which nothing is compiled is told at WARNING; under `strict` and batch_invariant that
    is a RuntimeError. Raises TypeError for what is no module or is scripted, ImportError for a
    model of a transformers that is too old, ValueError for an unknown mode and for a stop_after
    that batch_invariant does not allow, and as `inductor_options` does.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {type(model).__name__}; for a function call "
            "torch.compile(function, options=moe_ops.inductor_options())"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"torch.compile does not trace TorchScript, got a {type(model).__name__}; give the "
            "module that was scripted"
        )
    inside = inside_of_peft(model)
    if not is_transformers_model(inside):
        inside = model
    else:
        require_transformers("moe_ops.compile of a model of transformers")
    check_flag("fullgraph", fullgraph)
    if dynamic is not None:
        check_flag("dynamic", dynamic)
    settings = {}
    if mode is not None:
        check_choice("mode", mode, tuple(list_mode_options()))
        settings = dict(list_mode_options(mode, dynamic))
    merged = inductor_options(extra={**settings, **known_options(extra)}, **options)
    tell_of_limit()
    if any(p.is_cuda for p in model.parameters()):
        start_workers()
    made, follow = followed(model)
    twin = made.module if inside is model else inside_of_peft(made.module)
    backend = Net(merged, dynamic, hooks_of(inside), type(inside).__name__)
    how = functools.partial(torch.compile, fullgraph=fullgraph, dynamic=dynamic, backend=backend)
    call = compile_whole(twin, how, watch_of(backend))
    tell = OfModel(lambda: twin, merged[HOOK], merged[HOOK].found).tell
    compiled = Compiled(twin._call_impl, call, merged[HOOK], dynamic, follow, tell)
    compiled.graphs = functools.partial(graphs_of, compiled, twin)
    twin._compiled_call_impl = compiled
    if is_transformers_model(inside):
        from moe_ops.forward.by_layers import by_layers_of
        from moe_ops.hf.optimize import WhileExported

        compiled.exporting = WhileExported(twin)
        region = region_of_layers(merged)
        if not fullgraph and dynamic is None and not merged.get("triton.cudagraphs"):
            compiled.by_layers = by_layers_of(twin, region)
        quicken(twin, merged, region, torch.no_grad()(follow), tell)
    elif hasattr(model, "generate") and any(map(is_transformers_model, model.modules())):
        log.warning(
            "generate of %s is its own, and the model that it calls inside is not compiled; give "
            "that to moe_ops.compile",
            type(model).__name__,
        )
    return made.module


@functools.wraps(explaining.explain)
def explain(model: Callable[..., Any], inputs: Any, **options: Any) -> Any:
    """`explain` of passes, with experts that have adapters as `compile` runs them."""
    inside = inside_of_peft(model)
    if not is_transformers_model(inside):
        return explaining.explain(model, inputs, **options)
    from moe_ops.hf.adapters.wrapped import apart

    with apart(inside):
        return explaining.explain(inside, inputs, **options)


def compile_config(*, extra: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """transformers' `CompileConfig` with our passes, for a `generate` that compiles by itself.

        model.generate(ids, cache_implementation="static", compile_config=moe_ops.compile_config())

    The arguments are those of `inductor_options`. Only steps are compiled, and a new length of the
    cache compiles again; `compile` does better. Needs transformers.
    """
    require_transformers("moe_ops.compile_config")
    from moe_ops.generation.generate import config_with

    defaults = {"triton.cudagraphs": True, **STEP_OPTIONS}
    return config_with(inductor_options(extra={**defaults, **known_options(extra)}, **options))


def region_of_layers(options: Mapping[str, Any]) -> Any:
    """What runs layers of transformers models by code that like ones share, whatever the number of
    sequences and tokens."""
    from moe_ops.forward.regions import ByKind

    # The graphs are ours; Inductor's own, of each region, would be in their way.
    without_graphs = {**options, "triton.cudagraphs": False}

    def compile_region(function: Callable[..., Any]) -> Callable[..., Any]:
        backend = Net(without_graphs, name=name_of(function))
        how = functools.partial(torch.compile, backend=backend)
        return LayerRegion(compile_watched(function, how, watch_of(backend)))

    return ByKind("layer", compile_region)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function's code, by which logs of torch call it, too."""
    return function.__code__.co_name


def followed(model: Model) -> tuple[Twin[Model], Callable[[], None]]:
    """A twin of a model, and what has it follow the model. Of a transformers model, also in a
    PeftModel, linear layers call our functions where they can, experts our ops where they are
    trained or have adapters."""
    if not is_transformers_model(inside_of_peft(model)):
        made = Twin(model)
        return made, made.follow
    from moe_ops.generation.linear_layers import give_ours
    from moe_ops.hf.adapters.followed import Banks
    from moe_ops.hf.trained import train_on_ops

    banks = Banks()

    def adapt(twin: nn.Module, model: nn.Module) -> None:
        of_twin, of_model = inside_of_peft(twin), inside_of_peft(model)
        give_ours(of_twin, of_model)
        train_on_ops(of_twin, of_model)
        banks.adapt(of_twin, of_model)

    made = Twin(model, adapt)

    def follow() -> None:
        made.follow()
        banks.follow(inside_of_peft(made.module))

    return made, follow


def quicken(
    twin: Any,
    options: Mapping[str, Any],
    region: Any,
    follow: Callable[[], None],
    tell: Callable[[], None],
) -> None:
    """Give a transformers model's compiled twin our `generate`, each call of which follows first
    what was done to the model; layers read prompts through `region`."""
    from moe_ops.generation.generate import quicken as give
    from moe_ops.generation.steps import Tools

    def step_options() -> dict[str, Any]:
        on_gpu = any(p.is_cuda for p in twin.parameters())  # by now, which may be later
        return {**(STEP_OPTIONS if on_gpu else {}), **options}

    def compile_step(function: Callable[..., Any]) -> Callable[..., Any]:
        without_graphs = {**step_options(), "triton.cudagraphs": False}
        backend = Net(without_graphs, False, name=name_of(function))
        how = functools.partial(torch.compile, dynamic=False, backend=backend)
        return functools.partial(call_compiled, compile_watched(function, how, watch_of(backend)))

    def compile_model(model: nn.Module) -> Callable[..., Any]:
        options = {"triton.cudagraphs": True, **step_options()}
        backend = Net(options, None, hooks_of(model), type(model).__name__)
        how = functools.partial(torch.compile, backend=backend)
        return functools.partial(call_compiled, compile_whole(model, how, watch_of(backend)))

    tools = Tools(
        layers=region,
        compile_step=compile_step,
        compile_model=compile_model,
        pool=GraphPool(),
        tell=tell,
        batch_invariant=options[HOOK].options.batch_invariant,
    )
    give(twin, tools, follow)


def watch_of(backend: Net) -> Watch:
    """What looks at the calls that a backend compiles."""
    return Watch(backend.waits_as, lambda: backend.made, backend.needed_for)


class CapturingBackend(Net):
    """A backend of torch.compile: our passes, and graphs of the calls whose sizes come again.

    It equals none but itself: Dynamo takes the code of an equal backend, and with it the graphs,
    which read the weights of one module and are reported by one backend.
    """

    __hash__ = Net.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__({**options, "triton.cudagraphs": False})
        self.repeated: list[Repeated] = []

    def __call__(self, model_: fx.GraphModule, inputs_: list[Any], **kwargs: Any) -> Any:
        stays = staying(model_)
        call = super().__call__(model_, inputs_, **kwargs)
        self.repeated.append(Repeated(call, stays))
        return self.repeated[-1]

    def report(self) -> list[SizeReport]:
        """What became of the sizes of all compiled graphs."""
        return [size for repeated in self.repeated for size in repeated.report()]

    def graphs(self) -> GraphReport:
        """What became of these sizes, and why other calls have no graph."""
        refused = sum((repeated.refused for repeated in self.repeated), Counter[str]())
        return GraphReport(calls=tuple(self.report()), refusals=refusals("call", refused.items()))


def backend(
    *, capture: bool = False, extra: Mapping[str, Any] | None = None, **options: Any
) -> Net:
    """A backend of torch.compile with our passes, for any module or function.

        fast = torch.compile(block, backend=moe_ops.backend(capture=True))

    `options` and `extra` are those of `inductor_options`. With `capture` calls whose sizes come a
    third time are captured as CUDA graphs: parameters and buffers are read where they are, other
    tensors are copied, and results are copies that no later call changes. `report()` of the backend
    lists sizes, graphs, their memory and why a call is not captured. Without a GPU nothing is.

    The module is one graph, which torch.compile makes of it; `moe_ops.compile` of a transformers
    model compiles its layers one by one, and pads sizes. Raises as `inductor_options` does.
    """
    check_flag("capture", capture)
    merged = inductor_options(extra=extra, **options)
    return CapturingBackend(merged) if capture else Net(merged)


def staying(graph: fx.GraphModule) -> frozenset[int]:
    """The places of inputs that stay where they are, as Dynamo marks them: parameters, buffers."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return frozenset(
        i
        for i, node in enumerate(inputs)
        if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    )


def graph_report(of: nn.Module | CapturingBackend | GraphRunner) -> GraphReport:
    """What graphs there are, of which sizes and memory, and why other calls have none.

    `of` is a model that `compile` returned, a `backend` that captures, or what `capture` returned.
    Raises ValueError for any other model, TypeError for anything else.
    """
    if isinstance(of, GraphRunner):
        reasons = refusals("call", of.refused.items())
        return GraphReport(buckets=tuple(of.report()), refusals=reasons)
    if isinstance(of, CapturingBackend):
        return of.graphs()
    if not isinstance(of, nn.Module):
        raise TypeError(
            "graphs are of a model that moe_ops.compile returned, of a backend(capture=True) or of "
            f"what moe_ops.capture returned, got {described(of)}"
        )
    return compiled_call(of).graphs()
