"""Products of weights and inputs of 8 bits that have a scale a row, or one for all of it.

Such scales leave the sum over columns: codes are multiplied and added by the matrix unit, int8 in
int32 and float8 in float32, and both scales are multiplied into the sum once. One scale for a
tensor is stored as that of each of its rows.

x is quantised ahead of the first product, each token once, of few beside the sort of their pairs;
by static scales of experts once for each of its choices. One token alone, and its h, the products
of `register_stream_gluon.py` quantise as they load it. h is not multiplied by the weights of
routing, as a scale that all rows share would change: instead the scales are, once h is quantised.
Where that is:

    static scale       in the first product, which stores codes
    scale a row        its largest magnitude is known once all columns are, of many programs, so one
                       more launch reads h and writes codes: 3 bytes a value, where the weights of
                       an expert are read once for all of its rows. To quantise where the second
                       product loads h would save that launch, but each of its programs, one for
                       every 128 rows of the weight, would divide all of h again, and load it in 16
                       bits: with 64 rows an expert that takes longer than the weights do.
    scale of a tensor  the same, behind a launch that finds the largest magnitude
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import quantize
from moe_ops.kernels.triton.experts.formats.codes import Codes
from moe_ops.kernels.triton.experts.formats.order import in_float8_order
from moe_ops.kernels.triton.experts.operands.prequantized import in_rows
from moe_ops.kernels.triton.experts.schedule.sort import local_ids
from moe_ops.kernels.triton.launch import pdl_options, take_turn
from moe_ops.kernels.triton.replay import launch


@triton.jit
def quantize_row(
    x_ptr, static_ptr, codes_ptr, scale_ptr, stride_x, t, D: tl.constexpr, BD: tl.constexpr
):
    """All columns of token t, by its own scale or a given one for all tokens."""
    INT8: tl.constexpr = codes_ptr.dtype.element_ty == tl.int8
    d = tl.arange(0, BD)[None, :]
    x = tl.load(x_ptr + t.to(tl.int64) * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
    if static_ptr is not None:
        scale = tl.load(static_ptr) + tl.zeros((1,), tl.float32)
    else:
        scale = quantize.scale_of_largest(tl.max(quantize.magnitude(x), 1), quantize.most_of(INT8))
    at = codes_ptr + t.to(tl.int64) * D + d
    tl.store(at, quantize.codes_of(x, scale, INT8), mask=d < D)
    tl.store(scale_ptr + t + tl.arange(0, 1), scale)


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["T", "N_MAP"])
def quantize_rows_kernel(
    x_ptr, static_ptr, parts_ptr, ids_ptr, expert_map_ptr, inverse_ptr, ends_ptr, weights_ptr,
    rows_ptr, codes_ptr, scale_ptr, stride_x, T, N_MAP,
    E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
    INT8: tl.constexpr, PARTS: tl.constexpr, ARRANGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BT rows of x. A row is written where it was, or to each of the K rows of its
    token, arranged as `in_float8_order` says if that is wanted; with ids by the given scale of each
    expert. Scales are multiplied by weights of routing if there are any, and rows that no expert
    has are left out if ends are given."""
    take_turn(PDL)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    here = t < T
    if ends_ptr is not None:
        here = here & (t < tl.load(ends_ptr + E - 1))
    d = tl.arange(0, BD)[None, :]
    x_at = x_ptr + t.to(tl.int64)[:, None] * stride_x + d
    x = tl.load(x_at, mask=here[:, None] & (d < D), other=0.0).to(tl.float32)
    if ids_ptr is not None:
        for k in range(K):
            pair = t * K + k
            row = pair
            if rows_ptr is not None:
                pair = tl.load(rows_ptr + t, mask=here, other=0)
            e = local_ids(ids_ptr, expert_map_ptr, pair, here, E, N_MAP)
            scale = tl.load(static_ptr + e, mask=e < E, other=1.0)
            if inverse_ptr is not None:
                row = tl.load(inverse_ptr + pair, mask=here, other=-1)
            there = (e < E) & (row >= 0)
            at = codes_ptr + row.to(tl.int64)[:, None] * D + d
            tl.store(at, quantize.codes_of(x, scale, INT8), mask=there[:, None] & (d < D))
            if weights_ptr is not None:
                scale *= tl.load(weights_ptr + pair, mask=there, other=0.0).to(tl.float32)
            tl.store(scale_ptr + row, scale, mask=there)
    else:
        if static_ptr is not None:
            scale = tl.load(static_ptr) + tl.zeros((BT,), tl.float32)
        elif parts_ptr is not None:
            bits = quantize.largest_of_parts(parts_ptr, PARTS) + tl.zeros((BT,), tl.int32)
            scale = quantize.scale_of_largest(bits, quantize.most_of(INT8))
        else:
            bits = tl.max(quantize.magnitude(x), 1)
            scale = quantize.scale_of_largest(bits, quantize.most_of(INT8))
        codes = quantize.codes_of(x, scale, INT8)
        if ARRANGED:
            codes = in_float8_order(codes)
        if weights_ptr is not None:
            at = t
            if rows_ptr is not None:
                at = tl.load(rows_ptr + t, mask=here, other=0)
            scale *= tl.load(weights_ptr + at, mask=here, other=0.0).to(tl.float32)
        if inverse_ptr is None:
            at = codes_ptr + t.to(tl.int64)[:, None] * D + d
            tl.store(at, codes, mask=here[:, None] & (d < D))
            tl.store(scale_ptr + t, scale, mask=here)
        else:
            for k in range(K):
                row = tl.load(inverse_ptr + t * K + k, mask=here, other=-1)
                at = codes_ptr + row.to(tl.int64)[:, None] * D + d
                tl.store(at, codes, mask=(row >= 0)[:, None] & (d < D))
                tl.store(scale_ptr + row, scale, mask=row >= 0)


@triton.jit(do_not_specialize=["P", "T", "N_MAP"])
def largest_of_pairs_kernel(
    h_ptr, ids_ptr, expert_map_ptr, parts_ptr, P, T, N_MAP,
    E: tl.constexpr, I: tl.constexpr, BP: tl.constexpr, BI: tl.constexpr, ONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The bits of the largest magnitude of h [P, T, I] of one pair, as `tiny_up` wrote it: 0 of a
    pair that it left out."""
    take_turn(PDL)
    pair = tl.program_id(0)
    e = local_ids(ids_ptr, expert_map_ptr, pair, pair < P, E, N_MAP)
    used = e < E
    if not ONE:
        p = tl.arange(0, BP)
        ids_P = local_ids(ids_ptr, expert_map_ptr, p, p < pair, E, N_MAP)
        used = used & (tl.max((ids_P == e).to(tl.int32), 0) == 0)
    i = tl.arange(0, BI)
    largest_I = tl.zeros((BI,), tl.int32)
    for t in range(0, tl.where(used, T, 0)):
        h_I = tl.load(h_ptr + (pair * T + t).to(tl.int64) * I + i, mask=i < I, other=0.0)
        largest_I = tl.maximum(largest_I, quantize.magnitude(h_I.to(tl.float32)))
    tl.store(parts_ptr + pair, tl.max(largest_I, 0))


@triton.jit
def codes_of_h(
    h_IN, h_scale_ptr, e, BY_EXPERT: tl.constexpr, DTYPE: tl.constexpr, INT8: tl.constexpr
):
    """(codes, scale) by the static scale of an expert, or that of all; h is rounded first, as it is
    where it is stored."""
    scale = tl.load(h_scale_ptr + (e if BY_EXPERT else 0))
    h_IN = h_IN.to(DTYPE).to(tl.float32)
    return quantize.codes_of(h_IN, scale + tl.zeros((h_IN.shape[0],), tl.float32), INT8), scale


def by_expert(scale: Tensor | None) -> bool:
    """Whether a static scale is one for each of several experts."""
    return scale is not None and scale.numel() > 1


def _quantize(
    x_TD: Tensor, codes: Codes, static: Tensor | None, parts: Tensor | None, rows: int,
    routed: tuple[Tensor, Tensor | None, Tensor | None] | None = None,
    ends_E: Tensor | None = None, weights: tuple[Tensor | None, Tensor | None] = (None, None),
    arranged: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes and scales of `rows` rows. routed: ids, map and, if rows are sorted, their order."""
    T, D = x_TD.shape
    ids_TK, expert_map, inverse_R = routed or (None, None, None)
    each = by_expert(static)
    out = x_TD.new_empty(rows, D, dtype=codes.dtype)
    scale_R = x_TD.new_empty(rows, dtype=torch.float32)
    E = static.numel() if static is not None and each else 0 if ends_E is None else ends_E.numel()
    BT, BD = quantize.tile_of(D)
    launch(
        quantize_rows_kernel, (triton.cdiv(T, BT),),
        x_TD, static, parts, ids_TK if each else None, expert_map if each else None, inverse_R,
        ends_E, *weights, out, scale_R, x_TD.stride(0), T,
        0 if expert_map is None else expert_map.shape[0],
        E=E, K=1 if ids_TK is None else ids_TK.shape[1], D=D, BT=BT, BD=BD,
        INT8=codes.dtype == torch.int8, PARTS=1 if parts is None else parts.numel(),
        ARRANGED=arranged, num_warps=quantize.warps_of(BT * BD), **pdl_options(x_TD),
    )  # fmt: skip
    return out, scale_R


def quantize_x(
    x_TD: Tensor, codes: Codes, ids_TK: Tensor, expert_map: Tensor | None,
    inverse_R: Tensor | None = None, arranged: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of tokens, which may come as such, and their scales: of each token, or by scales of
    experts of each of its pairs; or in the rows of its pairs (`sort_pairs`), of which those of no
    expert stay unwritten. `arranged`: as `in_float8_order` says, by one scale for all experts.
    """
    T, K = ids_TK.shape
    if codes.x_scale_TG is not None:
        if inverse_R is None:
            return x_TD, codes.x_scale_TG.view(T)
        x_RD, scale_GR = in_rows(x_TD, codes.x_scale_TG, inverse_R, K, arranged=arranged)
        return x_RD, scale_GR.view(-1)
    rows = T if inverse_R is None and not by_expert(codes.x_scale) else T * K
    parts = quantize.largest(x_TD) if codes.x_scale is None and codes.scaled == "tensor" else None
    routed = ids_TK, expert_map, inverse_R
    return _quantize(x_TD, codes, codes.x_scale, parts, rows, routed, arranged=arranged)


def quantize_h(
    h_RI: Tensor, codes: Codes, ends_E: Tensor, weights_TK: Tensor | None = None,
    rows_R: Tensor | None = None, routed: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of sorted rows of h, and their scales, times the weights of their pairs if these are
    given. A static scale needs their order, ids and map."""
    h_scale = codes.h_scale
    parts = quantize.largest(h_RI, ends_E) if h_scale is None and codes.scaled == "tensor" else None
    weights, ids = (weights_TK, rows_R), None
    if routed is not None:
        ids = (routed[0].view(-1, 1), routed[1], None)
    return _quantize(h_RI, codes, h_scale, parts, h_RI.shape[0], ids, ends_E, weights)


def quantize_pairs(
    h_PI: Tensor, codes: Codes, ids_TK: Tensor, expert_map: Tensor | None,
    share_PT: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of h [pairs * T, I] as `tiny_up` wrote it, and their scales, times its shares of
    weights if it made any. Static scales are for one token alone."""
    parts, (T, K), I, h_scale = None, ids_TK.shape, h_PI.shape[1], codes.h_scale
    if h_scale is None and codes.scaled == "tensor":
        BP = triton.next_power_of_2(T * K)
        parts = h_PI.new_empty(BP, dtype=torch.int32)
        launch(
            largest_of_pairs_kernel, (BP,), h_PI, ids_TK, expert_map, parts, T * K, T,
            0 if expert_map is None else expert_map.shape[0],
            E=codes.w13_scale_EFG.shape[0], I=I, BP=BP, BI=triton.next_power_of_2(I), ONE=T == 1,
            num_warps=4, **pdl_options(h_PI),
        )  # fmt: skip
    ids, weights = (ids_TK.view(-1, 1), expert_map, None), (share_PT, None)
    return _quantize(h_PI, codes, h_scale, parts, h_PI.shape[0], ids, weights=weights)
