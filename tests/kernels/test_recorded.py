"""What a recorded launch calls in place of Triton's launcher, by launchers as Triton has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from moe_ops.kernels.triton import recorded as module
from moe_ops.kernels.triton.recorded import recorded

STREAM = 7
called: list[tuple[Any, ...]] = []
encoded: list[int] = []


@dataclass
class Descriptor:
    """A TMA descriptor of Triton."""

    base: Any
    shape: list[int]


@dataclass(frozen=True)
class Map:
    """What one is encoded to."""

    address: int


class InC:
    """A function in C, as far as Python sees it."""

    def __call__(self, *args: Any) -> None:
        called.append(args)


def encoded_args(args: Any) -> list[Any]:
    made: list[Any] = []
    for value in args:
        if isinstance(value, Descriptor):
            encoded.append(value.base.data_ptr())
            made += [Map(value.base.data_ptr()), *value.shape]
        else:
            made.append(value)
    return made


def flat(launcher: Any) -> Callable[..., Any]:
    """As Triton 3.6 wraps the function of a kernel with descriptors."""

    def inner(*args: Any) -> Any:
        return launcher(*encoded_args(args))

    return inner


def as_one(launcher: Any) -> Callable[..., Any]:
    """As Triton 3.9 does, whose function takes the arguments of the kernel as one tuple."""

    def inner(*args: Any) -> Any:
        return launcher(*args[:-1], encoded_args(args[-1]))

    return inner


class Launcher:
    """A launcher of Triton 3.6."""

    global_scratch_size = profile_scratch_size = 0
    launch_pdl = True
    wrap = staticmethod(flat)

    def __init__(self, describes: bool) -> None:
        self.launch: Any = self.wrap(InC()) if describes else InC()

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, function, self.launch_pdl, None, *args)


class Newer(Launcher):
    """One of Triton 3.9."""

    gsan_enabled = False
    wrap = staticmethod(as_one)

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *args: Any) -> None:
        metadata, hooks, kernel_args = args[0], args[1:4], args[4:]
        self.launch(x, y, z, stream, function, metadata, *hooks, b"annotations", kernel_args)


def compiled(launcher: Launcher) -> Any:
    return SimpleNamespace(run=launcher, function="function", packed_metadata=("metadata", 4))


def given(a: Tensor, b: Tensor, describes: bool) -> list[Any]:
    first = Descriptor(a, [4]) if describes else a
    second = Descriptor(b, [2, 2]) if describes else a.new_empty(0)
    return [first, None, b, 3, 0.5, second, ("a constant", 2)]


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    called.clear()
    encoded.clear()


def place_of(a: Tensor, b: Tensor) -> Callable[[int], tuple[int, int]]:
    places = {a.data_ptr(): (0, 0), b.data_ptr(): (1, 8)}
    return lambda address: places[address]


@pytest.mark.parametrize("describes", [False, True], ids=["addresses", "descriptors"])
@pytest.mark.parametrize("kind", [Launcher, Newer])
def test_the_function_in_c_gets_what_the_launcher_gives_it(
    kind: type[Launcher], describes: bool
) -> None:
    """At other addresses, with another stream, and without the launcher."""
    a, b = torch.zeros(4), torch.zeros(4)
    launcher = kind(describes)
    launch = recorded(compiled(launcher), (5, 2), given(a, b, describes), place_of(a, b))
    assert not called and isinstance(launch.function, InC)
    x, y = torch.zeros(4), torch.zeros(4)
    launch.run([x.data_ptr(), y.data_ptr() - 8], STREAM)
    args = given(x, y, describes)
    if not describes:
        args[0], args[5] = x.data_ptr(), 0
    args[2] = y.data_ptr()
    launcher(5, 2, 1, STREAM, "function", ("metadata", 4), None, None, None, *args)
    ours, theirs = ([list(v) if isinstance(v, tuple) else v for v in c] for c in called)
    assert ours == theirs


def test_a_descriptor_is_encoded_once_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    launch = recorded(compiled(Launcher(True)), (1,), given(a, b, True), place_of(a, b))
    monkeypatch.setattr(module, "MOST_ENCODED", 2)
    addresses = [(16, 32), (16, 32), (16, 64), (80, 64), (96, 64), (16, 64)]
    for first, second in addresses:
        launch.run([first, second - 8], STREAM)
        maps = [v.address for v in called[-1] if isinstance(v, Map)]
        assert maps == [first, second]
    assert all(len(d.encoded) <= 2 for d in launch.descriptors)
    encoded.clear()
    launch.run([112, 128 - 8], STREAM)
    assert encoded == [112, 128]  # each once, though both are new
    encoded.clear()
    launch.run([112, 128 - 8], STREAM)
    assert not encoded


def wrapped_otherwise(launcher: Any) -> Callable[..., Any]:
    def inner(*args: Any, to: Any = launcher) -> Any:
        return to(*encoded_args(args))

    return inner


class Otherwise(Launcher):
    wrap = staticmethod(wrapped_otherwise)


class Scratch(Launcher):
    global_scratch_size = 16


class Watched(Newer):
    gsan_enabled = True


class Unknown(Launcher):
    def __init__(self, describes: bool) -> None:
        self.to = flat(InC())

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *args: Any) -> None:
        self.to(x, y, z, stream, function, *args)


class Behind(Launcher):
    """It has the arguments of the kernel as one tuple, and something else behind them."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *args: Any) -> None:
        self.launch(x, y, z, stream, function, args, ["annotation"])


def test_addresses_that_are_not_found_again_are_given_to_the_launcher() -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    launcher = Behind(False)
    launch = recorded(compiled(launcher), (5, 2), given(a, b, False), place_of(a, b))
    assert launch.function is launcher
    launch.run([16, 64 - 8], STREAM)
    assert called[-1][3] == STREAM and {16, 64} <= {*filter(_is_int, called[-1][5])}


def _is_int(value: Any) -> bool:
    return type(value) is int


@pytest.mark.parametrize("kind", [Otherwise, Scratch, Watched, Unknown])
def test_other_launchers_are_called(kind: type[Launcher]) -> None:
    a, b = torch.zeros(4), torch.zeros(4)
    launcher = kind(True)
    launch = recorded(compiled(launcher), (5, 2), given(a, b, True), place_of(a, b))
    assert launch.function is launcher
    for first, second in ((16, 32), (16, 64)):
        launch.run([first, second - 8], STREAM)
        last = called[-1][-1]
        args = last if isinstance(last, list) else called[-1]
        assert called[-1][3] == STREAM and second in args
        assert [v.address for v in args if isinstance(v, Map)] == [first, second]
