"""Models whose forwards a decorator made are compiled by code of their class."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moe_ops
from moe_ops.interop.code_objects import compile_call, with_globals, with_own_code_object
from moe_ops.testing import Tol, assert_close
from tests.recompiling import few_graphs

D = 4
LIMIT = 2
TOL = Tol(1e-6, "the same sums")


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As transformers decorates: one code object for all."""

    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return function(self, *args, **kwargs)

    return wrapper


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)


def family(n: int) -> type[Base]:
    def forward(self: Base, x: Tensor, *, times: int = 2) -> Tensor:
        return self.inner(x) * times + n

    return type(f"Family{n}", (Base,), {"forward": decorated(forward)})


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    with few_graphs(LIMIT):
        yield


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="eager", dynamic=False)


def check(model: nn.Module, call: Callable[..., Tensor], *sizes: int) -> None:
    for T in sizes:
        x_TD = torch.randn(T, D)
        with torch.inference_mode():
            assert_close(call(x_TD, times=3), model(x_TD, times=3), TOL)


def test_each_class_has_the_whole_limit() -> None:
    before = graphs()
    for n in range(LIMIT + 1):
        model = family(n)()
        check(model, compile_call(model, eager), 3, 5)
    assert graphs() - before == 2 * (LIMIT + 1)


def test_models_of_one_class_share_graphs() -> None:
    kind, before = family(0), graphs()
    for _ in range(LIMIT + 1):
        model = kind()
        check(model, compile_call(model, eager), 3, 5)
    assert graphs() - before == 2


def test_compile_does_so() -> None:
    before = graphs()
    for n in range(LIMIT + 1):
        model = family(n)()
        check(model, moe_ops.compile(model), 3)
    assert graphs() - before == LIMIT + 1


def test_a_forward_that_was_replaced_is_what_runs() -> None:
    kind = family(0)
    first = kind()
    check(first, compile_call(first, eager), 3)
    kind.forward = decorated(lambda self, x, times: self.inner(x) - times)
    later = kind()
    check(later, compile_call(later, eager), 3)
    later.forward = functools.partial(lambda x, times: x * times)  # as accelerate puts it there
    check(later, compile_call(later, eager), 3)


@pytest.mark.parametrize("on", ["the module", "its class"])
def test_a_forward_that_is_replaced_later_is_what_runs(on: str) -> None:
    model = family(0)()
    call = compile_call(model, eager)
    check(model, call, 3)
    if on == "the module":
        model.forward = lambda x, times: x * times
    else:
        type(model).forward = decorated(lambda self, x, times: self.inner(x) - times)
    check(model, call, 3)


def test_a_class_that_calls_forward_in_its_own_way_does_so() -> None:
    class Own(family(0)):  # type: ignore[misc]
        def _call_impl(self, *args: Any, **kwargs: Any) -> Tensor:
            return super()._call_impl(*args, **kwargs) + 1

    model = Own()
    check(model, compile_call(model, eager), 3)


def test_decorators_of_torch_leave_each_class_the_whole_limit() -> None:
    before = graphs()
    for n in range(LIMIT + 1):
        kind = family(n)
        kind.forward = torch.no_grad()(
            with_own_code_object(kind.forward.__wrapped__, f"forward{n}")
        )
        for model in (kind(), kind()):
            check(model, compile_call(model, eager), 3, 5)
    assert graphs() - before == 2 * (LIMIT + 1)


def test_inside_a_larger_model_it_is_part_of_that_graph() -> None:
    model = family(0)()
    call = compile_call(model, eager)
    whole = torch.compile(lambda x, times: call(x, times=times), backend="eager", fullgraph=True)
    check(model, whole, 3)


def test_hooks_are_called() -> None:
    model, seen = family(0)(), []
    call = compile_call(model, eager)
    check(model, call, 3)
    model.register_forward_hook(lambda *_: seen.append(1))
    call(torch.randn(3, D))
    assert seen == [1]


def test_code_alone_is_new() -> None:
    made = with_own_code_object(D_from_here, "another")
    assert made(2, c=1) == D_from_here(2, c=1) == D + 2 + 7 + 1
    assert made.__code__ is not D_from_here.__code__ and made.__code__.co_name == "another"


def D_from_here(a: int, b: int = 7, *, c: int = 0) -> int:
    return D + a + b + c


FACTOR = 2.0


def scaled(x: float, *, plus: float = 1.0) -> float:
    """Reads a global."""
    return FACTOR * x + plus


def twice(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> float:
        return 2 * function(*args, **kwargs)

    return wrapper


def hidden(function: Callable[..., float]) -> Callable[..., float]:
    """A decorator that looks what it decorates up elsewhere."""
    table = [function]

    @functools.wraps(function)
    def wrapper(*args: Any) -> float:
        return table[0](*args)

    return wrapper


def test_a_copy_with_other_globals() -> None:
    made = with_globals(scaled, {"FACTOR": 5.0})
    assert (made(3.0), made(3.0, plus=0.0)) == (16.0, 15.0)
    assert (scaled(3.0), FACTOR) == (7.0, 2.0)
    assert (made.__name__, made.__doc__) == (scaled.__name__, scaled.__doc__)
    assert not hasattr(made, "__wrapped__")


def test_a_copy_of_what_is_decorated_is_in_copies_of_its_decorators() -> None:
    function = twice(twice(scaled))
    made = with_globals(function, {"FACTOR": 5.0})
    assert (made(3.0), function(3.0)) == (64.0, 28.0)
    assert inspect.unwrap(made)(3.0) == 16.0 and inspect.unwrap(function) is scaled


def test_what_a_decorator_hides_is_not_copied() -> None:
    with pytest.raises(ValueError, match="scaled does not hold what it decorates"):
        with_globals(hidden(scaled), {"FACTOR": 5.0})


def test_dynamo_finds_the_globals_of_a_copy() -> None:
    made = with_globals(scaled, {"FACTOR": 5.0})
    call, before = eager(lambda x: (made(x), scaled(x))), graphs()
    for _ in range(2):
        got = call(torch.ones(2))
        assert torch.equal(got[0], torch.full((2,), 6.0))
        assert torch.equal(got[1], torch.full((2,), 3.0))
    assert graphs() == before + 1
