"""The passes as one Inductor hook: run in order, counted, timed, dumped, hashed for its caches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._dynamo.utils import lazy_format_graph_code
from torch._functorch.aot_autograd import get_aot_graph_name
from torch._inductor import custom_graph_pass

from moe_ops.checks.signature import did_you_mean
from moe_ops.interop.interrupts import let_through
from moe_ops.passes.inductor import cache_key, kernels, partitions, sizes, slices
from moe_ops.passes.pick_backend import generic_op
from moe_ops.passes.report import telling
from moe_ops.passes.report.found import LIFTS, NONE, Found, Look, Unlifted, keep
from moe_ops.passes.report.summary import summarize
from moe_ops.passes.rewriting.context import Context, Note, Options
from moe_ops.planning import tuned
from moe_ops.planning.plan import Choice
from moe_ops.registry.invariance import INVARIANT

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass as InferenceAware

    from moe_ops.passes import Pass
else:
    InferenceAware = getattr(
        custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass
    )

HOOK = "post_grad_custom_post_pass"  # of Inductor's config
KNOWS_INFERENCE = hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass")  # torch 2.12
TRAINING = (
    "it is a training graph, in which no code is lifted into ops; give a model of transformers to "
    "moe_ops.compile or moe_ops.optimize, or call it under no_grad"
)
OWN_ROUTERS = (
    "a router that trains is code that autograd differentiates: the model's, or the definition of "
    "`route`"
)
TAKEN_APART = (
    "batch_invariant of inductor_options is for graphs without gradients: autograd takes routers "
    "apart before any pass; compile under torch.no_grad(), or train by "
    "moe_ops.compile(model, batch_invariant=True)"
)
# What a training graph gets: backends for the ops that it holds, and linear layers that have to be
# batch invariant.
IN_TRAINING = ("invariant_linears", "pick_backend", "lower")
INVARIANT_BY = ("invariant_linears", "pick_backend")

Hook = Callable[..., Any]
Hooks = Hook | list[Hook] | tuple[Hook, ...] | None

log = logging.getLogger("moe_ops")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRun:
    """What one pass did to one graph."""

    name: str
    rewrites: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRun:
    """What the pipeline did to one graph, or, in `skipped`, why it did nothing."""

    passes: tuple[PassRun, ...] = ()
    rewrites: tuple[Note, ...] = ()
    refusals: tuple[Note, ...] = ()
    choices: tuple[Choice, ...] = ()
    nodes_before: int = 0
    nodes_after: int = 0
    skipped: str | None = None
    found: Found | None = None  # None: the passes that look for MoE layers did not run


class Pipeline(InferenceAware):
    """`PIPELINE`, for `torch._inductor.config.post_grad_custom_post_pass`.

    Called once per graph, regions of `nested_compile_region` included, it rewrites the graph in
    place and appends to `runs`. In graphs of training, forward and backward, ops get backends, and
    nothing is lifted: what a backward graph needs saved would keep most regions from matching.
    `chained` is what the hook held before; it runs first, on every graph.

    Two pipelines are equal if options, chained hooks and passes are; `runs` says nothing of that
    and is not copied or pickled. Raises ValueError for a `stop_after` that names no pass, or one
    ahead of those that batch_invariant needs, and for a `tuned` that is no table, and
    FileNotFoundError for one that is no file.
    """

    def __init__(
        self,
        options: Options | None = None,
        chained: Hooks = None,
        passes: tuple[Pass, ...] | None = None,  # None: PIPELINE
    ) -> None:
        self.options = options or Options()
        self.chained = as_tuple(chained)
        self.runs: list[GraphRun] = []
        self.found: list[Found] = []  # of graphs from caches, too
        self.of_modules = telling.OfModules(self)
        self._passes = passes
        tuned.users_table(self.options.tuned)  # raises unless it can be read
        names = [name_of(p) for p in self.passes]
        if self.options.stop_after not in (None, *names):
            raise ValueError(
                f"stop_after={self.options.stop_after!r} is no pass; "
                f"there are {', '.join(names) or 'none yet'}"
                f"{did_you_mean(self.options.stop_after, names)}"
            )
        if self.options.batch_invariant and self.options.stop_after is not None:
            left = names[names.index(self.options.stop_after) + 1 :]
            _require_invariance(self.options.stop_after, left)

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes in their order, all of them."""
        if self._passes is not None:
            return self._passes
        from moe_ops.passes import PIPELINE

        return PIPELINE

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        """Rewrite a graph in place. `is_inference`: None asks AOTAutograd, which compiles it."""
        if is_inference is None:
            is_inference = _is_inference()
        for hook in self.chained:
            if KNOWS_INFERENCE and isinstance(hook, InferenceAware):
                hook(graph, is_inference)
            else:
                hook(graph)
        self._listen()
        sizes.tell(graph)
        slices.settle(graph)
        run = self._run(graph) if is_inference else self._train(graph)
        partitions.leave_outside(graph)
        is_told = run.found is not None and run.found.layers  # with the other layers of the model
        if run.skipped and not is_told and not any(before.skipped for before in self.runs):
            log.warning("moe_ops leaves a graph alone: %s", TRAINING)
        self.runs.append(run)
        if run.found is not None:
            keep(run.found)
            self._require_all(run.found)
        if self._passes is None:  # those that are given are for somebody who looks at `runs`
            kernels.begin(graph)

    def uuid(self) -> str | None:
        """A hash of all that decides what the passes do; None, which bypasses Inductor's caches, if
        that cannot be told: a chained hook, pass or backend without a hash, or a dump asked for,
        which a cached graph would not make.
        """
        self._listen()
        if self.options.dump:
            log.info("compiled graphs are not cached: options.dump wants every pass to run")
            return None
        keys = [
            *(_hook_key(hook) for hook in self.chained),
            *(_pass_key(p) for p in self.passes),
            cache_key.registry_key(),
        ]
        if None in keys:
            return None
        return cache_key.digest(
            self.options,
            keys,
            cache_key.sources_key(),
            cache_key.environment_key(),
            cache_key.tables_key(self.options.tuned),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pipeline) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.options)  # chained hooks need not be hashable

    def __repr__(self) -> str:
        return f"Pipeline({self.options}, chained={self.chained})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "runs": [], "found": []}
        del state["of_modules"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.of_modules = telling.OfModules(self)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What is equal of equal pipelines."""
        return self.options, self.chained, self._passes

    def _listen(self) -> None:
        if self._passes is None:  # those that are given are for somebody who looks at `runs`
            telling.listen(self)

    @property
    def _looks(self) -> bool:
        """Whether the pipeline looks for MoE layers."""
        return {*LIFTS} <= {name_of(p) for p in self.passes}

    def _train(self, graph: fx.Graph) -> GraphRun:
        """Give backends to the ops of a training graph. There is nothing to tell of a backward,
        and it is not batch invariant, as it sums over rows. Raises NotImplementedError for a
        forward that has to be, of which autograd has seen routers ahead of any pass."""
        is_backward = "backward" in _kind()
        if self.options.batch_invariant and not is_backward and not INVARIANT.get():
            raise NotImplementedError(TAKEN_APART)
        look = Look.at(graph) if self._looks and not is_backward else None
        if any(generic_op(node) is not None for node in graph.nodes):
            passes = tuple(p for p in self.passes if name_of(p) in IN_TRAINING)
            options = replace(self.options, batch_invariant=False) if is_backward else self.options
            return self._pass(graph, passes, look, Unlifted(TRAINING, OWN_ROUTERS), options)
        found = None if look is None else look.untouched(TRAINING)
        return GraphRun(skipped=TRAINING, found=found)

    def _require_all(self, found: Found) -> None:
        """Under `strict` raise RuntimeError for experts that were left alone."""
        if self.options.strict and self._passes is None:  # `explain`, which has more, tells of them
            telling.refuse(summarize(found.model or "a graph", None, [found]))

    def _run(self, graph: fx.Graph) -> GraphRun:
        return self._pass(graph, self.passes, Look.at(graph) if self._looks else None)

    def _pass(
        self,
        graph: fx.Graph,
        passes: tuple[Pass, ...],
        look: Look | None,
        unlifted: Unlifted = NONE,
        options: Options | None = None,
    ) -> GraphRun:
        """Run these passes; `unlifted` says why code is left as it is, where none of them lifts.
        `options`: None: those of the pipeline."""
        context = Context(options=options or self.options, for_all_sizes=sizes.as_they_are)
        dead = {node for node in graph.nodes if not node.users}
        before = len(graph.nodes)
        done = []
        for number, run in enumerate(passes, 1):
            done.append(self._run_one(f"{number:02}", run, graph, dead, context))
            if done[-1].name == self.options.stop_after:
                break
        return GraphRun(
            passes=tuple(done),
            rewrites=tuple(context.rewrites),
            refusals=tuple(context.refusals),
            choices=tuple(context.choices),
            nodes_before=before,
            nodes_after=len(graph.nodes),
            found=None if look is None else look.after(context, unlifted),
        )

    def _run_one(
        self, number: str, run: Pass, graph: fx.Graph, dead: set[fx.Node], context: Context
    ) -> PassRun:
        name = name_of(run)
        before = _snapshot(graph) if self.options.dump else None
        start = time.perf_counter()
        rewrites = run(graph, context)
        if rewrites:
            _drop_dead(graph, dead)
        seconds = time.perf_counter() - start
        log.debug("%s: %d rewrites in %.1f ms", name, rewrites, 1e3 * seconds)
        if before is not None and rewrites:
            _dump(f"moe_ops_{number}_before_{name}", before)
            _dump(f"moe_ops_{number}_after_{name}", _snapshot(graph))
        if rewrites:
            try:
                graph.lint()
            except Exception as error:
                let_through(error)
                raise RuntimeError(f"the pass {name} left a broken graph: {error}") from error
        return PassRun(name=name, rewrites=rewrites, seconds=seconds)


def _require_invariance(stop_after: str, left: list[str]) -> None:
    """Raise ValueError where passes end ahead of those that make a graph batch invariant."""
    missing = [name for name in INVARIANT_BY if name in left]
    if missing:
        raise ValueError(
            f"stop_after={stop_after!r} leaves out {' and '.join(missing)}, without which no graph "
            f"is batch invariant; stop after {missing[-1]} or a later pass, or leave out "
            "batch_invariant"
        )


def as_tuple(hooks: Hooks) -> tuple[Hook, ...]:
    """What the hook in Inductor's config holds: nothing, one, or (torch 2.13) a list or tuple."""
    if hooks is None:
        return ()
    return tuple(hooks) if isinstance(hooks, (list, tuple)) else (hooks,)


def name_of(run: Pass) -> str:
    """The name of a pass, by which `stop_after`, dumps and reports call it."""
    return getattr(run, "__name__", type(run).__name__)


def _kind() -> str:
    """What AOTAutograd calls the graph that is being compiled, such as 0_inference_1 or, with
    gradients, 0_forward_1."""
    return str(get_aot_graph_name().rpartition("__")[2])


def _is_inference() -> bool:
    """A graph outside of AOTAutograd infers."""
    return "forward" not in _kind() and "backward" not in _kind()


def _hook_key(hook: Hook) -> Any:
    key = hook.uuid() if isinstance(hook, custom_graph_pass.CustomGraphPass) else None
    if not key:
        log.info("compiled graphs are not cached: the chained hook %r has no uuid", hook)
    return key or None


def _pass_key(run: Pass) -> str | None:
    key = cache_key.function_key(run)
    if key is None:
        log.info("compiled graphs are not cached: the pass %s has no source", name_of(run))
    return key


def _drop_dead(graph: fx.Graph, dead: set[fx.Node]) -> None:
    """Erase what lost its last user; what was dead before stays, as Inductor leaves it too."""
    for node in reversed(graph.nodes):
        if not node.users and node not in dead and not node.is_impure():
            graph.erase_node(node)


def _snapshot(graph: fx.Graph) -> fx.GraphModule:
    """A copy of a graph to print: depyf exchanges the code of the module that it prints."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return fx.GraphModule(graph.owning_module or {}, copy)


def _dump(label: str, module: fx.GraphModule) -> None:
    """Name a graph to depyf, which writes a file of that name, and to the log."""
    log.debug("%s", lazy_format_graph_code(label, module))
