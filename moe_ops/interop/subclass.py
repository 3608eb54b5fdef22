"""Classes that change what one module does, under the name that it has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn


@functools.cache
def subclass(first: type, cls: type) -> Any:
    """A class of `first` before `cls`, with the names of `cls`: what looks at names, as records of
    outputs do, finds what it did."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (first, cls), names)


class CopiedAsItWas:
    """What stands before the class of a module, by `subclass`, if copies of the module, and what is
    pickled of it, are of its own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return new_object, (former_class(self),), super().__reduce_ex__(protocol)[2]


def former_class(x: object) -> Any:
    """The class that an object had before it got one of `subclass`."""
    return type(x).__bases__[1]


def new_object(cls: Any) -> Any:
    """An object without a state, which copy and pickle then give it."""
    return cls.__new__(cls)


class Swapped:
    """Modules that have another class for a while, and what its forward reads."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def swap(
        self,
        module: nn.Module,
        first: type,
        buffers: Mapping[str, Tensor | None],
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Put a class before that of a module, with buffers that no state dict holds, and with
        attributes, of which those stay that it had."""
        given = attributes or {}
        added = [name for name in given if not hasattr(module, name)]
        for name, t in buffers.items():
            module.register_buffer(name, t, persistent=False)
        for name, value in given.items():
            setattr(module, name, value)
        module.__class__ = subclass(first, type(module))  # type: ignore[arg-type]

        def undo() -> None:
            module.__class__ = former_class(module)
            for name in (*buffers, *added):
                delattr(module, name)

        self._undo.append(undo)

    def undo(self) -> None:
        """Give all modules what they had."""
        while self._undo:
            self._undo.pop()()
