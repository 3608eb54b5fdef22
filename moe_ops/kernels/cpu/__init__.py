"""C++ kernels for the CPU, compiled on first use with Inductor's compiler and disk cache."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("moe_ops")

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_GEMM_ARGS = [
    *(_POINTER, _INT, _INT),  # weight, its expert and row strides
    *(_POINTER, _INT, _POINTER, _INT),  # x, its row stride, source, divisor
    *(_POINTER, _POINTER, _POINTER),  # ends, y, target
    *(_INT, _INT, _INT, ctypes.c_int),  # E, F, D, threads
]
_SORT_ARGS = [_POINTER, _INT, _INT, _POINTER, _POINTER]  # ids, R, E, order, ends


@functools.cache
def _library() -> ctypes.CDLL:
    from torch._inductor.codecache import CppCodeCache

    source = Path(__file__).with_name("experts.cpp").read_text()
    library = CppCodeCache.load(source, extra_flags=("-ffp-contract=fast",))
    for name in ("moe_gemm_bfloat16", "moe_gemm_float32"):
        getattr(library, name).argtypes = _GEMM_ARGS
        getattr(library, name).restype = None
    for name in ("moe_sort_int32", "moe_sort_int64"):
        getattr(library, name).argtypes = _SORT_ARGS
        getattr(library, name).restype = None
    return library


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot be compiled here, or None; the first call compiles them."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        _library()
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        reason = f"needs a working C++ compiler ({str(error).splitlines()[0]})"
        log.warning("moe_ops runs without its CPU kernels: %s", reason)
        return reason
    return None


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Stable sort of contiguous int32 or int64 ids by expert: (order_R, ends_E), both int32.

    Ids outside [0, num_experts) come last, after ends_E[-1].
    """
    order_R = torch.empty(ids.numel(), dtype=torch.int32)
    ends_E = torch.empty(num_experts, dtype=torch.int32)
    run = _library().moe_sort_int32 if ids.dtype == torch.int32 else _library().moe_sort_int64
    run(ids.data_ptr(), ids.numel(), num_experts, order_R.data_ptr(), ends_E.data_ptr())
    return order_R, ends_E


def gemm(
    x_TD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    y_RF: Tensor,
    *,
    source_R: Tensor | None = None,
    source_div: int = 1,
    target_R: Tensor | None = None,
) -> None:
    """y[target[r]] = w[e(r)] @ x[source[r] // source_div] for every row r of an expert; others stay
    untouched.

    x, w, y: bfloat16 or float32, one dtype; x and w need a stride of 1 on the last axis, y is
    contiguous. ends, source and target are contiguous int32; without source or target the index is
    r itself.
    """
    E, F, D = w_EFD.shape
    run = (
        _library().moe_gemm_bfloat16
        if x_TD.dtype == torch.bfloat16
        else _library().moe_gemm_float32
    )
    run(
        w_EFD.data_ptr(),
        w_EFD.stride(0),
        w_EFD.stride(1),
        x_TD.data_ptr(),
        x_TD.stride(0),
        None if source_R is None else source_R.data_ptr(),
        source_div,
        ends_E.data_ptr(),
        y_RF.data_ptr(),
        None if target_R is None else target_R.data_ptr(),
        E,
        F,
        D,
        torch.get_num_threads(),
    )
