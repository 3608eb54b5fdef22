"""Something to do when a module is first imported, by whoever imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[], object]) -> None:
    """Call `then` when the module of this name has been imported: now if it was, else later, once.

    Nothing is imported for it, and a module that is never imported costs nothing.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class Later:
    """What has to be done with a module once it is imported, in the order in which it is given."""

    def __init__(self, name: str) -> None:
        self._waiting: list[Callable[[], object]] | None = []
        when_imported(name, self._come)

    def do(self, then: Callable[[], object]) -> None:
        """Call `then` when the module has been imported: now if it was."""
        if self._waiting is None:
            then()
        else:
            self._waiting.append(then)

    def _come(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for then in waiting:
            then()


class _Finder(MetaPathFinder):
    """Finds one module as the finders after it do, and has it call a function at its end."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # so that what follows asks the others
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
