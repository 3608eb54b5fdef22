"""C++ kernels for experts and linear layers with quantised weights on the CPU, compiled on first
use for the element type that is asked for.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ops.kernels.cpu import LayerFields, layer_of, loaded, pointer, refusal_of
from moe_ops.kernels.cpu.built import built

SOURCES = (
    "records.h", "layer.h", "products.h", "codes.h", "blocks.h", "inputs.h", "weights.h", "tiles.h",
    "panels.h", "quantized.cpp",
)  # fmt: skip
# Names of codes.h and blocks.h by element type.
ELEMENTS = {
    "int8": "Int8",
    "uint8": "Uint8",
    "int4": "Int4",
    "uint4": "Uint4",
    "float4_e2m1": "Float4E2M1",
    "float8_e4m3fn": "Float8E4M3",
    "nf4": "Normal4",
    "q4_k": "Q4K",
    "q5_k": "Q5K",
    "q6_k": "Q6K",
}
# Names of inputs.h by element type of the inputs; "": they are multiplied as they are.
INPUTS = {"": "AsTheyAre", "int8": "Int8Codes", "float8_e4m3fn": "Float8Codes"}
SCALES = ("float32", "bfloat16", "float16", "e8m0")
# Columns of int8 numbers whose products int32 holds the sum of.
MOST_INTEGERS = 1 << 17
# Instructions of x86 that kernels may be confined to; "": all that this machine has.
INSTRUCTIONS = ("", "AVX512", "AVX_VNNI", "AVX2", "PLAIN")


class _Scales(ctypes.Structure):
    """`Scales` of records.h, field by field."""

    _fields_ = [
        *((name, c_void_p) for name in ("scale", "zero")),
        *((name, c_int64) for name in ("group_rows", "group_columns")),
        *((name, c_int64) for name in ("row_groups", "column_groups")),
        ("kind", c_int32),
    ]


class _Inputs(ctypes.Structure):
    """`Inputs` of records.h, field by field."""

    _fields_ = [
        ("given", c_void_p),
        ("given_experts", c_int64),
        ("of_rows", c_void_p),
        ("group_columns", c_int64),
        ("one", c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Kind:
    """Which kernels: an element type of codes, a type of scales, an element type of inputs (one of
    INPUTS), and one of INSTRUCTIONS.
    """

    element: str
    scale: str
    inputs: str = ""
    instructions: str = ""


@dataclass(frozen=True, slots=True)
class InputScales:
    """How the inputs of a product get scales: the group that shares one, and static scales, float32
    and contiguous, one or one for each expert; or the scales [T, groups] of inputs that are codes
    already. A group of -1 is all rows or columns.
    """

    group: tuple[int, int] = (1, -1)
    static: Tensor | None = None
    of_rows: Tensor | None = None

    def fields(self, columns: int) -> _Inputs:
        down, across = self.group
        given = 0 if self.static is None else self.static.numel()
        wide = across < 0 or across > columns
        shared = columns if wide else across
        return _Inputs(pointer(self.static), given, pointer(self.of_rows), shared, down < 0)


@dataclass(frozen=True, slots=True)
class Codes:
    """A stacked weight [E, rows, packed columns] with the scales and zero points [E, row groups,
    column groups], which are contiguous, and the scales of its inputs; a group of -1 is all rows or
    columns.
    """

    values: Tensor
    scale: Tensor
    zero: Tensor | None
    group: tuple[int, int]
    inputs: InputScales = InputScales()

    def scales(self, columns: int, kind: str) -> _Scales:
        down, across = self.group
        return _Scales(
            *(self.scale.data_ptr(), pointer(self.zero)),
            *(self.values.shape[1] if down < 0 else down, columns if across < 0 else across),
            *(self.scale.shape[1], self.scale.shape[2], SCALES.index(kind)),
        )


# What all kernels of codes are compiled with, beside what `definitions` gives.
FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}  # of tokens


def definitions(element: str, inputs: str) -> dict[str, str]:
    """The macros that say which kernels are compiled."""
    return {"MOE_ELEMENT": ELEMENTS[element], "MOE_INPUTS": INPUTS[inputs]}


def name_of(element: str, inputs: str) -> str:
    """What libmoe_ops calls the kernels of an element type and of inputs, without a dtype."""
    return f"moe_experts_{ELEMENTS[element]}_{INPUTS[inputs]}"


@functools.cache
def _library(element: str, inputs: str, instructions: str) -> tuple[Any, str]:
    """The library that has the kernels of an element type and of inputs, and what it calls them."""
    library, name = loaded.library(), name_of(element, inputs)
    if instructions or library is None or not hasattr(library, f"{name}_float32"):
        macros = definitions(element, inputs)
        flags = [*FLAGS, *(f"-D{macro}={value}" for macro, value in macros.items())]
        if instructions:
            flags.append(f"-DMOE_AT_MOST_{instructions}")
        library = built(loaded.text_of(SOURCES), f" of {element}", flags)
        name = "moe_experts"
    return library, name


@functools.cache
def _functions(element: str, inputs: str, instructions: str) -> dict[torch.dtype, Any]:
    """The kernels of experts by the dtype of tokens."""
    library, name = _library(element, inputs, instructions)
    functions = {}
    for dtype, named in DTYPES.items():
        function = functions[dtype] = getattr(library, f"{name}_{named}")
        function.argtypes = [
            *(ctypes.POINTER(LayerFields), c_void_p, c_void_p, c_void_p),  # x, ids, weights
            *(c_void_p, c_void_p, ctypes.POINTER(_Scales), ctypes.POINTER(_Scales)),  # w13, w2
            *(ctypes.POINTER(_Inputs), ctypes.POINTER(_Inputs)),
            *(c_void_p, c_void_p, c_void_p),  # b13, b2, out
        ]
        function.restype = None
    return functions


@functools.cache
def unavailable(element: str, inputs: str = "", instructions: str = "") -> str | None:
    """Why the kernels of an element type and of inputs cannot be compiled here, or None; the first
    call compiles them.
    """
    return refusal_of(partial(_functions, element, inputs, instructions), f" of {element}")


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13: Codes,
    w2: Codes,
    biases: tuple[Tensor | None, Tensor | None],
    activation: tuple[str, bool, bool, float, float | None, float],
    of: Kind,
    least_panel_rows: int = 0,
) -> Tensor:
    """The `experts` op on codes of a kind, in one parallel region; the activations between
    the products are rounded to x's dtype, and then quantised where the kind says so.

    x and biases: bfloat16 or float32, one dtype, in which x has the numbers that codes stand for
    where its scales are given; x and codes need a stride of 1 on the last axis,
    biases are contiguous; weights_TK is float32 or of x's dtype; ids and weights_TK are contiguous,
    ids outside [0, E) mean "not here". Groups of columns are all of them, 32, 64 or a multiple of
    128; those of inputs are all of a row's, or a multiple of 128 that is the weight's too. Inputs
    of int8 want weights of int8 with one scale a row, and widths up to MOST_INTEGERS. `activation`
    and `least_panel_rows` are as in `layer_of`.
    """
    gated, width = activation[1], w13.values.shape[1]
    width = width // 2 if gated else width
    layer = layer_of(
        x_TD, weights_TK, ids_TK, w13.values, w2.values, width, activation, least_panel_rows
    )
    out_TD = x_TD.new_empty(x_TD.shape)
    _functions(of.element, of.inputs, of.instructions)[x_TD.dtype](
        layer,
        *(x_TD.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr()),
        *(w13.values.data_ptr(), w2.values.data_ptr()),
        *(w13.scales(x_TD.shape[1], of.scale), w2.scales(width, of.scale)),
        *(w13.inputs.fields(x_TD.shape[1]), w2.inputs.fields(width)),
        *(pointer(biases[0]), pointer(biases[1]), out_TD.data_ptr()),
    )
    return out_TD


@functools.cache
def _linears(element: str, instructions: str) -> dict[torch.dtype, Any]:
    """The kernels of linear layers by the dtype of inputs."""
    library, name = _library(element, "", instructions)
    functions = {}
    for dtype, named in DTYPES.items():
        function = functions[dtype] = getattr(library, f"{name}_linear_{named}")
        function.argtypes = [
            *(ctypes.POINTER(LayerFields), c_void_p),  # x
            *(c_void_p, ctypes.POINTER(_Scales), c_void_p, c_void_p),  # w, bias, out
        ]
        function.restype = None
    return functions


def linear(
    x_TK: Tensor, w: Codes, bias_N: Tensor | None, of: Kind, least_panel_rows: int = 0
) -> Tensor:
    """y[t] = W x[t] + b for a weight of codes of a kind, of one "expert", in one parallel region.

    x and bias: bfloat16 or float32, one dtype; x and codes need a stride of 1 on the last axis, the
    bias is contiguous. Groups of columns and `least_panel_rows` are as in `experts`.
    """
    (T, K), N = x_TK.shape, w.values.shape[1]
    layer = LayerFields(
        *(T, 1, 1, 0, N, K, x_TK.stride(0)),
        *(0, 0, w.values.stride(0), w.values.stride(1)),
        *(1, 1),
        *(False, False, torch.get_num_threads(), least_panel_rows),
    )
    out_TN = x_TK.new_empty(T, N)
    _linears(of.element, of.instructions)[x_TK.dtype](
        layer, x_TK.data_ptr(), w.values.data_ptr(), w.scales(K, of.scale), pointer(bias_N),
        out_TN.data_ptr(),
    )  # fmt: skip
    return out_TN
