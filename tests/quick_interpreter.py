"""Triton's interpreter, which patches its language for every call of a function in a kernel: here
once for each launch, which is a third of its time."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_what_is_not() -> None:
    """Leave a function alone whose language is patched, as that of a kernel that runs is."""
    patch_lang = interpreter._patch_lang

    def patch(fn: FunctionType) -> Any:
        used = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(lang.load) for lang in used):
            return patch_lang(fn)
        return None

    interpreter._patch_lang = patch
