"""Calls like those that ran before are neither checked nor picked for; all others are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ops import Op, experts, moe, using
from moe_ops.conformance.samples import samples
from moe_ops.registry import memo
from moe_ops.registry.backend import is_aligned
from moe_ops.testing import CASES
from tests.chosen import in_turn
from tests.registry.memo.throwaway import (
    BOTH,
    SETTING,
    Asked,
    RememberedCall,
    by_backend,
    tensors,
    twice,
)

BY_NAME = {case.name: case for case in CASES}


def test_calls_alike_are_asked_about_twice(made: Op, asked: Asked) -> None:
    x, w = tensors()
    for _ in range(2):
        assert asked.of(lambda: made(x, w, name="a")) == BOTH
    assert asked.of(lambda: made(x, w, name="a")) == []
    # The tensors, whatever they hold, and the numbers are those of the call.
    assert made(torch.full((3, 4), 5.0), w.clone(), name="a").tolist() == [[10.0] * 4] * 3
    assert asked.of(lambda: made(x, w, 3.0, name="a")) == BOTH
    assert made(x, w, 3.0, name="a")[0, 0] == 3.0 and made(x, w, 2.0, name="a")[0, 0] == 2.0
    assert asked.of(lambda: made(x, w, name="a")) == []


X, W = tensors()
OTHERS: dict[str, Callable[[Op], object]] = {
    "shape": lambda made: made(torch.ones(4, 4), W),
    "shape_of_another": lambda made: made(X, torch.zeros(3, 4)),
    "strides": lambda made: made(torch.ones(4, 3).T, W),
    "strides_of_another": lambda made: made(X, torch.zeros(4, 2).T),
    "dtype": lambda made: made(X.bfloat16(), W),
    "dtype_of_another": lambda made: made(X, W.double()),
    "requires_grad": lambda made: made(X, W.clone().requires_grad_()),
    "parameter": lambda made: made(X, nn.Parameter(W, requires_grad=False)),
    "optional_tensor": lambda made: made(X, W, bias=W),
    "string": lambda made: made(X, W, name="b"),
    "number": lambda made: made(X, W, times=4.0),
    "number_of_another_type": lambda made: made(X, W, times=2),
    "by_name": lambda made: made(X, w=W),
    "default_by_position": lambda made: made(X, W, 2.0),
    "conjugated": lambda made: made(X, torch.zeros(2, 4, dtype=torch.complex64).conj()),
    "inference_tensor": lambda made: made(in_inference(lambda: torch.ones(3, 4)), W),
    "inference_mode": lambda made: in_inference(lambda: made(X, W)),
    "grad_mode": lambda made: without_grad(lambda: made(X, W)),
}


def in_inference(call: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return call()


def without_grad(call: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return call()


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_whatever_tells_calls_apart_is_seen(
    made: Op, asked: Asked, call: Callable[[Op], object]
) -> None:
    twice(lambda: made(X, W))
    assert asked.of(lambda: made(X, W)) == []
    assert asked.of(lambda: call(made)) == BOTH
    assert asked.of(lambda: made(X, W)) == []


def set_other(t: Tensor) -> None:
    t.set_(torch.zeros(5, 4))  # type: ignore[call-overload]


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "resize_": lambda t: t.resize_(1, 4),
    "set_": set_other,
    "data": lambda t: setattr(t, "data", torch.zeros(2, 4, dtype=torch.float64)),
    "requires_grad_": lambda t: t.requires_grad_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "data_of_other_strides": lambda t: setattr(t, "data", torch.zeros(4, 2).T),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_a_tensor_that_changes_in_place_is_seen(
    made: Op, asked: Asked, change: Callable[[Tensor], object]
) -> None:
    w = W.clone()
    twice(lambda: made(X, w))
    assert asked.of(lambda: made(X, w)) == []
    change(w)
    assert asked.of(lambda: made(X, w)) == BOTH


def test_tensors_of_bytes_that_begin_elsewhere_are_seen(made: Op, asked: Asked) -> None:
    for dtype, seen in ((torch.uint8, BOTH), (torch.float8_e4m3fn, BOTH), (torch.int32, [])):
        held = torch.zeros(9, dtype=torch.uint8).new_zeros(64).view(dtype)
        first, second = held[:8].view(2, 4), held[1:9].view(2, 4)
        twice(lambda first=first: made(X, first))
        assert asked.of(lambda first=first: made(X, first)) == []
        assert asked.of(lambda second=second: made(X, second)) == seen
        assert asked.of(lambda first=first: made(X, first)) == []
    third = torch.zeros(64, dtype=torch.uint8)[16:24].view(2, 4)
    made(X, torch.zeros(2, 4, dtype=torch.uint8))
    assert asked.of(lambda: made(X, third)) == []


def begun(t: Tensor, elements: int) -> Tensor:
    """The same values elsewhere, where so many elements come before them."""
    return torch.cat((t.new_zeros(elements), t.flatten()))[elements:].view(t.shape)


def test_any_tensor_that_begins_elsewhere_is_seen_where_a_backend_says_so(
    made: Op, asked: Asked
) -> None:
    made.remembers("fast", SETTING, aligned=True)
    twice(lambda: made(X, W))
    for first, second in ((begun(X, 1), W), (X, begun(W, 3))):
        assert asked.of(lambda f=first, s=second: made(f, s)) == BOTH
    for first, second in ((begun(X, 4), W), (X, begun(W, 8))):
        assert asked.of(lambda f=first, s=second: made(f, s)) == []


def test_a_backend_that_was_passed_over_is_asked_for_tensors_that_begin_as_memory_does(
    made: Op, asked: Asked
) -> None:
    made.backend(
        "picky", reads=made.optional, priority=1, supports=lambda call: refusal_of(call.w)
    )(lambda_of(7.0))
    made.remembers("picky", aligned=True)
    for _ in range(3):
        assert made(X, begun(W, 1))[0, 0] == 2.0
    for _ in range(3):
        assert made(X, W)[0, 0] == 7.0


def refusal_of(w: Tensor) -> str | None:
    return None if is_aligned(w) else "reads whole words"


def test_a_context_variable_that_decides_is_seen(made: Op, asked: Asked) -> None:
    twice(lambda: made(X, W))
    token = SETTING.set("other")
    assert asked.of(lambda: made(X, W)) == BOTH
    assert asked.of(lambda: made(X, W)) == []
    SETTING.set("".join(("oth", "er")))  # an equal one decides the same
    assert asked.of(lambda: made(X, W)) == []
    SETTING.reset(token)
    assert asked.of(lambda: made(X, W)) == []


def test_a_context_variable_may_have_no_value(made: Op, asked: Asked) -> None:
    bare: ContextVar[str] = ContextVar("tests_memo_bare")
    made.remembers("fast", bare)
    twice(lambda: made(X, W))
    assert asked.of(lambda: made(X, W)) == []
    token = bare.set("")
    assert asked.of(lambda: made(X, W)) == BOTH
    bare.reset(token)


def test_a_forced_backend_is_picked(made: Op) -> None:
    for _ in range(2):
        made(X, W)
    made.backend("never", supports=lambda call: "is never able")(by_backend)
    made.remembers("never")
    for _ in range(3):
        made(X, W)
    with using("never", made), pytest.raises(NotImplementedError, match="is never able"):
        made(X, W)
    with using("reference", made):
        assert torch.equal(made(X, W), X * 2)


def test_a_new_backend_is_picked(made: Op, asked: Asked) -> None:
    for _ in range(3):
        assert made(X, W)[0, 0] == 2.0
    made.backend("faster", reads=made.optional, priority=1)(lambda_of(7.0))
    made.remembers("faster")
    assert made(X, W)[0, 0] == 7.0
    made.emulates("faster", lambda call: False)
    assert asked.of(lambda: made(X, W)) == ["check"]


def lambda_of(value: float) -> Callable[[RememberedCall], Tensor]:
    def run(call: RememberedCall) -> Tensor:
        return torch.full_like(call.x, value)

    return run


def test_a_backend_that_does_not_say_what_decides_is_always_asked(made: Op, asked: Asked) -> None:
    answers = iter([None, None, "is tired", None])
    made.backend("moody", supports=lambda call: next(answers), priority=1)(lambda_of(7.0))
    assert [float(made(X, W)[0, 0]) for _ in range(4)] == [7.0, 7.0, 2.0, 7.0]


def test_a_call_with_a_fault_raises_each_time(made: Op, asked: Asked) -> None:
    good = X.clone()
    for _ in range(3):
        made(good, W, name="a")
    for _ in range(3):
        with pytest.raises(ValueError, match=r"bad: bad \(3, 4\)"):
            made(good, W, name="bad")
    good.resize_(12)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad: a \(12,\)"):
            made(good, W, name="a")
    with pytest.raises(TypeError, match="name must be a str, got an int: 1"):
        made(X, W, name=1)
    with pytest.raises(TypeError, match="w must be a Tensor, got None"):
        made(X, None)


def test_tensors_are_not_held(made: Op) -> None:
    x, w = tensors()
    for _ in range(3):
        made(x, w)
    held = [weakref.ref(t) for t in (x, w)]
    del x, w
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_what_cannot_be_told_apart_is_asked_about(made: Op, asked: Asked) -> None:
    """A tensor given twice, and one without strides."""
    sparse = torch.eye(3, 4).to_sparse()
    for call in (lambda: made(X, X), lambda: made(X, sparse)):
        for _ in range(3):
            assert asked.of(call) == BOTH


def test_there_is_an_end_to_what_is_kept(
    made: Op, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "MOST_KEYS", 3)
    alike = lambda: made.memo.find((Tensor, Tensor))  # noqa: E731
    for rows in range(10):
        twice(lambda rows=rows: made(torch.ones(rows, 4), W))
        made(X, torch.zeros(rows, 4))
        assert 0 < len(alike()._known) <= 3 and len(alike()._seen) <= 3
    for rows in range(2 * memo.MOST_OF_A_KEY):
        made(X, torch.zeros(rows, 4))
    assert max(map(len, alike()._known.values())) == memo.MOST_OF_A_KEY
    assert asked.of(lambda: made(X, torch.zeros(rows, 4))) == []


def test_what_comes_once_is_not_kept(made: Op) -> None:
    for rows in range(20):
        made(torch.ones(rows, 4), W)
    assert made.memo.find((Tensor, Tensor))._known == {}


def bound(call: RememberedCall) -> Callable[..., Tensor] | None:
    rows = call.x.shape[0]

    def run(x: Tensor, w: Tensor, *rest: Any, **named: Any) -> Tensor:
        return torch.full_like(x, 100.0 + rows)

    return run if call.name == "bound" else None


def test_a_function_of_calls_alike_runs_them(made: Op) -> None:
    made.remembers("fast", alike=bound)
    assert [float(made(X, W, name="bound")[0, 0]) for _ in range(4)] == [2.0, 2.0, 103.0, 103.0]
    assert [float(made(X, W)[0, 0]) for _ in range(3)] == [2.0, 2.0, 2.0]
    more = torch.ones(5, 4)
    assert [float(made(more, W, name="bound")[0, 0]) for _ in range(3)] == [2.0, 2.0, 105.0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("of", [experts, moe], ids=lambda of: of.name)
def test_our_backends_say_what_decides(of: Op, device: str) -> None:
    assert [b.name for b in of.candidates(device)[:-1] if b.asks is None] == []


@in_turn(
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str),
    pytest.mark.parametrize("of", [experts, moe], ids=lambda of: of.name),
)
def test_a_call_like_others_gives_what_they_did(of: Op, dtype: torch.dtype) -> None:
    """All samples in a row, thrice, so that each meets what was kept of the others."""
    for case in ("odd", "one_token"):
        made = samples(of.name, BY_NAME[case], dtype)
        first = [of(*args) for _, args in made]
        for _, args in made:
            of(*args)
        for (label, args), want in zip(made, first, strict=True):
            found = of.memo.find(tuple(map(type, args))).find(args)
            assert found is not None and found.run is of.pick(of.call(*args)).run, label
            assert torch.equal(of(*args), want), label
