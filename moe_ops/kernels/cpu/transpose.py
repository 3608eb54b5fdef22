"""Transposed copies of 32-bit words in C++, compiled on first use: torch's take three times as
long.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path

from torch import Tensor

log = logging.getLogger("moe_ops")

# Words below which torch's copy takes no longer.
SMALLEST = 1 << 12


class _Copy(ctypes.Structure):
    """`Copy` of transpose.cpp, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in ("source", "to")),
        *((name, c_int64) for name in ("source_stride", "to_stride", "rows", "columns")),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel, or None, with one warning, where there is no compiler."""
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    source = Path(__file__).with_name("transpose.cpp").read_text()
    try:
        library = CppCodeCache.load(source)
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        reason = str(error).splitlines()[0]
        log.warning("moe_ops transposes words with torch, which takes longer: %s", reason)
        return None
    library.moe_transpose_words.argtypes = [ctypes.POINTER(_Copy), c_int64]
    library.moe_transpose_words.restype = None
    return library


def copies_words(to: Tensor, source: Tensor) -> bool:
    """Whether `copy_words` takes this pair, as far as the tensors go.

    It is for a `source` that is the transposition of a matrix with contiguous rows, of the same
    four-byte dtype as `to`, whose rows are contiguous too; both on the CPU and without overlap.
    """
    return (
        to.dtype == source.dtype
        and to.element_size() == 4
        and to.dim() == 2
        and to.shape == source.shape
        and to.numel() >= SMALLEST
        and to.device.type == source.device.type == "cpu"
        and (to.stride(1), source.stride(0)) == (1, 1)
        and to.stride(0) >= to.shape[1]
        and source.stride(1) >= source.shape[0]
    )


def copy_words(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None] | None:
    """What makes all of these copies, to the first of each pair, in one call that other threads of
    Python run beside; None where nothing can be compiled.
    """
    library = _library()
    if library is None:
        return None
    copies = (_Copy * len(pairs))(
        *(
            _Copy(s.data_ptr(), to.data_ptr(), s.stride(1), to.stride(0), s.shape[1], s.shape[0])
            for to, s in pairs
        )
    )

    def run() -> None:
        library.moe_transpose_words(copies, len(copies))
        del kept[:]

    kept = list(pairs)  # as long as addresses are
    return run
