"""Triton's interpreter, which patches its language for every call of a function in a kernel, and
takes half of its time for that: here it does so once for each launch."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_what_is_not() -> None:
    """Leave functions alone that a kernel calls, whose launch has patched the language."""
    patch_lang = interpreter._patch_lang

    def patch(fn: FunctionType) -> Any:
        used = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(lang.load) for lang in used):
            return patch_lang(fn)
        return None

    interpreter._patch_lang = patch
