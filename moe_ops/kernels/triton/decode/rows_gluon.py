"""What Gluon kernels of a step share: how rows of 16-bit numbers are loaded where the matrix unit
takes them, and how what warps have of a sum is added up.

    [S, X, ...]  shares, which are warps with other columns, and rows of each
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_ops.kernels.triton.experts.products.register_stream_steps import doublings


@gluon.constexpr_function
def eights_layout(S, X, D, rows, warps):
    """The layout of rows [S, X, D] of 16-bit numbers, of which threads have eight at once, and four
    threads a row; which further rows a thread has, and which warps have what."""
    registers = [*doublings(8, 2), *doublings(D // 32, 2, 32), *rows]
    lanes = [*doublings(4, 2, 8), *doublings(8, 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [S, X, D])


@gluon.jit
def by_columns(x):
    """[S, X, D] of 16-bit numbers with columns in the order in which the matrix unit takes those
    of `eights_layout`."""
    S: gl.constexpr = x.shape[0]
    X: gl.constexpr = x.shape[1]
    D: gl.constexpr = x.shape[2]
    x = x.reshape([S, X, D // 32, 4, 2, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
    return x.reshape([S, X, D])


@gluon.constexpr_function
def sums_layout(S, M, N, warps):
    """The layout of sums [S, M, N] of which a thread has all shares."""
    rest = [*doublings(N, 2), *doublings(M, 1)]
    lanes, rest = rest[:5], rest[5:]
    across = warps.bit_length() - 1
    of_warps = (rest + [[0, 0, 0]] * across)[:across]
    return gl.DistributedLinearLayout(
        [*doublings(S, 0), *rest[across:]], lanes, of_warps, [], [S, M, N]
    )


@gluon.jit
def sum_of_shares(acc):
    """[M, N] of [S, M, N], behind one barrier; shares are added in their order."""
    S: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    N: gl.constexpr = acc.shape[2]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    held = gl.allocate_shared_memory(gl.float32, [S, M, N], plain)
    held.store(acc)
    return gl.sum(held.load(sums_layout(S, M, N, gl.num_warps())), 0)
