"""Graphs as Inductor hands them to its post-grad hook, made without generating or running code."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo import eval_frame
from torch._dynamo import convert_frame, output_graph, pgo
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_ops.passes.inductor.compiled import Compiled
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.report.summary import Place
from moe_ops.passes.rewriting.graph import layer_of

BY_VALUE = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

# What is compiled for a region of its own does not count towards others' limit of recompilations.
ISOLATED: dict[str, Any] = (
    {"isolate_recompiles": True}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters  # torch 2.13
    else {}
)

_numbers = itertools.count()


@dataclass(eq=False)
class Backend:
    """A backend of torch.compile that calls `hook` on each graph as Inductor's post-grad hook.

    Inductor decomposes and simplifies as it does for real; only its code generation is left out,
    and what `hook` leaves of the graph runs node by node.
    """

    hook: Callable[[fx.Graph], Any]
    graphs: int = 0

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs += 1
        return compile_fx(module, inputs, inner_compile=self._inner)

    def _inner(self, module: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
        view_to_reshape(module)
        hook = config.patch(post_grad_custom_post_pass=self.hook)
        with V.set_fake_mode(detect_fake_mode(inputs)), hook:
            post_grad_passes(module, is_inference=True)
        return make_boxed_func(module.forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A place in the code where one graph ended and another began."""

    reason: str
    where: str  # file:line of the model's code; empty if unknown


@dataclass(kw_only=True)
class Trace:
    """How a call was cut into graphs."""

    graphs: int = 0
    breaks: list[Break] = field(default_factory=list)  # each place once
    places: list[Place] = field(default_factory=list)  # the same with the calls that led there
    stopped: str = ""  # why what follows a break could not be traced


def trace(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    hook: Callable[[fx.Graph], Any],
    dynamic: bool | None = None,
) -> Trace:
    """Call `hook` on every graph of one call under `moe_ops.compile`, in inference mode.

    Tensors are replaced by fakes, also those of a module: no kernel runs, no memory is needed, the
    function and its arguments stay as they are. So do Dynamo's caches and counters, see
    `undisturbed`. Raises ValueError if a module cannot be copied.
    """
    backend, found = Backend(hook), Trace()
    function, args, kwargs = _fakes((plain_module(function), args, dict(kwargs)))
    root = _root()
    compiled = torch.compile(root, backend=backend, dynamic=dynamic, **ISOLATED)
    no_caches = config.patch(force_disable_caches=True)
    with undisturbed(found), no_caches, warnings.catch_warnings(), torch.inference_mode():
        warnings.filterwarnings("ignore", "dynamo_pgo force disabled")
        try:
            Compiled(root, compiled, Pipeline(), dynamic)(function, *args, **kwargs)
        except BY_VALUE as error:
            found.stopped = f"code after a break needs values, not shapes: {_first_line(error)}"
    found.graphs = backend.graphs
    return found


def run_compiled(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: dict[str, Any],
    dynamic: bool | None,
    within: contextlib.AbstractContextManager[object],
) -> None:
    """Compile one call with options of Inductor and run it, in inference mode, for its effects.

    `within` ends while the compiled code and what it was compiled for are still there.
    """
    root = _root()
    compiled = torch.compile(root, options=options, dynamic=dynamic, **ISOLATED)
    # Aliases, as marks of dynamic sizes stay on what is marked.
    args, kwargs = torch.utils._pytree.tree_map_only(Tensor, torch.detach, (args, dict(kwargs)))
    function = plain_module(function)
    with undisturbed(), torch.inference_mode(), within:
        Compiled(root, compiled, Pipeline(), dynamic)(function, *args, **kwargs)


@contextlib.contextmanager
def undisturbed(found: Trace | None = None) -> Iterator[None]:
    """Put back what Dynamo keeps between compilations: compiled code, counters, sizes seen.

    Code that was compiled before keeps what it has. The places of graph breaks go to `found`.
    """
    new: set[CodeType] = set()
    first_break = len(output_graph.graph_break_reasons)
    counted = {name: copy.copy(counter) for name, counter in counters.items()}
    sizes = pgo.get_code_state()
    sizes_before = copy.deepcopy(dict(sizes))

    def note(code: CodeType, new_code: CodeType) -> None:
        if not eval_frame._debug_get_cache_entry_list(code):
            new.add(code)

    handle = convert_frame.register_bytecode_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for code in new:
            eval_frame.reset_code(code)
        reasons = output_graph.graph_break_reasons[first_break:]
        del output_graph.graph_break_reasons[first_break:]
        if found is not None:
            # Each frame that a break goes through has a reason of its own.
            found.breaks.extend(dict.fromkeys(map(_break, reasons)))
            found.places.extend(map(Place.of, reasons))
        counters.clear()
        counters.update(counted)
        sizes.clear()
        sizes.update(sizes_before)


def _root() -> Callable[..., Any]:
    """A function that calls its first argument, known to nobody: Dynamo keeps what it compiles with
    a function's code, and what it has seen of sizes under its name."""

    def root(fn: Any, *args: Any, **kwargs: Any) -> Any:
        # What `moe_ops.compile` gives a twin to be called by is passed over.
        return fn._call_impl(*args, **kwargs) if isinstance(fn, nn.Module) else fn(*args, **kwargs)

    code = root.__code__.replace(co_name=f"explained_{next(_numbers)}")
    return FunctionType(code, globals())


def plain_module(function: Any) -> Any:
    """The module that torch.compile wrapped."""
    return getattr(function, "_orig_mod", function)


def _fakes(values: Any) -> Any:
    """A copy in which every tensor is fake."""
    try:
        with FakeCopyMode(FakeTensorMode(allow_non_fake_inputs=True)):
            return copy.deepcopy(values)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"a copy of the model, without its weights, is needed to explain it, but: {error}"
        ) from error


def _break(reason: Any) -> Break:
    frames = [frame for frame in reason.user_stack if frame.filename != __file__]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Break(reason=_first_line(reason.reason), where=where)


def _first_line(message: object) -> str:
    return next(iter(str(message).strip().splitlines()), type(message).__name__)


def lines(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """The module that each node comes from, see `layer_of`, and the node in one short line: name,
    op, arguments, and dtype and shape."""
    for node in graph.nodes:
        yield layer_of(node), _line(node)


def text(graph: fx.Graph) -> str:
    """A graph with one short line for each node."""
    return "\n".join(line for _, line in lines(graph) if line)


def inside(layers: Iterable[tuple[str, str]], module: str) -> str:
    """The lines, of those that `lines` gives, that come from a module or from what it is made
    of."""
    return "\n".join(
        line for layer, line in layers if layer == module or layer.startswith(f"{module}.")
    )


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_plain(node.args[0])}"
    kind = _kind(node.meta.get("val"))
    if node.op == "placeholder":
        return f"{node.name}: {kind}"
    target = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
    namespace = f"{node.target.namespace}." if hasattr(node.target, "namespace") else ""
    call = f"{node.name} = {namespace}{target}({', '.join(_arguments(node))})"
    return call + (f"  # {kind}" if kind else "")


def _arguments(node: fx.Node) -> list[str]:
    """The arguments of a node as texts. For our ops defaults are left out, and arguments that have
    a default are named."""
    named = {k: v for k, v in node.kwargs.items() if k not in ("layout", "device", "pin_memory")}
    positional: list[Any] = list(node.args)
    if getattr(node.target, "namespace", "") == "moe_ops":
        positional = []
        schema = node.target._schema  # type: ignore[union-attr]
        for given, parameter in zip(node.args, schema.arguments, strict=False):
            if not parameter.has_default_value():
                positional.append(given)
            elif given != parameter.default_value:
                named[parameter.name] = given
    return [*map(_plain, positional), *(f"{k}={_plain(v)}" for k, v in named.items())]


def _plain(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_plain, x))}]"
    return x.name if isinstance(x, fx.Node) else str(x).removeprefix("torch.")


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "" if isinstance(value, (list, tuple)) else str(value)
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
