"""C++ kernels for experts with quantised weights on the CPU, compiled on first use for the element
type that is asked for.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_ops.kernels.cpu import LayerFields, layer_of, pointer

log = logging.getLogger("moe_ops")

SOURCES = ("layer.h", "codes.h", "quantised.cpp")
# Names of codes.h by element type, and in the order of the numbers that quantised.cpp gives them.
ELEMENTS = {
    "int8": "Int8",
    "uint8": "Uint8",
    "int4": "Int4",
    "uint4": "Uint4",
    "float4_e2m1": "Float4E2M1",
    "float8_e4m3fn": "Float8E4M3",
}
SCALES = ("float32", "bfloat16", "float16", "e8m0")
# Instructions of x86 that kernels may be confined to; "": all that this machine has.
INSTRUCTIONS = ("", "AVX512", "AVX2", "PLAIN")


class _Scales(ctypes.Structure):
    """`Scales` of quantised.cpp, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in ("scale", "zero")),
        *((name, c_int64) for name in ("group_rows", "group_columns")),
        *((name, c_int64) for name in ("row_groups", "column_groups")),
        ("kind", c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Kind:
    """Which kernels: an element type of codes, a type of scales, and one of INSTRUCTIONS."""

    element: str
    scale: str
    instructions: str = ""


@dataclass(frozen=True, slots=True)
class Codes:
    """A stacked weight [E, rows, packed columns] with the scales and zero points [E, row groups,
    column groups], which are contiguous; a group of -1 is all rows or columns.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    group: tuple[int, int]

    def scales(self, columns: int, kind: str) -> _Scales:
        down, across = self.group
        return _Scales(
            *(self.scale.data_ptr(), pointer(self.zero)),
            *(self.values.shape[1] if down < 0 else down, columns if across < 0 else across),
            *(self.scale.shape[1], self.scale.shape[2], SCALES.index(kind)),
        )


@functools.cache
def _library(element: str, instructions: str) -> ctypes.CDLL:
    from torch._inductor.codecache import CppCodeCache

    source = "\n".join(Path(__file__).with_name(name).read_text() for name in SOURCES)
    flags = ["-ffp-contract=fast", "-ftree-loop-vectorize", f"-DMOE_ELEMENT={ELEMENTS[element]}"]
    if instructions:
        flags.append(f"-DMOE_AT_MOST_{instructions}")
    library = CppCodeCache.load(source, extra_flags=flags)
    for dtype in ("bfloat16", "float32"):
        function = getattr(library, f"moe_experts_{dtype}")
        function.argtypes = [
            *(ctypes.POINTER(LayerFields), c_void_p, c_void_p, c_void_p),  # x, ids, weights
            *(c_void_p, c_void_p, ctypes.POINTER(_Scales), ctypes.POINTER(_Scales)),  # w13, w2
            *(c_void_p, c_void_p, c_void_p),  # b13, b2, out
        ]
        function.restype = None
    return library


@functools.cache
def unavailable(element: str, instructions: str = "") -> str | None:
    """Why the kernels of an element type cannot be compiled here, or None; the first call compiles
    them.
    """
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        _library(element, instructions)
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        reason = f"needs a working C++ compiler ({str(error).splitlines()[0]})"
        log.warning("moe_ops runs without its CPU kernels of %s: %s", element, reason)
        return reason
    return None


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13: Codes,
    w2: Codes,
    biases: tuple[Tensor | None, Tensor | None],
    activation: tuple[str, bool, bool, float, float | None, float],
    of: Kind,
) -> Tensor:
    """The `experts` op on codes of a kind, in one parallel region; the activations between
    the products are rounded to x's dtype.

    x and biases: bfloat16 or float32, one dtype; x and codes need a stride of 1 on the last axis,
    biases are contiguous; weights_TK is float32 or of x's dtype; ids and weights_TK are contiguous,
    ids outside [0, E) mean "not here". Groups of columns are all of them, 32, 64 or a multiple of
    128. `activation` is as in `layer_of`.
    """
    gated, width = activation[1], w13.values.shape[1]
    width = width // 2 if gated else width
    layer = layer_of(x_TD, weights_TK, ids_TK, w13.values, w2.values, width, activation)
    out_TD = x_TD.new_empty(x_TD.shape)
    library = _library(of.element, of.instructions)
    run = (
        library.moe_experts_bfloat16
        if x_TD.dtype == torch.bfloat16
        else library.moe_experts_float32
    )
    run(
        layer,
        *(x_TD.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr()),
        *(w13.values.data_ptr(), w2.values.data_ptr()),
        *(w13.scales(x_TD.shape[1], of.scale), w2.scales(width, of.scale)),
        *(pointer(biases[0]), pointer(biases[1]), out_TD.data_ptr()),
    )
    return out_TD
