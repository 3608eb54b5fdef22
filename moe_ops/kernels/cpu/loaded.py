"""The sources of the kernels, and libmoe_ops, a library that may be loaded and holds them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

LIBRARY = "libmoe_ops"
ASKED = "moe_ops_built_from"  # a function that no other library has


def text_of(sources: Iterable[str]) -> str:
    """Sources of this folder, one after the other."""
    return "\n".join(Path(__file__).with_name(name).read_text() for name in sources)


def built_from() -> str:
    """What tells these sources from those of another moe_ops."""
    found = sorted(p.name for p in Path(__file__).parent.iterdir() if p.suffix in (".h", ".cpp"))
    return hashlib.sha256(text_of(found).encode()).hexdigest()


def path() -> str | None:
    """The file of libmoe_ops that `torch.ops.load_library` has loaded, whatever its name, or
    None."""
    paths = (p for p in torch.ops.loaded_libraries if hasattr(ctypes.CDLL(p), ASKED))
    return next(iter(paths), None)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library that was loaded before this package was imported, which asks for it first, or
    None. Raises ImportError for one that was built from other sources: what its functions are given
    differs.
    """
    file = path()
    if file is None:
        return None
    found = ctypes.CDLL(file)
    asked = getattr(found, ASKED)
    asked.restype = ctypes.c_char_p
    if asked().decode() != built_from():
        raise ImportError(
            f"{file} was built from other sources than those of this moe_ops; build it again: "
            "python -m moe_ops build-library DIR"
        )
    return found
