"""The registry: defining ops, their fakes and backends, and picking one of the backends."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from moe_ops import OPS, Op, expert_gemm, experts, fake_impls, moe, using
from moe_ops.registry import spec
from moe_ops.registry.backend import Rows
from moe_ops.registry.spec import op
from tests.calls import CALLS, calls

each_op = pytest.mark.parametrize("name", OPS)


@dataclass(slots=True)
class ScratchCall:
    x: Tensor
    times: float = 2.0


@dataclass(slots=True)
class OtherCall:
    x: Tensor
    times: float = 2.0


def check(call: ScratchCall) -> None:
    if call.x.dim() != 1:
        raise ValueError(f"x must have 1 axes, got shape {tuple(call.x.shape)}")


def scratch(call: ScratchCall) -> Tensor:
    """A throw-away op."""
    return call.x * call.times


def other(call: ScratchCall) -> Tensor:
    return call.x + call.times


def same(call: ScratchCall) -> Tensor:
    return call.x * call.times


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    """An op that exists for one test, with no backend but its reference."""
    with torch.library._scoped_library(spec.NAMESPACE, "FRAGMENT") as library:
        monkeypatch.setattr(spec, "_library", library)
        try:
            yield op(check=check)(scratch)
        finally:
            del OPS["scratch"]


X = torch.tensor([1.0, 3.0])
DOUBLE, PLUS_TWO = [2.0, 6.0], [3.0, 5.0]


def test_the_reference_is_the_last_resort(made: Op) -> None:
    assert made(X).tolist() == DOUBLE
    assert torch.ops.moe_ops.scratch(X).tolist() == DOUBLE
    assert made.__doc__ == "A throw-away op."
    assert repr(made) == "<op moe_ops.scratch(Tensor x, float times=2.0) -> Tensor>"


def test_an_op_is_defined_once(made: Op) -> None:
    with pytest.raises(ValueError, match=r"op moe_ops\.scratch is defined twice; rename one"):
        op(check=check)(scratch)
    assert OPS["scratch"] is made


def test_a_second_fake_raises(made: Op) -> None:
    made.fake(same)
    with pytest.raises(ValueError, match=r"moe_ops\.scratch has a fake already: same"):
        made.fake(other)


def test_a_backend_name_is_taken_once(made: Op) -> None:
    made.backend("fast")(other)
    for name in ("fast", "reference"):
        with pytest.raises(ValueError, match=f"moe_ops.scratch has a backend '{name}' already"):
            made.backend(name)(same)
    assert made.backends["fast"].run is other


def another_record(call: OtherCall) -> Tensor:
    return call.x


def another_result(call: ScratchCall) -> tuple[Tensor, Tensor]:
    return call.x, call.x


def flat(x: Tensor, times: float = 2.0) -> Tensor:
    return x


def bare(call):  # type: ignore[no-untyped-def]
    return call.x


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (another_record, "(OtherCall) -> Tensor"),
        (another_result, "(ScratchCall) -> tuple[torch.Tensor, torch.Tensor]"),
        (flat, "(Tensor, float) -> Tensor"),
        (bare, "(None) -> None"),
    ],
)
def test_a_backend_has_the_record_and_the_result_of_its_op(
    made: Op, run: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ValueError) as raised:
        made.backend("fast")(run)
    assert str(raised.value) == (
        f"backend 'fast' of moe_ops.scratch is a function {said}, but the op is one (ScratchCall) "
        "-> Tensor; take its record, and annotate argument and result"
    )
    assert list(made.backends) == ["reference"]


def test_earlier_backends_are_asked_first(made: Op) -> None:
    asked = []

    def refuse(name: str, reason: str | None) -> Callable[..., str | None]:
        return lambda *args, **kwargs: asked.append(name) or reason

    made.backend("first", supports=refuse("first", "is tired"))(same)
    made.backend("second", supports=refuse("second", None))(other)
    made.backend("third", supports=refuse("third", None))(same)
    assert made(X).tolist() == PLUS_TWO
    assert asked == ["first", "second"]


def test_a_backend_of_another_device_is_not_asked(made: Op) -> None:
    made.backend("elsewhere", devices=("cuda",), supports=lambda *args: pytest.fail("asked"))(other)
    assert made(X).tolist() == DOUBLE
    assert [b.name for b in made.candidates("cpu")] == ["reference"]
    assert [b.name for b in made.candidates("cuda")] == ["elsewhere", "reference"]


def test_a_backend_registered_after_a_call_is_asked_too(made: Op) -> None:
    before = made(X)
    made.backend("late")(other)
    assert [before.tolist(), made(X).tolist()] == [DOUBLE, PLUS_TWO]


def test_arguments_are_checked_before_any_backend(made: Op) -> None:
    made.backend("fast", supports=lambda *args: pytest.fail("asked"))(other)
    with pytest.raises(ValueError, match=r"x must have 1 axes, got shape \(1, 2\)"):
        made(X[None])


def test_supports_sees_what_the_caller_gave(made: Op) -> None:
    three = lambda call: None if call.times == 3 else "needs 3"  # noqa: E731
    made.backend("threes", reads=("times",), supports=three)(other)
    assert made(X).tolist() == DOUBLE
    assert made(X, 3.0).tolist() == [4.0, 6.0]
    assert made(x=X, times=3.0).tolist() == [4.0, 6.0]


def test_a_backend_with_too_many_rows_is_asked_after_the_others(made: Op) -> None:
    made.backend("few", rows=Rows(preferred=lambda call: 1), priority=1)(other)
    made.backend("never", supports=lambda *_: "is tired")(other)
    assert made(X[:1]).tolist() == [3.0]
    assert made(X).tolist() == PLUS_TWO, "nothing but the reference is left"
    made.backend("many")(same)
    assert [made.pick(ScratchCall(x)).name for x in (X[:1], X)] == ["few", "many"]
    with using("few"):
        assert made(X).tolist() == PLUS_TWO


def test_a_backend_that_can_run_no_more_rows_is_not_picked(made: Op) -> None:
    made.backend("few", rows=Rows(possible=lambda call: 1), priority=1)(other)
    assert [made.pick(ScratchCall(x)).name for x in (X[:1], X)] == ["few", "reference"]
    assert made.refusals(X[:1])["few"] is None
    assert made.refusals(X)["few"] == "takes at most 1 rows, got 2"
    with using("few"), pytest.raises(NotImplementedError, match="few: takes at most 1 rows"):
        made(X)


def test_using_forces_a_backend_inside_its_block(made: Op) -> None:
    made.backend("fast")(other)
    assert made(X).tolist() == PLUS_TWO
    with using("reference"):
        assert made(X).tolist() == DOUBLE
        with using("fast", made):
            assert made(X).tolist() == PLUS_TWO
            with using("reference", "scratch"):
                assert made(X).tolist() == DOUBLE
            assert made(X).tolist() == PLUS_TWO
        assert made(X).tolist() == DOUBLE
    assert made(X).tolist() == PLUS_TWO


def test_using_leaves_the_ops_it_does_not_name_alone(made: Op) -> None:
    made.backend("fast")(other)
    with using("reference", expert_gemm):
        assert made(X).tolist() == PLUS_TWO
    with using("reference", expert_gemm, made):
        assert made(X).tolist() == DOUBLE
    with using("reference", "scratch"), using("reference", expert_gemm):
        assert made(X).tolist() == DOUBLE


def test_the_inner_block_wins_over_an_outer_named_one(made: Op) -> None:
    made.backend("fast")(other)
    with using("fast", made), using("reference"):
        assert made(X).tolist() == DOUBLE


def test_using_refuses_names_that_nothing_has(made: Op) -> None:
    made.backend("fast")(other)
    with pytest.raises(ValueError, match="no op named gemm, mm; the ops are "):
        using("fast", made, "gemm", "mm").__enter__()
    with pytest.raises(ValueError, match="no backend 'slow' of scratch; there are fast, reference"):
        using("slow", made).__enter__()
    with pytest.raises(ValueError, match=r"no backend 'slow' of any op; there are .*fast"):
        using("slow").__enter__()


def test_a_forced_backend_that_cannot_run_lists_every_refusal(made: Op) -> None:
    made.backend("short", supports=lambda call: f"needs 1 element, got {call.x.numel()}")(other)
    made.backend("elsewhere", devices=("xpu", "cuda"))(other)
    made.backend("fast")(other)
    with using("short"), pytest.raises(NotImplementedError) as raised:
        made(X)
    assert_expected_inline(
        str(raised.value),
        """\
backend 'short' is forced, but moe_ops.scratch cannot run on it:
  reference: can run
  short: needs 1 element, got 2
  elsewhere: needs a tensor on cuda or xpu, got cpu
  fast: can run""",
    )


def test_a_forced_backend_that_an_op_has_not_says_how_to_name_ops(made: Op) -> None:
    with using("aten"), pytest.raises(NotImplementedError) as raised:
        made(X)
    assert_expected_inline(
        str(raised.value),
        """\
backend 'aten' is forced, but moe_ops.scratch cannot run on it:
  aten: not a backend of this op; using('aten', <ops>) forces it on some ops
  reference: can run""",
    )


def test_an_exception_in_the_block_leaves_nothing_forced(made: Op) -> None:
    made.backend("fast")(other)
    with pytest.raises(RuntimeError, match="oops"), using("reference"):
        raise RuntimeError("oops")
    assert made(X).tolist() == PLUS_TWO


def test_a_block_forces_nothing_in_other_threads(made: Op) -> None:
    made.backend("fast")(other)
    seen: list[list[float]] = []
    with using("reference"):
        thread = threading.Thread(target=lambda: seen.append(made(X).tolist()))
        thread.start()
        thread.join()
    assert seen == [PLUS_TWO]


def test_the_fake_gives_shapes_and_the_errors_of_the_op(made: Op) -> None:
    made.fake(lambda call: call.x.new_empty(call.x.shape))
    assert made(X.to("meta")).shape == (2,)
    with pytest.raises(ValueError, match=r"x must have 1 axes, got shape \(1, 2\)"):
        made(X[None].to("meta"))


def test_every_public_op_is_registered_under_its_name() -> None:
    assert sorted(OPS) == sorted(CALLS), "CALLS has a call of every op"
    assert sorted(OPS | spec.DECODE_OPS) == sorted(fake_impls.__all__)


@each_op
def test_op_is_a_torch_op_with_kernels_for_every_device(name: str) -> None:
    qualified = f"moe_ops::{name}"
    assert getattr(torch.ops.moe_ops, name).default is OPS[name].overload
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(qualified, key)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "Meta")


@each_op
def test_autograd_asks_the_op_and_no_planned_one(name: str) -> None:
    """A plan is for inference; an op in it costs nothing for gradients that nobody wants."""
    for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd"):
        for overload in (name, f"{name}.planned"):
            found = torch._C._dispatch_has_kernel_for_dispatch_key(f"moe_ops::{overload}", key)
            assert found == (overload == name and key == "Autograd"), f"{overload}: {key}"


@each_op
def test_op_wants_the_strides_of_eager_mode(name: str) -> None:
    assert torch.Tag.needs_exact_strides in OPS[name].overload.tags


@each_op
def test_a_bad_shape_gives_one_error_in_eager_mode_and_in_tracing(name: str) -> None:
    op, (first, *rest) = OPS[name], CALLS[name]
    said = f"must have {first.dim()} axes"
    with pytest.raises(ValueError, match=f"{said}, got shape") as eager:
        op(first[0], *rest)
    meta = [a.to("meta") if isinstance(a, Tensor) else a for a in (first[0], *rest)]
    with pytest.raises(ValueError, match=said) as traced:
        op(*meta)
    assert str(traced.value) == str(eager.value)


def ops_of(graph: fx.Graph) -> str:
    return "\n".join(
        str(node.target)
        for node in graph.nodes
        if node.op == "call_function" and "getitem" not in str(node.target)
    )


def test_the_reference_of_experts_unfuses_it() -> None:
    graph = make_fx(lambda *args: experts.reference(*args))(*CALLS["experts"]).graph
    assert_expected_inline(
        ops_of(graph),
        """\
moe_ops.dispatch.default
moe_ops.expert_gemm.default
moe_ops.activate.default
moe_ops.expert_gemm.default
moe_ops.combine.default""",
    )


def test_the_reference_of_moe_unfuses_it() -> None:
    graph = make_fx(lambda *args: moe.reference(*args))(*CALLS["moe"]).graph
    assert_expected_inline(
        ops_of(graph),
        """\
moe_ops.route.default
moe_ops.experts.default""",
    )


@each_op
def test_dynamo_sees_one_node_for_any_number_of_tokens(name: str) -> None:
    graphs: list[fx.Graph] = []

    def keep(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm

    args = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *args: OPS[name](*args), fullgraph=True, backend=keep, dynamic=True
    )
    got, want = compiled(*args), OPS[name](*args)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    # An exchange is kept where it is by a node behind it.
    kept = ["moe_ops.kept"] if OPS[name].keep is not None else []
    assert [ops_of(graph) for graph in graphs] == ["\n".join([f"moe_ops.{name}.default", *kept])]
    compiled(*calls(8)[name])
    assert len(graphs) == 1, "another number of tokens made another graph"
