"""How big the code gets: files, functions, signatures."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.sources import LINKED, ROOT, modules


def sources() -> list[Path]:
    folders = ("moe_ops", *LINKED, "tests", "examples")
    found = {p.resolve() for f in folders for p in (ROOT / f).rglob("*") if p.is_file()}
    return sorted(p for p in found if p.suffix in (".py", ".cpp", ".cu", ".h"))


def is_kernel(path: Path) -> bool:
    return (ROOT / "moe_ops" / "kernels") in path.parents


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its signature and its docstring."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def long_functions(source: str, most: int) -> list[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    return [f"{f.name}: {body_lines(f)} lines" for f in found if body_lines(f) > most]


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources()}
    assert len(lengths) > 30
    long = [
        f"{path.relative_to(ROOT)}: {n} lines, at most {800 if is_kernel(path) else 400}"
        for path, n in lengths.items()
        if n > (800 if is_kernel(path) else 400)
    ]
    assert not long, "\n".join(long)


def test_the_architecture_fits_on_a_screen() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= 70


def test_no_function_is_too_long() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in sources()
        if path.suffix == ".py"
        for found in long_functions(path.read_text(), 150 if is_kernel(path) else 60)
    ]
    assert not long, "\n".join(long)


def test_signature_and_docstring_do_not_count() -> None:
    source = (
        'def f(\n    a,\n    b,\n):\n    """One.\n\n    Two.\n    """\n    a = b\n    return a\n'
    )
    assert long_functions(source, 2) == []
    assert long_functions(source, 1) == ["f: 2 lines"]


MOST_PARAMETERS = 8
# What takes more, and why that is no burden to who calls it.
MANY_PARAMETERS = {
    "options of a user's, each with a default and given by name": {
        "moe_ops/layer/module.py: MoELayer.__init__",
        "moe_ops/layer/options.py: Routing",
        "moe_ops/parallel/config.py: ParallelConfig",
        "moe_ops/parallel/config.py: ParallelConfig.of",
        "moe_ops/planning/layers.py: Shape",
        "moe_ops/weights/experts.py: load_expert",
    },
    "filled from the options of a command": {
        "moe_ops/bench/cells.py: Grid",
        "moe_ops/bench/task_model.py: Recipe",
    },
    "what a backend says of itself, given by name": {
        "moe_ops/registry/registration.py: Registration.backend",
    },
    "filled from the arguments of Op.backend, which are fewer": {
        "moe_ops/registry/backend.py: Backend",
    },
    "a row of a table or a report, which one function writes and others read": {
        "moe_ops/bench/accuracy.py: Accuracy",
        "moe_ops/bench/cells.py: Cell",
        "moe_ops/bench/counters.py: Kernel",
        "moe_ops/bench/ep_simulated.py: Simulated",
        "moe_ops/bench/loading.py: Loading",
        "moe_ops/bench/results.py: Results",
        "moe_ops/bench/stages.py: StageCell",
        "moe_ops/bench/task_scores.py: TaskCell",
        "moe_ops/bench/train_cells.py: TrainCell",
        "moe_ops/estimate/measured.py: Run",
        "moe_ops/graphs/report.py: StepsReport",
        "moe_ops/planning/plan.py: Choice",
        "moe_ops/planning/tuned.py: TunedLayer",
        "passes/explain/explanation.py: Explanation",
        "passes/explain/explanation.py: Region",
        "passes/report/summary.py: Summary",
    },
    "what one function found and hands to the next": {
        "moe_ops/bench/step.py: StepLayer",
        "moe_ops/estimate/sizes.py: Layer",
        "moe_ops/layer/operands.py: Operands",
        "moe_ops/published/model.py: _Plan",
        "moe_ops/weights/checkpoint.py: Loading",
        "moe_ops/weights/layouts.py: Coding",
        "moe_ops/weights/shards.py: ShardPlan",
        "passes/rewriting/experts_region.py: Experts",
    },
    "those of the function of transformers in whose place it stands": {
        f"moe_ops/generation/linear_functions.py: {name}"
        for name in ("chunked_delta_rule", "scanned", "updated_state")
    },
}
# The functions of transformers' linear layers that ours stand for.
LINEAR = ("chunked_delta_rule", "convolved", "scanned", "stepped_delta_rule", "updated_state")
# The methods of transformers' GenerationMixin that ours stand for.
GENERATE = (
    "__call__", "generate", "prepare_inputs_for_generation", "_sample",
    "_update_model_kwargs_for_generation", "_valid_auto_compile_criteria", "_beam_search",
    "_unless_refused", "_sampled", "_prefill", "generate_batch", "_assisted_decoding",
    "_get_candidate_generator",
)  # fmt: skip
# Those of its caches by which layers add to them.
UPDATES = ("update", "update_conv_state", "update_recurrent_state")
# The methods of transformers' HfQuantizer that ours stand for.
QUANTIZER = (
    "__init__", "validate_environment", "_process_model_before_weight_loading",
    "_process_model_after_weight_loading",
)  # fmt: skip
# What takes parameters that it does not name, and why.
WATCHED = (  # of modules, while a model is recorded or replayed
    "Counted.forward", "CountedOutside.__call__", "Watched.__call__", "WatchedInside._call_impl",
    "watched",
)  # fmt: skip
WHOLE = ("call", "_call_module", "Watch.__call__")
UNNAMED_PARAMETERS = {
    "the arguments of a block, a cache or a collective, which it passes on": {
        "moe_ops/halves/run.py: two_halves",
        "moe_ops/invariant/compare.py: Alone.forward",
        "moe_ops/halves/caches.py: _View.update",
        "moe_ops/bench/halves.py: Stretched._noted",
    },
    "options that are fields of a dataclass, by which they are checked": {
        "moe_ops/compiler.py: compile",
        "moe_ops/layer/module.py: MoELayer.__init__",
        "moe_ops/compiler.py: compile_config",
        "moe_ops/compiler.py: backend",
        "moe_ops/__init__.py: _Backend.__call__",
        "passes/inductor/compiled.py: inductor_options",
        "moe_ops/registry/backend.py: Backend.changed",
        "moe_ops/backends/flashinfer/options.py: flashinfer_options",
        "passes/explain/api.py: explain",
        "moe_ops/compiler.py: explain",
    },
    "the arguments of an op, which its record names": {
        "moe_ops/registry/record.py: prototype",
        "moe_ops/registry/formulas.py: _ByFormula.forward",
        *(f"moe_ops/registry/spec.py: Op.{name}" for name in ("__call__", "reference", "refusals")),
        *(
            f"moe_ops/registry/spec.py: Op.{name}"
            for name in ("_run", "_run_recorded", "_run_planned")
        ),
        "moe_ops/registry/invariance.py: _planned",
        "moe_ops/exporting/tables.py: refuse",
        "moe_ops/registry/spec.py: checked",
        "moe_ops/registry/spec.py: planned",
        "moe_ops/backends/flashinfer/cutlass.py: run_alike",
        "passes/lower.py: body",
        *(f"moe_ops/registry/rules/flops.py: {name}" for name in ("counted", "_grouped")),
        "moe_ops/registry/rules/autocast.py: run",
        "moe_ops/registry/rules/vmap.py: Vmapped.run",
    },
    "what an installed function of another package is given": {
        "moe_ops/backends/flashinfer/package.py: call",
    },
    "whatever vLLM calls the method in whose place it stands with": {
        "moe_ops/integrations/vllm/method.py: ExpertsMethod.create_weights",
    },
    "whatever transformers calls the function in whose place it stands with": {
        "moe_ops/restricted/models.py: _refuse_to_save",
        "moe_ops/generation/lease.py: Lease.read",
        "moe_ops/generation/fallback.py: generate",
        "moe_ops/generation/fallback.py: MayFallBack.__call__",
        *(f"moe_ops/generation/generate.py: QuickGenerate.{name}" for name in GENERATE),
        "moe_ops/generation/generate.py: prepare",
        *(f"moe_ops/generation/linear_functions.py: {name}" for name in LINEAR),
        "moe_ops/generation/linear_layers.py: ours_or_own",
        "moe_ops/forward/masks.py: bool_mask",
        "moe_ops/forward/masks.py: float_mask",
        "moe_ops/generation/one_query.py: one_query_attention",
        "moe_ops/generation/one_query.py: one_query_or_eager",
        "moe_ops/generation/latents.py: latents_or_stock",
        "moe_ops/generation/sample.py: sample",
        "moe_ops/forward/by_layers.py: ByLayers._decode",
        "moe_ops/forward/layer_cache.py: Filled.update",
        "moe_ops/forward/layer_cache.py: Incoming.update",
        "moe_ops/generation/slots.py: SlotLayer.update",
        *(f"moe_ops/forward/kept.py: Arriving.{name}" for name in UPDATES),
        *(f"moe_ops/forward/kept.py: Continuing.{name}" for name in UPDATES),
        *(f"moe_ops/forward/kept.py: Stepping.{name}" for name in UPDATES),
        "moe_ops/hf/optimize.py: OptimizedRouter.forward",
        "moe_ops/hf/routed.py: RecordingRouter.forward",
        "moe_ops/hf/routed.py: ReplayingRouter.forward",
        "moe_ops/installed.py: refuse",
        "moe_ops/hf/stored.py: _refuse",
        "moe_ops/hf/pretrained.py: MoeOpsConfig.__init__",
        *(f"moe_ops/hf/pretrained.py: MoeOpsQuantizer.{name}" for name in QUANTIZER),
        "moe_ops/published/loader.py: LoadingConfig.__init__",
        "moe_ops/published/loader.py: Quantizer._process_model_after_weight_loading",
    },
    "whatever peft calls the function in whose place it stands with": {
        "moe_ops/hf/adapters/wrapped.py: AdaptedExperts.forward",
    },
    "whatever torch calls the function in whose place it stands with": {
        "moe_ops/prepared.py: HoldsExperts._load_from_state_dict",
        "moe_ops/quant/module.py: HoldsCodes._load_from_state_dict",
        "passes/explain/trace.py: Backend._inner",
        "passes/inductor/net.py: Net.__call__",
        "moe_ops/compiler.py: CapturingBackend.__call__",
        "passes/inductor/sizes.py: _denied",
        "passes/inductor/sizes.py: _guards",
    },
    "the arguments of a model or a function that it is given": {
        "moe_ops/forward/loops.py: AroundLoops.__call__",
        *(f"moe_ops/forward/whole.py: {name}" for name in WHOLE),
        "moe_ops/generation/fallback.py: told_step",
        *(f"moe_ops/recorded/watch.py: {name}" for name in WATCHED),
        "moe_ops/generation/wide.py: with_last_states",
        "passes/inductor/layer_region.py: LayerRegion.__call__",
        "passes/inductor/layer_region.py: LayerRegion._run",
        "moe_ops/forward/by_layers.py: ByLayers.__call__",
        "moe_ops/forward/regions.py: ByKind.__call__",
        "moe_ops/forward/regions.py: _call_layer",
        "moe_ops/forward/regions.py: call",
        "moe_ops/forward/regions.py: call_module",
        "moe_ops/graphs/capture.py: GraphRunner.__call__",
        "moe_ops/graphs/capture.py: GraphRunner.warmup",
        "moe_ops/graphs/repeated.py: Repeated.__call__",
        "moe_ops/graphs/capture.py: _count_part",
        "moe_ops/interop/interrupts.py: call_compiled",
        "moe_ops/interop/code_objects.py: call",
        "moe_ops/testing.py: reference_of",
        "moe_ops/weights/writer.py: Writer._submit",
        "passes/inductor/compiled.py: ByLayers.__call__",
        "passes/inductor/compiled.py: Compiled.__call__",
        "passes/inductor/compiled.py: Compiled._run",
        "passes/inductor/compiled.py: Compiled._traced",
        "passes/explain/trace.py: root",
        "passes/inductor/sizes.py: call_oblivious",
    },
    "one tuple, which `replay` hands on": {
        "moe_ops/backends/triton.py: _launch_experts",
        "moe_ops/backends/triton_batched.py: _launch",
        "moe_ops/backends/triton_adapters.py: _launch_saving",
        "moe_ops/backends/triton_adapters.py: _launch_backward",
        "moe_ops/backends/triton_training.py: _launch_saving",
        "moe_ops/backends/triton_training.py: _launch_backward",
        "moe_ops/backends/triton_twice.py: _launch_first",
    },
    "tensors by the names that an error gives them": {
        "moe_ops/ops/expert_gemm.py: _check_absent",
        "moe_ops/checks/shapes.py: check_devices",
    },
    "a list whose items have no one type: targets of nodes, sizes, what a key is made of": {
        "passes/inductor/cache_key.py: digest",
        *(
            f"passes/rewriting/graph.py: {name}"
            for name in ("call", "has_shape", "is_call", "output")
        ),
        "passes/rewriting/experts_region.py: only_user",
        "passes/routing/scores.py: bare",
    },
}


def definitions(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes; methods with the name of their class."""
    tree = ast.parse(source)
    owners = {
        f: f"{c.name}." for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for f in c.body
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield owners.get(node, "") + node.name, node


def parameters(node: ast.AST) -> list[str]:
    """The parameters of a function besides self, or of the constructor that a dataclass gets."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg)
        return [a.arg for a in given if a is not None and a.arg not in ("self", "cls")]
    assert isinstance(node, ast.ClassDef)
    if not any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        return []
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign)]
    given = [f for f in fields if "ClassVar" not in ast.unparse(f.annotation)]
    return [ast.unparse(f.target) for f in given if "init=False" not in ast.unparse(f)]


def takes_unnamed(node: ast.AST) -> bool:
    """Whether a function takes any keyword, or any number of values of any type."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    rest = node.args.vararg
    kind = ast.unparse(rest.annotation) if rest is not None and rest.annotation else "Any"
    return node.args.kwarg is not None or (rest is not None and kind in ("Any", "object"))


def found_in_sources(what: Callable[[ast.AST], bool]) -> set[str]:
    return {
        f"{module}: {name}"
        for module in modules()
        if not is_kernel(module.path)
        for name, node in definitions(module.path.read_text())
        if what(node)
    }


def is_record_of_an_op(name: str) -> bool:
    """Its fields declare the op's arguments."""
    return name.startswith(("moe_ops/ops/", "moe_ops/decode_ops/")) and name.endswith("Call")


def test_no_signature_is_too_long() -> None:
    found = found_in_sources(lambda node: len(parameters(node)) > MOST_PARAMETERS)
    assert {f for f in found if not is_record_of_an_op(f)} == set().union(*MANY_PARAMETERS.values())


def test_who_takes_unnamed_parameters_says_why() -> None:
    assert found_in_sources(takes_unnamed) == set().union(*UNNAMED_PARAMETERS.values())


SIGNATURES = """
class A:
    def f(self, a, b, *, c): ...

def f(a, *b: int): ...

def g(*a): ...

def h(**a: int): ...

@dataclass(frozen=True)
class B:
    kind: ClassVar[str] = "b"
    a: int
    b: list[int] = field(init=False)
"""


def test_parameters_are_counted() -> None:
    found = {name: (len(parameters(n)), takes_unnamed(n)) for name, n in definitions(SIGNATURES)}
    assert found == {
        "A": (0, False),
        "A.f": (3, False),
        "f": (2, False),
        "g": (1, True),
        "h": (0, True),
        "B": (1, False),
    }
