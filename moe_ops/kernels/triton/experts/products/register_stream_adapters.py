"""What adapters add to the products of `register_stream_gluon.py`, in Gluon: B u, where u are rows
that `narrow` of `adapters.py` made."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moe_ops.kernels.triton.experts.schedule.sort import local_ids


@gluon.constexpr_function
def flat_layout(SIZES):
    """The layout of a tile's sums [M, N] once shares are added up: warps along rows, of which a
    thread has those that are eight apart."""
    return gl.NVMMADistributedLayout([2, 0], [SIZES.S * SIZES.MW, 1], [16, 8])


@gluon.jit
def add_adapter(
    acc, e, row_M, u_first, count, index_first, of_adapter, E: gl.constexpr,
    ADAPTERS: gl.constexpr, RANK: gl.constexpr, TR: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """acc [M, N] and B u: of `count` columns, whose u are rows from `u_first` on, and whose
    adapters from `index_first` on; of other columns anything. acc gets another layout."""
    narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br = of_adapter
    flat: gl.constexpr = flat_layout(SIZES)
    of_b: gl.constexpr = gl.DotOperandLayout(0, flat, 2)
    of_u: gl.constexpr = gl.DotOperandLayout(1, flat, 2)
    N: gl.constexpr = acc.shape[1]
    acc = gl.convert_layout(acc, flat)
    row_M = gl.convert_layout(row_M, gl.SliceLayout(1, of_b))
    r_b = gl.arange(0, TR, gl.SliceLayout(0, of_b))
    r_u = gl.arange(0, TR, gl.SliceLayout(1, of_u))
    n_u = gl.minimum(gl.arange(0, N, gl.SliceLayout(0, of_u)), count - 1)
    u_at = narrow_ptr + ((u_first + n_u).to(gl.int64) * RANK)[None, :] + r_u[:, None]
    u = gl.load(u_at, mask=(r_u < RANK)[:, None] & (n_u >= 0)[None, :], other=0.0)
    b_at = wide_ptr + e.to(gl.int64) * stride_bg + (row_M.to(gl.int64) * stride_bf)[:, None]
    b_at += (r_b.to(gl.int64) * stride_br)[None, :]
    inside_b = (r_b < RANK)[None, :] & (row_M >= 0)[:, None]
    if index_ptr is None:
        acc = mma_v2(gl.load(b_at, mask=inside_b, other=0.0), u, acc)
    else:
        n = gl.minimum(gl.arange(0, N, gl.SliceLayout(0, flat)), count - 1)
        index_N = gl.load(index_ptr + index_first + n)
        for i in range(ADAPTERS):
            mine_N = index_N == i
            if gl.max(mine_N.to(gl.int32), 0) > 0:
                at = b_at + (0 * e + i * E).to(gl.int64) * stride_bg
                sums = mma_v2(gl.load(at, mask=inside_b, other=0.0), u, acc)
                # What adapters of others hold is no part of a row's sum, even if it is no number.
                acc = gl.where(mine_N[None, :], sums, acc)
    return acc


@gluon.jit
def add_to_one(
    total_M, first_row, ids_ptr, expert_map_ptr, N_MAP, of_adapter, E: gl.constexpr,
    K: gl.constexpr, D: gl.constexpr, ADAPTERS: gl.constexpr, RANK: gl.constexpr, TR: gl.constexpr,
):  # fmt: skip
    """total_M, rows of the result of one token from `first_row` on, and B u of its choices."""
    narrow_ptr, wide_ptr, index_ptr, stride_bg, stride_bf, stride_br = of_adapter
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    J: gl.constexpr = 128  # choices and ranks at once
    M: gl.constexpr = total_M.shape[0]
    d = first_row + gl.arange(0, M, gl.SliceLayout(1, layout))
    has = True
    if index_ptr is not None:
        n = gl.load(index_ptr)
        has = (n >= 0) & (n < ADAPTERS)
        wide_ptr += gl.where(has, n, 0).to(gl.int64) * E * stride_bg
    sum_M = gl.zeros([M], gl.float32, gl.SliceLayout(1, layout))
    for first in range(0, K * TR, J):
        j = first + gl.arange(0, J, gl.SliceLayout(0, layout))
        pair, r = j // TR, j % TR
        e_K = local_ids(ids_ptr, expert_map_ptr, pair, pair < K, E, N_MAP)
        inside_K = (e_K < E) & (r < RANK) & has
        at = wide_ptr + (e_K.to(gl.int64) * stride_bg + r.to(gl.int64) * stride_br)[None, :]
        at += (d.to(gl.int64) * stride_bf)[:, None]
        b = gl.load(at, mask=(d < D)[:, None] & inside_K[None, :], other=0.0)
        u_K = gl.load(narrow_ptr + pair * RANK + r, mask=inside_K, other=0.0)
        sum_M += gl.sum(b.to(gl.float32) * u_K.to(gl.float32)[None, :], 1)
    return total_M + gl.convert_layout(sum_M, total_M.type.layout)
