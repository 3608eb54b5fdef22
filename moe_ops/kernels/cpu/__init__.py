"""C++ kernels for the CPU, compiled on first use with Inductor's compiler and disk cache, unless
libmoe_ops is loaded, which holds them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from moe_ops.interop.interrupts import let_through
from moe_ops.kernels.cpu import loaded
from moe_ops.kernels.cpu.built import built

log = logging.getLogger("moe_ops")

# In the order of the numbers that records.h gives them.
KINDS = ("silu", "gelu", "gelu_tanh", "relu2")
SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "logit")
FILLS = ("-inf", "zero", "zero_weight")
FLAGS = ("-ffp-contract=fast",)
SOURCES = (
    "records.h", "layer.h", "products.h", "tiles.h", "float_panels.h", "columns.h", "experts.cpp",
    "route.cpp", "stages.cpp",
)  # fmt: skip

# From how many rows of an expert on panels of its weights multiply: where that is faster; always,
# or never, so that sums do not depend on the number of rows.
WHERE_FASTER, PANELS, STREAMS = 0, 1, 2**31 - 1


class ActivationFields(ctypes.Structure):
    """`Activation` of records.h, field by field."""

    _fields_ = [
        *((name, c_int32) for name in ("kind", "gated", "interleaved", "clamped")),
        *((name, c_float) for name in ("alpha", "limit", "up_shift")),
    ]


class LayerFields(ctypes.Structure):
    """`Layer` of records.h, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("T", "K", "E", "F", "D", "I")),
        ("x_stride", c_int64),
        *((name, c_int64) for name in ("w13_expert_stride", "w13_row_stride")),
        *((name, c_int64) for name in ("w2_expert_stride", "w2_row_stride")),
        *((name, c_int64) for name in ("w13_column_stride", "w2_column_stride")),
        *((name, c_int32) for name in ("ids_are_int64", "weights_are_float32", "threads")),
        ("least_panel_rows", c_int32),
        ("activation", ActivationFields),
    ]


class _Router(ctypes.Structure):
    """`Router` of records.h, field by field."""

    _fields_ = [
        *((name, c_int64) for name in ("T", "E", "K", "n_group", "topk_group")),
        *((name, c_int32) for name in ("score", "select_on_logit", "group_top2sum")),
        *((name, c_int32) for name in ("fill", "softmax_selected", "renormalize", "threads")),
        *((name, c_float) for name in ("eps", "min_sum", "scale")),
    ]


_SIGNATURES = {
    "moe_gemm": [
        *(c_void_p, c_int64, c_int64, c_int64, c_void_p),  # w, its strides, bias
        *(c_void_p, c_int64, c_void_p, c_void_p),  # x, its row stride, ends, y
        *(c_int64, c_int64, c_int64, c_int64),  # R, E, F, D
        *(c_int32, c_int32),  # threads, least_panel_rows
    ],
    "moe_experts": [
        ctypes.POINTER(LayerFields),
        *(c_void_p, c_void_p, c_void_p),  # x, ids, weights
        *(c_void_p, c_void_p, c_void_p, c_void_p),  # w13, w2, b13, b2
        c_void_p,  # out
    ],
}


@functools.cache
def plain_library(instructions: str = "") -> ctypes.CDLL:
    """The kernels, confined to some of the instructions that `quantized.INSTRUCTIONS` lists."""
    library = None if instructions else loaded.library()
    if library is None:
        confined = (f"-DMOE_AT_MOST_{instructions}",) if instructions else ()
        library = built(loaded.text_of(SOURCES), "", (*FLAGS, *confined))
    for name, signature in _SIGNATURES.items():
        for dtype in ("bfloat16", "float32"):
            function = getattr(library, f"{name}_{dtype}")
            function.argtypes = signature
            function.restype = ctypes.c_bool if name == "moe_gemm" else None
    library.moe_route.argtypes = [ctypes.POINTER(_Router), *[c_void_p] * 5]
    library.moe_route.restype = None
    library.moe_route_given.argtypes = [ctypes.POINTER(_Router), *[c_void_p] * 6]
    library.moe_route_given.restype = ctypes.c_bool
    return library


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot be compiled here, or None; the first call compiles them."""
    return refusal_of(plain_library, "")


def refusal_of(compiled: Callable[[], object], which: str) -> str | None:
    """Why these kernels cannot be compiled here, also as a warning, or None."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        compiled()
    except (CppCompileError, InvalidCxxCompiler, OSError) as error:
        let_through(error)
        reason = f"needs a working C++ compiler ({str(error).splitlines()[0]})"
        log.warning("moe_ops runs without its CPU kernels%s: %s", which, reason)
        return reason
    return None


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def gemm(
    x_RD: Tensor,
    w_EFD: Tensor,
    ends_E: Tensor,
    bias_EF: Tensor | None,
    y_RF: Tensor,
    least_panel_rows: int = 0,
) -> bool:
    """y[r] = w[e(r)] @ x[r] + bias[e(r)] for every row r of an expert; other rows stay untouched.
    False, and nothing is read or written, unless the ends ascend within the rows of x.

    x, w, bias, y: bfloat16 or float32, one dtype; x and w need a stride of 1 on the last axis; ends
    (int32), bias and y are contiguous.
    """
    E, F, D = w_EFD.shape
    run = (
        plain_library().moe_gemm_bfloat16
        if x_RD.dtype == torch.bfloat16
        else plain_library().moe_gemm_float32
    )
    done: bool = run(
        *(w_EFD.data_ptr(), w_EFD.stride(0), w_EFD.stride(1), 1, pointer(bias_EF)),
        *(x_RD.data_ptr(), x_RD.stride(0), ends_E.data_ptr(), y_RF.data_ptr()),
        *(x_RD.shape[0], E, F, D, torch.get_num_threads(), least_panel_rows),
    )
    return done


def layer_of(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    width: int,
    activation: tuple[str, bool, bool, float, float | None, float],
    least_panel_rows: int = 0,
) -> LayerFields:
    """The sizes and strides of a layer whose experts have this width after the activation: its
    kind, gated, interleaved, alpha, limit and up_shift. Strides of weights count their elements.

    Experts with `least_panel_rows` rows or more are multiplied by panels, whose results do not
    depend on the number of rows; 0 is where that is faster.
    """
    T, K = ids_TK.shape
    E, F = w13.shape[:2]
    kind, gated, interleaved, alpha, limit, up_shift = activation
    return LayerFields(
        *(T, K, E, F, x_TD.shape[1], width, x_TD.stride(0)),
        *(w13.stride(0), w13.stride(1), w2.stride(0), w2.stride(1)),
        *(1, 1),  # from column to column
        *(ids_TK.dtype == torch.int64, weights_TK.dtype == torch.float32, torch.get_num_threads()),
        least_panel_rows,
        ActivationFields(
            *(KINDS.index(kind), gated, interleaved, limit is not None),
            *(alpha, limit or 0.0, up_shift),
        ),
    )


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    w13_EFD: Tensor,
    w2_EDI: Tensor,
    b13_EF: Tensor | None,
    b2_ED: Tensor | None,
    kind: str,
    gated: bool,
    interleaved: bool,
    alpha: float,
    limit: float | None,
    up_shift: float,
    least_panel_rows: int = 0,
) -> Tensor:
    """The `experts` op, in one parallel region; the intermediate of the first product stays
    float32.

    x and all weights and biases: bfloat16 or float32, one dtype; x and the weights need a stride of
    1 on the last axis, biases are contiguous; weights_TK is float32 or of x's dtype; ids and
    weights_TK are contiguous, ids outside [0, E) mean "not here". `least_panel_rows` is as
    in `layer_of`.
    """
    layer = layer_of(
        x_TD, weights_TK, ids_TK, w13_EFD, w2_EDI, w2_EDI.shape[2],
        (kind, gated, interleaved, alpha, limit, up_shift), least_panel_rows,
    )  # fmt: skip
    out_TD = x_TD.new_empty(x_TD.shape)
    run = (
        plain_library().moe_experts_bfloat16
        if x_TD.dtype == torch.bfloat16
        else plain_library().moe_experts_float32
    )
    run(
        layer,
        *(x_TD.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr()),
        *(w13_EFD.data_ptr(), w2_EDI.data_ptr(), pointer(b13_EF), pointer(b2_ED)),
        out_TD.data_ptr(),
    )
    return out_TD


def route(
    logits_TE: Tensor,
    top_k: int,
    bias_E: Tensor | None,
    per_expert_scale_E: Tensor | None,
    score: str,
    select_on: str,
    n_group: int,
    topk_group: int,
    group_reduce: str,
    group_fill: str,
    softmax_selected: bool,
    renormalize: bool,
    eps: float,
    min_sum: float,
    scale: float,
    given_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The `route` op on contiguous float32 tensors: (float32 weights, int32 ids). Tokens have the
    experts of `given_TK` (int16, contiguous), but where its row begins with a negative number; None
    where one of these ids is no expert's.
    """
    T, E = logits_TE.shape
    router = _Router(
        *(T, E, top_k, n_group, topk_group),
        *(SCORES.index(score), select_on == "logit", group_reduce == "top2sum"),
        *(FILLS.index(group_fill), softmax_selected, renormalize, torch.get_num_threads()),
        *(eps, min_sum, scale),
    )
    weights_TK = logits_TE.new_empty(T, top_k)
    ids_TK = torch.empty(T, top_k, dtype=torch.int32)
    read = (router, logits_TE.data_ptr(), pointer(bias_E), pointer(per_expert_scale_E))
    written = (weights_TK.data_ptr(), ids_TK.data_ptr())
    if given_TK is None:
        plain_library().moe_route(*read, *written)
    elif not plain_library().moe_route_given(*read, given_TK.data_ptr(), *written):
        return None
    return weights_TK, ids_TK
