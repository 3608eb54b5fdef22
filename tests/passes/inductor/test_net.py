"""An error of Inductor in a graph that we rewrote: said once, and the graph runs as it was."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.graph import GraphLowering

import moe_ops
import moe_ops.passes
from moe_ops.passes.inductor import compiled, net
from moe_ops.passes.inductor.compiled import pipeline_of
from moe_ops.passes.inductor.net import Net
from moe_ops.passes.rewriting.context import Context

pytestmark = pytest.mark.slow


class Model(nn.Module):
    def forward(self, x_TD: Tensor) -> Tensor:
        return (x_TD.sin() + 1).relu()


def unfit(graph: fx.Graph, context: Context) -> int:
    """A pass that leaves what Inductor cannot lower: a sine with an argument too many."""
    found = [n for n in graph.nodes if n.target is torch.ops.aten.sin.default]
    for node in found:
        node.args = (*node.args, 2)
    return len(found)


def fit(graph: fx.Graph, context: Context) -> int:
    """A pass that changes nothing, and so is to blame for nothing."""
    return 0


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    torch._dynamo.reset()

    def put(*run: Callable[..., int]) -> None:
        monkeypatch.setattr(moe_ops.passes, "PIPELINE", run)

    return put


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [r for r in caplog.records if (r.name, r.levelno) == ("moe_ops", logging.WARNING)]
    return [r.getMessage() for r in records]


def test_the_graph_runs_as_it_was_and_the_cause_is_said_once(
    passes: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    passes(unfit)
    model = Model()
    fast = moe_ops.compile(model, dynamic=False)
    with caplog.at_level(logging.WARNING, "moe_ops"), torch.inference_mode():
        for rows in (3, 5):
            x_TD = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x_TD), model(x_TD))
    (said,) = warnings_of(caplog)
    assert "cannot compile it as rewritten" in said and "strict=True" in said
    runs = pipeline_of(fast).runs
    assert [("as rewritten" in (run.skipped or "")) for run in runs] == [True, True]


def test_whoever_waits_for_one_graph_is_told_the_model(
    passes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    def waiting(text: str) -> AbstractContextManager[None]:
        said.append(text)
        return nullcontext()

    monkeypatch.setattr(compiled, "waiting_for", waiting)
    monkeypatch.setattr(net, "waiting_at_least_for", waiting)
    passes(fit)
    fast = moe_ops.compile(Model(), dynamic=False)
    with torch.inference_mode():
        for rows in (3, 5, 5):
            fast(torch.randn(rows, 4))
    assert said == ["compiling Model"] * 3  # the first call, its graph, and that of other sizes


def test_strict_raises(passes: Callable[..., None]) -> None:
    passes(unfit)
    with pytest.raises(Exception, match="sin"), torch.inference_mode():
        moe_ops.compile(Model(), strict=True)(torch.randn(3, 4))


def test_a_graph_that_fails_as_it_was_too_runs_op_by_op(
    passes: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes(unfit)
    monkeypatch.setattr(GraphLowering, "codegen", None)
    model = Model()
    fast = moe_ops.compile(model)
    uncached = torch._inductor.config.patch(fx_graph_cache=False)
    with uncached, caplog.at_level(logging.WARNING, "moe_ops"), torch.inference_mode():
        for rows in (3, 5, 1, 5):
            x_TD = torch.randn(rows, 4)
            assert torch.equal(fast(x_TD), model(x_TD))
    rewritten, plain = warnings_of(caplog)[:2]
    assert "as rewritten" in rewritten
    assert "op by op" in plain and "not callable" in plain and torch.__version__ in plain


def test_an_error_in_a_graph_that_was_not_rewritten_is_raised(
    passes: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes(fit)

    def broken(graph: fx.Graph) -> None:
        unfit(graph, Context())

    with torch._inductor.config.patch(post_grad_custom_post_pass=broken):
        fast = moe_ops.compile(Model())
    with pytest.raises(Exception, match="sin"), torch.inference_mode():
        fast(torch.randn(3, 4))


def test_backends_of_equal_options_are_equal() -> None:
    one, same = (Net(moe_ops.inductor_options()) for _ in range(2))
    other = Net(moe_ops.inductor_options(strict=True))
    hooked = Net(moe_ops.inductor_options(), hooks=(("experts", print),))
    assert one == same and hash(one) == hash(same)
    assert one != other and one != hooked
    with pytest.raises(RuntimeError, match="no_such_option"):
        Net({**moe_ops.inductor_options(), "no_such_option": 1})


class Alarm(Exception):
    """What a caller's own signal handler raises."""


@pytest.mark.parametrize("dynamic", [None, False])
def test_what_a_signal_handler_raises_is_let_through_and_no_graph_is_kept(
    passes: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dynamic: bool | None,
) -> None:
    raised: list[Exception] = [TimeoutError("too late"), Alarm(), RuntimeError("stop")]

    def handler(number: int, frame: object) -> None:
        raise raised[0]

    lower = GraphLowering.run

    def interrupted(self: GraphLowering, *args: object) -> object:
        if raised:
            signal.raise_signal(signal.SIGUSR1)
        return lower(self, *args)

    passes(rewritten)
    model, x_TD = Model(), torch.randn(3, 4)
    fast = moe_ops.compile(model, dynamic=dynamic)
    monkeypatch.setattr(GraphLowering, "run", interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with caplog.at_level(logging.WARNING, "moe_ops"), torch.inference_mode():
            with torch._inductor.config.patch(fx_graph_cache=False):
                while raised:
                    with pytest.raises(type(raised[0])) as caught:
                        fast(x_TD)
                    assert caught.value is raised.pop(0)
            torch.testing.assert_close(fast(x_TD), model(x_TD))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not warnings_of(caplog) and not any(run.skipped for run in pipeline_of(fast).runs)


def rewritten(graph: fx.Graph, context: Context) -> int:
    """A pass that says it rewrote, so that the net would take the graph as it was."""
    return 1
