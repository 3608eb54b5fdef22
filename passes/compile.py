"""`compile` a model with our passes; `inductor_options` for those who call `torch.compile`."""

from __future__ import annotations

import copy
import logging
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo import mark_static, maybe_mark_dynamic
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options

from moe_ops.options import check_flag
from moe_ops.passes.context import Options
from moe_ops.passes.generate import STEP_OPTIONS, is_transformers_model, quicken
from moe_ops.passes.net import Net
from moe_ops.passes.pipeline import HOOK, Hook, Pipeline, as_tuple
from moe_ops.passes.recompiles import tell_of_limit
from moe_ops.passes.sizes import call_oblivious
from moe_ops.shapes import check_choice
from moe_ops.signature import described, did_you_mean

log = logging.getLogger("moe_ops")

Model = TypeVar("Model", bound=nn.Module)


def inductor_options(*, extra: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The `options` with which `torch.compile` runs our passes.

        torch.compile(model, options=moe_ops.inductor_options(stop_after="pick_backend"))

    The keywords are the fields of `Options`; `extra` are other options of Inductor (torch.compile
    takes either these or a mode). A hook that Inductor's config, or `extra`, holds already keeps
    running, before ours. Raises TypeError for an unknown keyword, and TypeError, ValueError or
    FileNotFoundError for what an option cannot be.
    """
    known = [f.name for f in fields(Options)]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(
            f"unknown options: {', '.join(unknown)}; there are {', '.join(known)}, and options of "
            f"Inductor go into extra={{...}}{did_you_mean(unknown[0], known)}"
        )
    merged = _known(extra)
    before = merged.get(HOOK, getattr(inductor_config, HOOK))
    merged[HOOK] = Pipeline(Options(**options), chained=tuple(_without_ours(as_tuple(before))))
    return merged


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

    The twin of a transformers model has a `generate` of ours, with transformers' arguments and
    results: prompts of any length through one compiled layer, then steps that on a GPU are one
    CUDA graph each, by batch and length rounded up to powers of two. Calls that it does not serve
    run transformers' own way, for a reason that is logged.

    Of a module that only holds a transformers model, as a PeftModel does, `forward` is compiled and
    `generate` is not, which is logged: give the model inside.

    Raises TypeError if `model` is not a module, ValueError for an unknown mode, and as
    `inductor_options` does.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {type(model).__name__}; for a function call "
            "torch.compile(function, options=moe_ops.inductor_options())"
        )
    check_flag("fullgraph", fullgraph)
    if dynamic is not None:
        check_flag("dynamic", dynamic)
    settings = {}
    if mode is not None:
        check_choice("mode", mode, tuple(list_mode_options()))
        settings = dict(list_mode_options(mode, dynamic))
    merged = inductor_options(extra={**settings, **_known(extra)}, **options)
    tell_of_limit()
    twin = copy.copy(model)  # shares the tables of parameters, buffers and submodules
    backend = Net(merged, dynamic)
    call = torch.compile(twin._call_impl, fullgraph=fullgraph, dynamic=dynamic, backend=backend)
    twin._compiled_call_impl = Compiled(twin._call_impl, call, merged[HOOK], dynamic)
    if is_transformers_model(model):
        quicken(twin, model, merged)
    elif hasattr(model, "generate") and any(map(is_transformers_model, model.modules())):
        log.warning(
            "generate of %s is its own, and the model that it calls inside is not compiled; give "
            "that to moe_ops.compile, of a PeftModel get_base_model() or merge_and_unload()",
            type(model).__name__,
        )
    return twin


def compile_config(*, extra: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """transformers' `CompileConfig` with our passes, for a `generate` that compiles by itself.

        model.generate(ids, cache_implementation="static", compile_config=moe_ops.compile_config())

    The arguments are those of `inductor_options`. Only steps are compiled, and a new length of the
    cache compiles again; `compile` does better. Needs transformers.
    """
    from moe_ops.hf.generate import config_with

    defaults = {"triton.cudagraphs": True, **STEP_OPTIONS}
    return config_with(inductor_options(extra={**defaults, **_known(extra)}, **options))


def pipeline_of(model: nn.Module) -> Pipeline:
    """The pipeline of a model that `compile` returned; its `runs` say what was done to each graph.

    Graphs that came from a cache have no run. Raises ValueError for any other model.
    """
    call = getattr(model, "_compiled_call_impl", None)
    if not isinstance(call, Compiled):
        raise ValueError(
            f"this {type(model).__name__} is not compiled by moe_ops.compile; give the model that "
            "it returned"
        )
    return call.pipeline


class Compiled:
    """Calls compiled code such that one graph serves every number of tokens, see `compile`."""

    def __init__(
        self,
        function: Callable[..., Any],
        call: Callable[..., Any],
        pipeline: Pipeline,
        dynamic: bool | None = None,
    ) -> None:
        self.function = function
        self.call = call  # the same, compiled
        self.pipeline = pipeline
        self.dynamic = dynamic

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside a larger model, it is that model's compiler that decides.
        if self.dynamic is False or torch.compiler.is_compiling():
            return self.call(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                dims = token_dims(value)
                if any(value.shape[dim] == 0 for dim in dims):
                    return self.function(*args, **kwargs)
                self._mark(value, dims)
        return call_oblivious(self.call, *args, **kwargs)

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


def _known(extra: Mapping[str, Any] | None) -> dict[str, Any]:
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
