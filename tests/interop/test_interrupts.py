"""What is let through of the errors that code here lives with: what came from outside."""

from __future__ import annotations

import functools
import inspect
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.output_graph import OutputGraph
from torch._inductor.codecache import CppCodeCache

from moe_ops.generation import own_attention
from moe_ops.graphs.cuda_graph import GraphPool
from moe_ops.graphs.runner import Size
from moe_ops.hf.source import fingerprint
from moe_ops.interop.interrupts import call_compiled
from moe_ops.kernels import cpu
from moe_ops.kernels.cpu import transpose
from moe_ops.passes.inductor.cache_key import function_key
from moe_ops.passes.routing import check
from moe_ops.weights import configuration


class Alarm(Exception):
    """What a caller's own signal handler raises."""


class Method:
    def handle(self, number: int, frame: object) -> None:
        raise Alarm

    def __call__(self, number: int, frame: object) -> None:
        raise Alarm


def handle(number: int, frame: object, kind: type[Exception] = Alarm) -> None:
    raise kind("the caller's own")


def handle_with_a_word(word: str, number: int, frame: object) -> None:
    raise Alarm(word)


@pytest.fixture
def handled() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Sets what handles SIGUSR1."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler) and None
    signal.signal(signal.SIGUSR1, before)


def interrupt(*args: Any, **kwargs: Any) -> Any:
    """A function of others in the middle of which a signal comes."""
    signal.raise_signal(signal.SIGUSR1)


def fail(*args: Any, **kwargs: Any) -> Any:
    """A function of others that fails."""
    raise OSError("no such thing")


def inside(name: str, source: str = "def run(call):\n    return call()\n") -> Callable[..., Any]:
    """A function of a module of this name."""
    module = {"__name__": name}
    exec(source, module)
    return module["run"]  # type: ignore[return-value]


CATCHES = """
def run(call, **kwargs):
    from moe_ops.interop.interrupts import let_through
    try:
        call()
    except Exception as error:
        let_through(error, **kwargs)
        return error
"""
WRAPS = """
def run(call):
    try:
        call()
    except Exception as error:
        raise RuntimeError(f"cannot be lowered: {error}") from None
"""
catch = inside("moe_ops.made_up", CATCHES)


@pytest.mark.parametrize(
    "handler",
    [
        handle,
        Method().handle,
        Method(),
        functools.partial(handle_with_a_word, "late"),
        functools.partial(functools.partial(handle, kind=Alarm)),
    ],
    ids=["function", "method", "object", "partial", "partial of partial"],
)
def test_a_signal_handlers_error_is_let_through(
    handled: Callable[..., None], handler: Callable[..., None]
) -> None:
    handled(handler)
    for compiling in (False, True):
        with pytest.raises(Alarm):
            catch(interrupt, compiling=compiling)


def test_one_that_somebody_wrapped_is_raised_as_it_was(handled: Callable[..., None]) -> None:
    handled(functools.partial(handle, kind=ValueError))
    wraps = inside("torch._inductor.made_up", WRAPS)
    with pytest.raises(ValueError, match="the caller's own"):
        catch(lambda: wraps(interrupt))


def test_what_fails_by_itself_is_no_interruption(handled: Callable[..., None]) -> None:
    handled(handle)
    assert isinstance(catch(fail), OSError)
    torchs = inside("torch._inductor.made_up", "def run():\n    raise RuntimeError('torch')\n")
    assert isinstance(catch(inside("triton.made_up", WRAPS), compiling=False), Exception)
    # While compiling, what others raised is theirs, and what torch raised is torch's.
    assert isinstance(inside("moe_ops.x", CATCHES)(torchs, compiling=True), RuntimeError)
    with pytest.raises(OSError, match="no such thing"):
        catch(fail, compiling=True)


def test_an_error_of_a_class_of_others_is_theirs_whichever_code_it_comes_up_in() -> None:
    """One thread can raise in another, wherever that is."""
    source = "def run(kind):\n    raise kind('from another thread')\n"
    anywhere = inside("torch._inductor.made_up", source)
    given = "def run(call, kind):\n    from moe_ops.interop.interrupts import let_through\n"
    given += "    try:\n        call(kind)\n    except Exception as error:\n"
    given += "        let_through(error, compiling=True)\n        return error\n"
    within = inside("moe_ops.made_up", given)
    for kind in (Alarm, TimeoutError):
        with pytest.raises(kind):
            within(anywhere, kind)
    assert isinstance(within(anywhere, RuntimeError), RuntimeError)


def test_an_error_that_the_caller_was_handling_is_not_one_of_the_call(
    handled: Callable[..., None],
) -> None:
    handled(handle)
    torchs = inside("torch._inductor.made_up", "def run():\n    raise RuntimeError('torch')\n")
    for before in (
        interrupt,
        lambda: fail() or None,
        functools.partial(exec, "raise TimeoutError"),
    ):
        try:
            before()
        except Exception:
            found = inside("moe_ops.x", CATCHES)(torchs, compiling=True)
        assert str(found) == "torch"


def test_a_call_of_compiled_code_raises_its_own_errors_as_they_are() -> None:
    def of_the_model() -> None:
        raise Alarm

    with pytest.raises(Alarm):
        call_compiled(of_the_model)

    def cannot_be_compiled(module: object, inputs: object) -> None:
        raise ValueError("no")

    compiled = torch.compile(lambda x: x + 1, backend=inside_torch(cannot_be_compiled))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no"):
        call_compiled(compiled, torch.ones(1))


@pytest.mark.parametrize("kind", [Alarm, TimeoutError, RuntimeError])
def test_so_does_one_that_was_interrupted_while_dynamo_traced_it(
    handled: Callable[..., None], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    torch._dynamo.reset()
    handled(functools.partial(handle, kind=kind))
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    monkeypatch.setattr(OutputGraph, "compile_and_call_fx_graph", interrupt)
    with pytest.raises(kind, match="the caller's own") as caught:
        call_compiled(compiled, torch.ones(1))
    assert type(caught.value) is kind
    monkeypatch.undo()
    assert call_compiled(compiled, torch.ones(1)) == 2


def inside_torch(function: Callable[..., Any]) -> Callable[..., Any]:
    source = "def run(module, inputs):\n    raise ValueError('no')\n"
    return inside("torch._inductor.made_up", source)


@pytest.mark.parametrize("kind", [Alarm, TimeoutError, OSError, RuntimeError])
def test_no_interruption_turns_anything_off(
    handled: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: type[Exception],
) -> None:
    """What is decided once for the process, or a model, is not decided by a signal."""

    def function() -> None:
        """Of which nothing is known yet."""

    handled(functools.partial(handle, kind=kind))
    monkeypatch.setattr(CppCodeCache, "load", interrupt)
    monkeypatch.setattr(inspect, "getsource", interrupt)
    monkeypatch.setattr(Path, "is_file", interrupt)
    monkeypatch.setattr(check, "_run", interrupt)
    size, pool, device = Size(), GraphPool(interrupt), torch.device("cpu")
    program = check.Program(tokens=1, leaves=(), steps=(), results=())
    for compiles in (cpu.plain_library, transpose._library):
        compiles.cache_clear()
    cpu.unavailable.cache_clear()
    with caplog.at_level(logging.INFO, "moe_ops"):
        for call in (
            cpu.unavailable,
            transpose._library,
            lambda: fingerprint(function),
            lambda: function_key(function),
            lambda: check.disagreement(program, ()),
            lambda: own_attention.refusal([nn.Linear(1, 1)]),
            lambda: own_attention.same_results(interrupt, False),
            lambda: size.capture(pool, function, device=device, what="1 x 1"),
            lambda: configuration._check_inside(Path("a"), "b", "c"),
        ):
            with pytest.raises(kind):
                call()
    assert size.refusal is None and not caplog.records
    monkeypatch.undo()
    assert cpu.unavailable() is None
    assert fingerprint(function) != "unreadable" and function_key(function) is not None
    assert own_attention.refusal([nn.Linear(1, 1)]) is not None
