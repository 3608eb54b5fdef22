"""Which calls of a plan are compiled ahead, and for which calls that was done."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from moe_ops.backends import triton_ahead
from moe_ops.backends.triton_ahead import MOST, PlanAhead, numbers
from moe_ops.backends.triton_limits import max_tiny_tokens
from moe_ops.kernels.triton import ahead as compiler
from moe_ops.kernels.triton import replay
from moe_ops.ops.experts import ExpertsCall, experts
from tests.replaying import on_a_cpu

PLAN = "4:triton.tiny,64:triton.rows,:triton.grouped"
E, K, D, I = 8, 2, 64, 32  # noqa: E741


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Callable[[], object]]]]:
    """The calls of each compilation."""
    found: list[list[Callable[[], object]]] = []

    def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
        found.append([*calls])

    monkeypatch.setattr(compiler, "compile_ahead", compile_ahead)
    yield found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ExpertsCall]]:
    """The calls that backends run, with their names."""
    found: list[tuple[str, ExpertsCall]] = []
    for name in ("triton.tiny", "triton.rows", "triton.grouped", "triton.rows/rows"):
        table = experts.backends if name in experts.backends else experts.paths
        run = lambda call, name=name: found.append((name, call))  # noqa: E731
        monkeypatch.setitem(table, name, replace(table[name], run=run))
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that are collected ahead of calls on a CPU, which run as on a GPU."""
    found: list[str] = []

    def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
        launches = compiler.collected(calls).launches
        found.extend(kernel.fn.__name__ for kernel, _, _ in launches)

    monkeypatch.setattr(compiler, "compile_ahead", compile_ahead)
    monkeypatch.setattr(experts, "_plans", {})
    triton_ahead.of_plan.cache_clear()
    with on_a_cpu(monkeypatch):
        yield found


def call(T: int = 3, **changes: Any) -> ExpertsCall:
    made = ExpertsCall(
        x_TD=torch.zeros(T, D, dtype=torch.bfloat16),
        weights_TK=torch.zeros(T, K),
        ids_TK=torch.zeros(T, K, dtype=torch.int32),
        w13_EFD=torch.zeros(E, 2 * I, D, dtype=torch.bfloat16),
        w2_EDI=torch.zeros(E, D, I, dtype=torch.bfloat16),
    )
    return replace(made, **changes)


def test_backends_get_numbers_of_rows_that_are_theirs(ran: list[tuple[str, ExpertsCall]]) -> None:
    for run in PlanAhead(experts, PLAN).calls(call()):
        run()
    rows = {name: [c.x_TD.shape[0] for n, c in ran if n == name] for name, _ in ran}
    assert rows == {
        "triton.grouped": [*numbers(65, MOST)][::-1],
        "triton.rows": [*numbers(5, 64)][::-1],
        "triton.tiny": [4, 3, 2, 1],
    }
    for _, c in ran:
        T = c.x_TD.shape[0]
        assert c.x_TD.shape == (T, D) and c.weights_TK.shape == c.ids_TK.shape == (T, K)
        assert c.w13_EFD.shape == (E, 2 * I, D) and c.w2_EDI.shape == (E, D, I)


def test_numbers_hold_the_ends_each_small_one_and_eight_for_each_power_of_two() -> None:
    found = [*numbers(3, 5000)]
    assert found[:14] == [*range(3, 17)] and found[-1] == 5000
    assert len([n for n in found if 1024 < n <= 2048]) == 8
    assert {n % 2 for n in found if n > 1024} == {0, 1}


def test_a_backend_gets_no_more_rows_than_it_takes(ran: list[tuple[str, ExpertsCall]]) -> None:
    for run in PlanAhead(experts, ":triton.tiny").calls(call()):
        run()
    assert [c.x_TD.shape[0] for _, c in ran] == [*range(1, max_tiny_tokens(call()) + 1)][::-1]


@pytest.mark.parametrize("name", ["triton.rows", "triton.rows/rows"])
def test_a_plan_for_one_number_is_compiled_for_it(
    name: str, ran: list[tuple[str, ExpertsCall]], compiled: list[Any]
) -> None:
    plan = PlanAhead(experts, name)
    for T in (20, 20, 30):
        plan.compile(call(T))
    assert len(compiled) == 2
    for run in (run for calls in compiled for run in calls):
        run()
    assert [(n, c.x_TD.shape[0]) for n, c in ran] == [(name, 20), (name, 30)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_of_a_plan_collects_what_others_launch(mode: Any, launched: list[str]) -> None:
    plan = "2:triton.tiny,64:triton.rows,:triton.grouped"
    with mode():
        got, want = (
            experts.planned(*experts.arguments.flat(call(3)), plan=p) for p in (plan, "reference")
        )
    torch.testing.assert_close(got, want)
    assert {"tiny_up", "tiny_down", "rows_up", "rows_down", "_grouped", "place_kernel"} <= {
        *launched
    }
    launched.clear()
    experts.planned(*experts.arguments.flat(call(1)), plan=plan)
    assert launched == []


def test_a_call_that_raises_is_no_harm_to_others(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("too many")

    def launch() -> None:
        replay.launch("a kernel", (1,), 3, size=4)

    with caplog.at_level("INFO", "moe_ops"):
        found = compiler.collected([fail, launch])
    assert found.launches == [("a kernel", (3,), {"size": 4, "enable_fp_fusion": True})]
    assert "not compiled ahead: ValueError: too many" in caplog.text


def test_what_was_begun_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, ended = threading.Event(), []

    def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
        ended.append(may_end.wait(120))

    monkeypatch.setattr(compiler, "compile_ahead", compile_ahead)
    monkeypatch.setattr(compiler, "compiles", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    plan = PlanAhead(experts, PLAN)
    for T in (3, 7):  # of one kind
        plan.begin(call(T), torch.device("cuda", 0))
    assert not ended
    may_end.set()
    plan.wait()
    assert ended == [True]
    plan.compile(call())
    plan.compile(call(ids_TK=torch.zeros(3, K, dtype=torch.int64)))
    assert ended == [True, True]


def test_what_cannot_be_begun_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_ahead(calls: Iterable[Callable[[], object]]) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(compiler, "compile_ahead", compile_ahead)
    monkeypatch.setattr(compiler, "compiles", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    plan = PlanAhead(experts, PLAN)
    with caplog.at_level("INFO", "moe_ops"):
        plan.begin(call(), torch.device("cuda", 0))
        plan.wait()
    assert "kernels are not compiled ahead: ValueError: no room" in caplog.text
    with pytest.raises(ValueError, match="no room"):
        plan.compile(call())


def test_other_backends_compile_nothing() -> None:
    assert [*PlanAhead(experts, "64:cpu,:aten").calls(call())] == []


CHANGES = {
    "nothing": ({}, 1),
    "other tokens": ({"x_TD": torch.ones(3, D, dtype=torch.bfloat16)}, 1),
    "tokens apart": ({"x_TD": torch.ones(3, 2 * D, dtype=torch.bfloat16)[:, :D]}, 2),
    "tokens that begin elsewhere": (
        {"x_TD": torch.ones(3 * D + 1, dtype=torch.bfloat16)[1:].view(3, D)}, 2,
    ),
    "another dtype": ({"ids_TK": torch.zeros(3, K, dtype=torch.int64)}, 2),
    "a bias": ({"b2_ED": torch.zeros(E, D, dtype=torch.bfloat16)}, 2),
    "an activation": ({"kind": "gelu"}, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_calls_alike_but_for_their_rows_are_compiled_once(name: str, compiled: list[Any]) -> None:
    changes, times = CHANGES[name]
    plan = PlanAhead(experts, PLAN)
    for T in (3, 1, 200):
        plan.compile(call(T))
    assert len(compiled) == 1
    plan.compile(call(**changes))
    assert len(compiled) == times
