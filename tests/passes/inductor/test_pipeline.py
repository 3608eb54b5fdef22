"""The pipeline: order, counts, what it chains with, what it leaves alone, and what it prints."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops import passes
from moe_ops.passes.inductor import pipeline as module
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.rewriting.context import Context, Options
from moe_ops.planning import tuned

aten = torch.ops.aten


def replace(graph: fx.Graph, context: Context, old: object, new: object) -> int:
    """Call `new` wherever `old` is called; the old nodes stay, without users."""
    found = [n for n in graph.nodes if n.target is old and n.users]
    for node in found:
        with graph.inserting_before(node):
            other = graph.call_function(new, node.args)  # type: ignore[arg-type]
        other.meta.update(node.meta)
        node.replace_all_uses_with(other)
        context.rewrote("replace", node.name, "", f"by {new}")
    return len(found)


def sigmoid_to_tanh(graph: fx.Graph, context: Context) -> int:
    return replace(graph, context, aten.sigmoid.default, aten.tanh.default)


def tanh_to_relu(graph: fx.Graph, context: Context) -> int:
    return replace(graph, context, aten.tanh.default, aten.relu.default)


def nothing(graph: fx.Graph, context: Context) -> int:
    context.refuse("nothing", "x", "", "never does anything")
    return 0


def out_of_order(graph: fx.Graph, context: Context) -> int:
    first, *_, last = (n for n in graph.nodes if n.op == "call_function")
    first.prepend(last)
    return 1


class Neg(CustomGraphPass):
    """A hook that negates what is returned."""

    def __init__(self, uuid: object = "neg") -> None:
        self.key = uuid

    def __call__(self, graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        (value,) = output.all_input_nodes
        with graph.inserting_before(output):
            negated = graph.call_function(aten.neg.default, (value,))
        negated.meta.update(value.meta)
        output.replace_input_with(value, negated)

    def uuid(self) -> object:
        return self.key


def two_sigmoids(x: Tensor) -> Tensor:
    return torch.sigmoid(torch.sigmoid(x) + 1)


def graph_of(fn: object = two_sigmoids) -> fx.Graph:
    return make_fx(fn)(torch.randn(3)).graph  # type: ignore[arg-type]


def calls(graph: fx.Graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"]


BOTH = (sigmoid_to_tanh, tanh_to_relu)


def test_passes_run_in_order_and_leave_nothing_dead_behind() -> None:
    graph = graph_of()
    Pipeline(passes=BOTH)(graph)
    assert calls(graph) == ["relu", "add", "relu"]
    graph = graph_of()
    Pipeline(passes=BOTH[::-1])(graph)
    assert calls(graph) == ["tanh", "add", "tanh"]


def test_what_was_dead_before_stays() -> None:
    graph = graph_of()
    first = next(n for n in graph.nodes if n.op == "call_function")
    with graph.inserting_after(first):
        graph.call_function(aten.exp.default, (first,))
    Pipeline(passes=(nothing,))(graph)
    assert calls(graph) == ["sigmoid", "exp", "add", "sigmoid"]
    Pipeline(passes=BOTH)(graph)
    assert calls(graph) == ["relu", "exp", "add", "relu"]


@pytest.mark.parametrize(
    ("stop_after", "left"),
    [("sigmoid_to_tanh", "tanh"), ("nothing", "tanh"), ("tanh_to_relu", "relu"), (None, "relu")],
)
def test_stop_after_is_inclusive(stop_after: str | None, left: str) -> None:
    graph = graph_of()
    chosen = (sigmoid_to_tanh, nothing, tanh_to_relu)
    Pipeline(Options(stop_after=stop_after), passes=chosen)(graph)
    assert calls(graph) == [left, "add", left]


def test_an_unknown_stop_after_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"stop_after='tan' is no pass; .* sigmoid_to_tanh, tanh_"):
        Pipeline(Options(stop_after="tan"), passes=BOTH)


def test_lists_and_paths_are_options_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned.write(path, {})
    lists = Options(thresholds=[[64, "cpu"], [None, "aten"]], tuned=path)  # type: ignore[arg-type]
    tuples = Options(thresholds=((64, "cpu"), (None, "aten")), tuned=str(path))
    assert (lists, hash(lists)) == (tuples, hash(tuples))
    assert Pipeline(lists) == Pipeline(tuples)
    assert Pipeline(lists).uuid() == Pipeline(tuples).uuid()


def test_options_that_cannot_be_found_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tuned table"):
        Pipeline(Options(tuned=str(tmp_path / "none.json")))


def test_each_graph_is_recorded() -> None:
    ours = Pipeline(passes=(sigmoid_to_tanh, nothing))
    ours(graph_of())
    ours(graph_of(torch.exp))
    first, second = ours.runs
    assert [(p.name, p.rewrites) for p in first.passes] == [("sigmoid_to_tanh", 2), ("nothing", 0)]
    assert all(p.seconds > 0 for p in first.passes)
    assert [n.node for n in first.rewrites] == ["sigmoid", "sigmoid_1"]
    assert [n.text for n in first.refusals] == ["never does anything"]
    assert (first.nodes_before, first.nodes_after, first.skipped) == (5, 5, None)
    assert [p.rewrites for p in second.passes] == [0, 0]
    assert second.rewrites == ()


def test_a_broken_graph_names_the_pass() -> None:
    with pytest.raises(RuntimeError, match="the pass out_of_order left a broken graph"):
        Pipeline(passes=(sigmoid_to_tanh, out_of_order))(graph_of())


def test_without_passes_it_runs_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, graph = Pipeline(), graph_of()
    monkeypatch.setattr(passes, "PIPELINE", (sigmoid_to_tanh,))
    ours(graph)
    assert calls(graph) == ["tanh", "add", "tanh"]


class Aware(getattr(module, "InferenceAware")):  # type: ignore[misc]  # noqa: B009
    """A hook that writes down what it is told of the graph."""

    def __init__(self) -> None:
        self.told: list[bool | None] = []

    def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
        self.told.append(is_inference)

    def uuid(self) -> object:
        return "aware"


def test_a_chained_hook_runs_first_and_on_training_graphs_too() -> None:
    aware, graph = Aware(), graph_of()
    ours = Pipeline(chained=[Neg(), aware], passes=(nothing,))
    ours(graph, True)
    ours(graph, False)
    assert calls(graph) == ["sigmoid", "add", "sigmoid", "neg", "neg"]
    assert aware.told == ([True, False] if module.KNOWS_INFERENCE else [None, None])

    seen: list[list[str]] = []
    graph = graph_of()
    Pipeline(chained=lambda g: seen.append(calls(g)), passes=BOTH)(graph)
    assert seen == [["sigmoid", "add", "sigmoid"]]
    assert calls(graph) == ["relu", "add", "relu"]


def test_training_graphs_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    ours, graph = Pipeline(passes=BOTH), graph_of()
    ours(graph, False)
    ours(graph, False)
    assert calls(graph) == ["sigmoid", "add", "sigmoid"]
    assert [run.skipped for run in ours.runs] == [module.TRAINING] * 2
    assert [r.message for r in caplog.records] == [
        f"moe_ops leaves a graph alone: {module.TRAINING}"
    ]


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("model__0_inference_3", True),
        ("model__1_forward_0", False),
        ("model__1_backward_0", False),
        ("model___0", True),
        ("forward_model__2_inference_0", True),
    ],
)
def test_torch_2_11_is_asked_for_the_name_of_the_graph(
    name: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "get_aot_graph_name", lambda: name)
    graph = graph_of()
    Pipeline(passes=BOTH)(graph)
    assert ("relu" in calls(graph)) == runs


def test_equal_by_what_they_do() -> None:
    hook = Neg()
    ours = Pipeline(Options(strict=True), chained=hook, passes=BOTH)
    same = Pipeline(Options(strict=True), chained=(hook,), passes=BOTH)
    ours(graph_of())
    assert ours == same
    assert hash(ours) == hash(same)
    assert ours.uuid() == same.uuid()
    for other in (
        Pipeline(Options(strict=False), chained=hook, passes=BOTH),
        Pipeline(Options(strict=True), chained=Neg(), passes=BOTH),
        Pipeline(Options(strict=True), passes=BOTH),
        Pipeline(Options(strict=True), chained=hook, passes=BOTH[:1]),
        "a string",
    ):
        assert ours != other


def test_copies_and_pickles() -> None:
    ours = Pipeline(Options(strict=True), passes=BOTH)
    ours(graph_of())
    assert copy.deepcopy({"options": ours})["options"] is ours
    again = pickle.loads(pickle.dumps(ours))
    assert again == ours
    assert again.runs == []
    assert len(ours.runs) == 1
    assert again.uuid() == ours.uuid()


def test_dumps_are_named_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "moe_ops"):
        Pipeline(Options(dump=True), passes=(sigmoid_to_tanh, nothing, tanh_to_relu))(graph_of())
    dumps = [r.getMessage() for r in caplog.records if "=====" in r.getMessage()]
    assert [d.split("=====")[1].strip() for d in dumps] == [
        "moe_ops_01_before_sigmoid_to_tanh",
        "moe_ops_01_after_sigmoid_to_tanh",
        "moe_ops_03_before_tanh_to_relu",
        "moe_ops_03_after_tanh_to_relu",
    ]
    assert ["aten.sigmoid" in d for d in dumps] == [True, False, False, False]
    assert ["aten.tanh" in d for d in dumps] == [False, True, True, False]

    caplog.clear()
    with caplog.at_level(logging.DEBUG, "moe_ops"):
        Pipeline(passes=BOTH)(graph_of())
    assert not [r for r in caplog.records if "=====" in r.getMessage()]


# From here on with Inductor.


@pytest.fixture
def no_caches():
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False):
        yield


def as_callable(ours: Pipeline) -> object:
    """The way torch 2.11 calls a hook: it does not say whether the graph is for inference."""
    return lambda graph: ours(graph)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(lambda ours: ours, id="told"),
        pytest.param(as_callable, id="not_told", marks=pytest.mark.every),
    ],
)
def test_inference_is_rewritten_and_training_is_not(hook, no_caches) -> None:
    x = torch.randn(5, requires_grad=True)
    for grad, want in ((False, torch.relu(torch.relu(x) + 1)), (True, two_sigmoids(x))):
        ours = Pipeline(passes=BOTH)
        with torch.set_grad_enabled(grad):
            options = {"post_grad_custom_post_pass": hook(ours)}
            got = torch.compile(two_sigmoids, options=options)(x)
        torch.testing.assert_close(got, want)
        if grad:
            got.sum().backward()
            assert x.grad is not None
        assert [run.skipped for run in ours.runs] == ([module.TRAINING] * 2 if grad else [None])


@pytest.mark.slow
def test_the_hook_in_the_config_may_be_a_list(no_caches) -> None:
    if not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"):
        pytest.skip("before 2.13 torch takes one hook")
    x = torch.randn(5)
    with inductor_config.patch(post_grad_custom_post_pass=[Neg(), Pipeline(passes=BOTH)]):
        got = torch.compile(two_sigmoids)(x)
    torch.testing.assert_close(got, -torch.relu(torch.relu(x) + 1))


@pytest.mark.slow
def test_regions_compiled_once_are_rewritten_once(no_caches) -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        return torch.sigmoid(x) * 2

    def model(x: Tensor) -> Tensor:
        return torch.sigmoid(region(region(x)))

    ours = Pipeline(passes=BOTH)
    x = torch.randn(5)
    options = {"post_grad_custom_post_pass": ours}
    with torch.inference_mode():
        got = torch.compile(model, fullgraph=True, options=options)(x)
    torch.testing.assert_close(got, torch.relu(torch.relu(torch.relu(x) * 2) * 2))
    assert [[p.rewrites for p in run.passes] for run in ours.runs] == [[1, 1], [1, 1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*trying to debug `torch.compile`")
def test_depyf_writes_a_file_for_each_stage(tmp_path: Path) -> None:
    depyf = pytest.importorskip("depyf", reason="depyf is not installed")
    torch._dynamo.reset()
    x = torch.randn(5)
    options = {"post_grad_custom_post_pass": Pipeline(Options(dump=True), passes=BOTH)}
    compiled = torch.compile(two_sigmoids, options=options)
    with depyf.prepare_debug(str(tmp_path)):
        got = compiled(x)
    torch.testing.assert_close(got, torch.relu(torch.relu(x) + 1))
    files = {p.name.split(".")[1]: p.read_text() for p in tmp_path.glob("*.moe_ops_*.py")}
    assert sorted(files) == [
        "moe_ops_01_after_sigmoid_to_tanh",
        "moe_ops_01_before_sigmoid_to_tanh",
        "moe_ops_02_after_tanh_to_relu",
        "moe_ops_02_before_tanh_to_relu",
    ]
    assert "aten.tanh" not in files["moe_ops_01_before_sigmoid_to_tanh"]
    assert "aten.tanh" in files["moe_ops_01_after_sigmoid_to_tanh"]
    assert "aten.relu" in files["moe_ops_02_after_tanh_to_relu"]
