"""Transposed copies of 16 and 32-bit numbers in C++, compiled on first use: torch's take two to
three times as long.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from moe_ops.interop.interrupts import let_through
from moe_ops.kernels.cpu.built import built

log = logging.getLogger("moe_ops")

# Numbers below which torch's copy takes no longer.
SMALLEST = 1 << 12


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled kernel, or None, with one warning, where there is no compiler."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    source = Path(__file__).with_name("transpose.cpp").read_text()
    try:
        library = built(source, " that transpose")
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        let_through(error)
        reason = str(error).splitlines()[0]
        log.warning("moe_ops transposes with torch, which takes longer: %s", reason)
        return None
    library.moe_transpose.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.moe_transpose.restype = None
    return library


def transposes(to: Tensor, source: Tensor) -> bool:
    """Whether `transpose` takes this pair, as far as the tensors go.

    It is for a `source` that is the transposition of a matrix with contiguous rows, of the same
    dtype of two or four bytes as `to`, whose rows are contiguous too; both on the CPU and without
    overlap.
    """
    if to.dtype != source.dtype or to.element_size() not in (2, 4) or to.numel() < SMALLEST:
        return False
    shape = to.shape
    if len(shape) != 2 or shape != source.shape or not (to.is_cpu and source.is_cpu):
        return False
    (row, one), (source_one, column) = to.stride(), source.stride()
    return one == source_one == 1 and row >= shape[1] and column >= shape[0]


def transpose(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[], None] | None:
    """What makes all of these copies, to the first of each pair, in one call that other threads of
    Python run beside; None where nothing can be compiled.
    """
    library = _library()
    if library is None:
        return None
    copies = array("q")  # `Copy` of transpose.cpp, field by field
    for to, s in pairs:
        copies.extend(
            (s.data_ptr(), to.data_ptr(), s.stride(1), to.stride(0), *reversed(s.shape), s.itemsize)
        )

    def run() -> None:
        library.moe_transpose(copies.buffer_info()[0], len(kept))
        del kept[:]

    kept = list(pairs)  # as long as addresses are
    return run
