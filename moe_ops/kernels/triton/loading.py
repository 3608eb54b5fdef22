"""Modules in C that Triton makes, loaded one at a time.

Triton has a C compiler make a function for the arguments of a kernel, in a module that has the same
name for every kernel. Of a file that was loaded before, CPython gives the module object that now
has the name, with the names of that file written into it (`import_find_extension` in its
Python/import.c). So of two threads that load each may find the other's function there, and launch
with arguments that are read as others. Kernels are loaded by threads in `ahead.py` and by Inductor.
"""

from __future__ import annotations

import threading
from types import ModuleType

from triton.runtime import build


def load_one_at_a_time() -> None:
    """From now on Triton's loads wait for each other, and each gives a module object of its own."""
    before, turn = build._load_module_from_path, threading.Lock()

    def load(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with turn:
            vars(own).update(vars(before(name, path)))
        return own

    build._load_module_from_path = load
