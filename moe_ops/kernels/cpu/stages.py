"""The stages of a layer that are no products, by the kernels of libmoe_ops where it is loaded, else
by those that are compiled on first use."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from moe_ops.kernels.cpu import KINDS, ActivationFields, loaded, plain_library, pointer

DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class _Pairs(ctypes.Structure):
    """`Pairs` of records.h, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("T", "K", "E", "global_experts")),
        *((name, c_int64) for name in ("row_bytes", "x_stride_bytes")),
        *((name, c_int32) for name in ("ids_are_int64", "map_is_int64", "threads")),
    ]


class _Combined(ctypes.Structure):
    """`Combined` of records.h, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("T", "K", "D", "y_stride")),
        *((name, c_int32) for name in ("weights_are_float32", "threads")),
    ]


_ACTIVATE = [ctypes.POINTER(ActivationFields), c_void_p, *[c_int64] * 3, c_void_p, ctypes.c_int]
_COMBINE = [ctypes.POINTER(_Combined), *[c_void_p] * 4]
_SIGNATURES = {
    "moe_local_ids": [ctypes.POINTER(_Pairs), *[c_void_p] * 3],
    "moe_dispatch": [ctypes.POINTER(_Pairs), *[c_void_p] * 5],
    **{f"moe_activate_{dtype}": _ACTIVATE for dtype in DTYPES.values()},
    **{f"moe_combine_{dtype}": _COMBINE for dtype in DTYPES.values()},
}


@functools.cache
def _library() -> ctypes.CDLL:
    library = loaded.library() or plain_library()
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = signature, None
    return library


def dispatch(
    x_TD: Tensor, ids_TK: Tensor, num_experts: int, expert_map: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The `dispatch` op; x needs rows that are contiguous, ids and the map are contiguous."""
    (T, K), threads = ids_TK.shape, torch.get_num_threads()
    known = 0 if expert_map is None else expert_map.shape[0]
    longs = (t is not None and t.dtype == torch.int64 for t in (ids_TK, expert_map))
    row = x_TD.shape[1] * x_TD.itemsize
    pairs = _Pairs(T, K, num_experts, known, row, x_TD.stride(0) * x_TD.itemsize, *longs, threads)
    local_R, rows_R = (torch.empty(T * K, dtype=torch.int32) for _ in range(2))
    ends_E = torch.empty(num_experts, dtype=torch.int32)
    x_RD = x_TD.new_empty(T * K, x_TD.shape[1])
    library = _library()
    library.moe_local_ids(pairs, ids_TK.data_ptr(), pointer(expert_map), local_R.data_ptr())
    library.moe_dispatch(
        *(pairs, x_TD.data_ptr(), local_R.data_ptr(), x_RD.data_ptr()),
        *(rows_R.data_ptr(), ends_E.data_ptr()),
    )
    return x_RD, rows_R, ends_E


def activate(
    y_RF: Tensor, activation: tuple[str, bool, bool, float, float | None, float]
) -> Tensor:
    """The `activate` op of kind, gated, interleaved, alpha, limit and up_shift; y is bfloat16 or
    float32, with contiguous rows.
    """
    kind, gated, interleaved, alpha, limit, up_shift = activation
    fields = ActivationFields(
        *(KINDS.index(kind), gated, interleaved, limit is not None),
        *(alpha, limit or 0.0, up_shift),
    )
    R, F = y_RF.shape
    h_RI = y_RF.new_empty(R, F // 2 if gated else F)
    run = getattr(_library(), f"moe_activate_{DTYPES[y_RF.dtype]}")
    run(
        *(fields, y_RF.data_ptr(), y_RF.stride(0), R, h_RI.shape[1]),
        *(h_RI.data_ptr(), torch.get_num_threads()),
    )
    return h_RI


def combine(y_RD: Tensor, weights_TK: Tensor, rows_R: Tensor) -> Tensor:
    """The `combine` op; y is bfloat16 or float32, with contiguous rows; weights are float32 or of
    y's dtype, and contiguous as the rows are.
    """
    (T, K), D = weights_TK.shape, y_RD.shape[1]
    in_float32 = weights_TK.dtype == torch.float32
    fields = _Combined(T, K, D, y_RD.stride(0), in_float32, torch.get_num_threads())
    out_TD = y_RD.new_empty(T, D)
    run = getattr(_library(), f"moe_combine_{DTYPES[y_RD.dtype]}")
    run(
        *(fields, y_RD.data_ptr(), weights_TK.data_ptr(), rows_R.data_ptr()),
        out_TD.data_ptr(),
    )
    return out_TD
