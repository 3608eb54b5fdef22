"""Symbolic sizes under torch's flag: what they are told, and that it is no guard."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import sympy
import torch
import torch.fx.experimental._config as shape_config
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensor

import moe_ops
from moe_ops.ops import experts
from moe_ops.passes.inductor import sizes, slices
from moe_ops.passes.inductor.pipeline import Pipeline
from moe_ops.passes.rewriting.context import Options
from tests.passes.planned import any_rows, experts_call
from tests.passes.post_grad import Compiled


@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
@pytest.mark.parametrize("flag", [False, True])
def test_sizes_end_before_a_missing_end(flag: bool) -> None:
    found = []

    def hook(graph: fx.Graph) -> None:
        vals = [node.meta.get("val") for node in graph.nodes]
        (x,) = (v for v in vals[:2] if isinstance(v, FakeTensor))
        env, size = x.fake_mode.shape_env, x.shape[0]
        assert env is not None and isinstance(size, torch.SymInt)
        before, guards = env.var_to_range[size.node.expr], len(env.guards)
        sizes.tell(graph)
        found.append((before, env.var_to_range[size.node.expr]))
        assert len(env.guards) == guards
        assert isinstance(x.shape[0], torch.SymInt)

    x_TD = torch.randn(5, 4)
    torch._dynamo.maybe_mark_dynamic(x_TD, 0)
    with shape_config.patch(backed_size_oblivious=flag):
        result = Compiled(lambda x: x * 2, hook, dynamic=None)(x_TD)
    torch.testing.assert_close(result, x_TD * 2)
    ((before, after),) = found
    assert before.upper > slices.MISSING_END
    assert after.lower == before.lower
    bounded = flag and slices.NEEDS_END
    assert after.upper == (slices.MISSING_END - 1 if bounded else before.upper)


@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
@pytest.mark.parametrize("size", [1, 3])
def test_a_size_of_one_on_which_a_model_branches_is_a_number(size: int) -> None:
    """As torch has it without the flag; another size stays symbolic."""
    found = []

    def hook(graph: fx.Graph) -> None:
        def shape() -> list[object]:
            vals = [node.meta.get("val") for node in graph.nodes]
            return [*next(v for v in vals if isinstance(v, FakeTensor)).shape]

        before = shape()
        sizes.tell(graph)
        found.append((before, shape()))

    def model(x_TD: Tensor) -> Tensor:
        return x_TD * 2 if x_TD.shape[0] != 1 else x_TD * 3

    x_TD = torch.randn(size, 4)
    torch._dynamo.maybe_mark_dynamic(x_TD, 0)
    with shape_config.patch(backed_size_oblivious=True):
        result = Compiled(model, hook, dynamic=None)(x_TD)
    torch.testing.assert_close(result, model(x_TD))
    ((before, after),) = found
    assert isinstance(before[0], torch.SymInt)
    assert after == [1, 4] if size == 1 else isinstance(after[0], torch.SymInt)


@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
def test_a_guard_that_inductor_adds_fixes_a_size_too() -> None:
    """Inductor pairs sizes by their hints, so it may take a size of 1 for a number."""
    found = []

    def hook(graph: fx.Graph) -> None:
        vals = [node.meta.get("val") for node in graph.nodes]
        x_TD = next(v for v in vals if isinstance(v, FakeTensor))
        sizes.tell(graph)
        env, symbol = x_TD.fake_mode.shape_env, x_TD.shape[0].node.expr
        assert env is not None and env.evaluate_expr(sympy.Eq(symbol, 1))
        found.append((symbol, env.replace(symbol)))

    x_TD = torch.randn(1, 4)
    torch._dynamo.maybe_mark_dynamic(x_TD, 0)
    with shape_config.patch(backed_size_oblivious=True):
        Compiled(lambda x: x * 2, hook, dynamic=None)(x_TD)
    ((symbol, number),) = found
    assert symbol.is_Symbol and number == 1


def test_a_graph_without_symbolic_sizes_is_left_alone() -> None:
    result = Compiled(lambda x: x + 1, sizes.tell)(torch.zeros(3))
    assert result.tolist() == [1, 1, 1]


@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
def test_calls_of_two_threads_that_overlap_leave_torch_as_it_was() -> None:
    """The first to begin is the first to end."""
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    found = {}

    def flag() -> bool:
        return bool(getattr(shape_config, sizes.OBLIVIOUS))

    def own_attention() -> bool:
        return sizes.TRACED in sizes.ATTENTION.py_kernels

    def first() -> None:
        first_in.set()
        second_in.wait(300)

    def second() -> None:
        second_in.set()
        first_out.wait(300)
        found["second, after the first"] = flag()
        assert own_attention() == sizes.ASKS_FOR_ONE
        found["attention was seen"] = True

    def call(function: Callable[[], None], ready: threading.Event | None = None) -> None:
        if ready is not None:
            ready.wait(300)
        sizes.call_oblivious(function)
        found[f"{function.__name__}, outside"] = flag()

    before = flag()
    assert not own_attention()
    one = threading.Thread(target=call, args=(first,))
    other = threading.Thread(target=call, args=(second, first_in))
    one.start()
    other.start()
    one.join()
    first_out.set()
    other.join()
    assert found["second, after the first"] and found["attention was seen"]
    assert found["second, outside"] == before == flag()
    assert not own_attention()


@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
@pytest.mark.parametrize(("first", "least"), [(5, 2), (1, 0)])
def test_while_inductor_works_a_size_that_was_several_is(first: int, least: int) -> None:
    """Of one that was 1 nothing is assumed; afterwards the ranges are as they were."""
    ranges = []

    def hook(graph: fx.Graph) -> None:
        vals = [node.meta.get("val") for node in graph.nodes]
        x = next(v for v in vals if isinstance(v, FakeTensor))
        env, symbol = x.fake_mode.shape_env, x.shape[0].node.expr
        before = env.var_to_range[symbol]
        with sizes.assuming():
            sizes.tell(graph)
            ranges.append(env.var_to_range[symbol].lower)
            with sizes.as_they_are():
                assert env.var_to_range[symbol].lower == before.lower
            assert env.var_to_range[symbol].lower == ranges[-1]
        assert env.var_to_range[symbol].lower == before.lower
        sizes.tell(graph)  # elsewhere nothing is
        assert env.var_to_range[symbol].lower == before.lower

    x_TD = torch.randn(first, 4)
    torch._dynamo.maybe_mark_dynamic(x_TD, 0)
    with shape_config.patch(backed_size_oblivious=True):
        Compiled(lambda x: x * 2, hook, dynamic=None)(x_TD)
    assert ranges[0] == 2 if least == 2 else ranges[0] < 2


@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
def test_a_plan_that_is_made_for_several_tokens_has_a_backend_for_one() -> None:
    pipeline = Pipeline(Options(thresholds=((1, "cpu"), (None, "aten"))))
    args = experts_call()

    def hook(graph: fx.Graph) -> None:
        with sizes.assuming():
            pipeline(graph)

    any_rows(args)
    assert len(args[0]) > 1
    with shape_config.patch(backed_size_oblivious=True):
        Compiled(lambda *tensors: experts(*tensors), hook, dynamic=None)(*args)
    (choice,) = pipeline.runs[0].choices
    assert choice.text == "1:cpu,:aten"


@pytest.mark.slow
def test_one_graph_still_serves_one_token() -> None:
    """Softmax over tokens and products of them: loops that Inductor splits by what it assumes. The
    second compilation finds the graph in a cache, which keeps it with its guards.
    """

    class Model(nn.Module):
        def forward(self, x_TD: Tensor) -> Tensor:
            scores = x_TD @ x_TD.T
            sink = scores.new_zeros(scores.shape[0], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[:, :-1] @ x_TD

    model = Model()
    with fresh_cache(), config.patch(fx_graph_cache=True):
        for hits in (0, 1):
            torch._dynamo.reset()
            counters.clear()
            fast = moe_ops.compile(model)
            with torch.inference_mode():
                for T in (5, 1, 2, 33, 1):
                    x_TD = torch.randn(T, 8)
                    torch.testing.assert_close(fast(x_TD), model(x_TD))
            assert counters["stats"]["unique_graphs"] == 1
            assert counters["aot_autograd"]["autograd_cache_hit"] == hits


@pytest.mark.skipif(not sizes.FIXES_LATE, reason="this torch learns it from the guard")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_guard_fixes_a_size_before_a_graph_is_traced_again(rows: int) -> None:
    found = []

    def look(graph: fx.GraphModule, inputs: list[object]) -> fx.GraphModule:
        vals = [node.meta.get("example_value") for node in graph.graph.nodes]
        size = next(val for val in vals if isinstance(val, FakeTensor)).shape[0]
        assert isinstance(size, torch.SymInt)
        before = size.node.expr.is_number
        sizes.fix_traced()
        found.append((before, size.node.expr.is_number))
        return graph

    x_TD = torch.randn(rows, 4)
    torch._dynamo.maybe_mark_dynamic(x_TD, 0)
    compiled = torch.compile(lambda x: x * 2 if x.shape[0] == 1 else x * 3, backend=look)
    sizes.call_oblivious(compiled, x_TD)
    assert found == [(False, rows == 1)]


# Sequences, and rows of the mask: one for each, or one for all.
@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("calls", "graphs"),
    [
        pytest.param([(2, 2), (1, 1), (3, 3)], 1, id="of_each"),
        pytest.param([(3, 1), (1, 1), (2, 2), (1, 1)], 2, id="of_all_then_of_each"),
    ],
)
def test_one_sequence_has_the_graph_of_several_under_a_mask(
    calls: list[tuple[int, int]], graphs: int, backend: str
) -> None:
    def attend(q_BHSD: Tensor, k_BHTD: Tensor, mask: Tensor) -> Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q_BHSD, k_BHTD, k_BHTD * 2, attn_mask=mask)

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(attend, backend=backend)
    for B, rows in calls:
        mask = torch.rand(rows, 1, 5, 7) < 0.7
        mask[..., 0] = True
        given = torch.randn(B, 2, 5, 8), torch.randn(B, 2, 7, 8), mask
        for x in given:
            if len(x) == B:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        with torch.no_grad():
            torch.testing.assert_close(sizes.call_oblivious(compiled, *given), attend(*given))
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.skipif(not sizes.HAS_OBLIVIOUS, reason="this torch lacks the flag")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_guard_may_fix_one_sequence_before_its_mask_is_read(backend: str) -> None:
    def attend(x_BSD: Tensor, mask_BSS: Tensor) -> Tensor:
        if x_BSD.shape[0] == 1:
            x_BSD = x_BSD + 1
        q_BHSD = x_BSD.view(x_BSD.shape[0], 5, 2, 8).transpose(1, 2)
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q_BHSD, q_BHSD, q_BHSD, attn_mask=mask_BSS[:, None])

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    for B in (1, 2, 1):
        given = torch.randn(B, 5, 16), torch.ones(B, 5, 5).tril() > 0
        with torch.no_grad():
            torch.testing.assert_close(sizes.call_oblivious(compiled, *given), attend(*given))
