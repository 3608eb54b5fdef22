"""Classes that change what one module of transformers does, under the name that it has."""

from __future__ import annotations

import functools
from typing import Any


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
