"""What programs of a launch for several weights have in common: the blocks of all weights are
programs of the one launch, those of the first weight first.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST = 4  # weights of a launch


@triton.jit
def rows_of(
    w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(number, address, rows, size) of this program's weight: rows from `size` on are not there."""
    block = tl.program_id(0)
    g, first, size, w_ptr = 0 * block, 0 * block, 0 * block + N0, w0_ptr
    if block >= F1:
        g, first, size, w_ptr = 0 * block + 1, 0 * block + F1, 0 * block + N1, w1_ptr
    if block >= F2:
        g, first, size, w_ptr = 0 * block + 2, 0 * block + F2, 0 * block + N2, w2_ptr
    if block >= F3:
        g, first, size, w_ptr = 0 * block + 3, 0 * block + F3, 0 * block + N3, w3_ptr
    return g, w_ptr, (block - first) * BN + tl.arange(0, BN), size


@triton.jit
def bias_of(b0_ptr, b1_ptr, b2_ptr, b3_ptr, g, n_N, size):
    """The bias of rows of this program's weight in float32, None where no weight has one."""
    bias_N = None
    if b0_ptr is not None or b1_ptr is not None or b2_ptr is not None or b3_ptr is not None:
        bias_N = 0.0 * n_N
    if b0_ptr is not None:
        bias_N += tl.load(b0_ptr + n_N, mask=n_N < tl.where(g == 0, size, 0), other=0.0)
    if b1_ptr is not None:
        bias_N += tl.load(b1_ptr + n_N, mask=n_N < tl.where(g == 1, size, 0), other=0.0)
    if b2_ptr is not None:
        bias_N += tl.load(b2_ptr + n_N, mask=n_N < tl.where(g == 2, size, 0), other=0.0)
    if b3_ptr is not None:
        bias_N += tl.load(b3_ptr + n_N, mask=n_N < tl.where(g == 3, size, 0), other=0.0)
    return bias_N


@triton.jit
def write(acc_N, n_N, end, y_ptr):
    """Store at rows of one of the weights before the end."""
    tl.store(y_ptr + n_N, acc_N.to(y_ptr.dtype.element_ty), mask=n_N < end)


@triton.jit
def write_all(acc_N, n_N, g, size, y0_ptr, y1_ptr, y2_ptr, y3_ptr):
    """Store where this program's weight has its results."""
    write(acc_N, n_N, tl.where(g == 0, size, 0), y0_ptr)
    if y1_ptr is not None:
        write(acc_N, n_N, tl.where(g == 1, size, 0), y1_ptr)
    if y2_ptr is not None:
        write(acc_N, n_N, tl.where(g == 2, size, 0), y2_ptr)
    if y3_ptr is not None:
        write(acc_N, n_N, tl.where(g == 3, size, 0), y3_ptr)


@triton.jit
def write_columns(acc_NT, n_N, end, T, b_ptr, y_ptr, N: tl.constexpr, BT: tl.constexpr):
    """Add a bias and store, at rows of one of the weights before the end, and the input's."""
    here_N = n_N < end
    if b_ptr is not None:
        acc_NT += tl.load(b_ptr + n_N, mask=here_N, other=0.0).to(tl.float32)[:, None]
    t_T = tl.arange(0, BT)
    tl.store(
        y_ptr + t_T[None, :] * N + n_N[:, None],
        acc_NT.to(y_ptr.dtype.element_ty),
        mask=here_N[:, None] & (t_T < T)[None, :],
    )


@triton.jit
def place_of_block(
    F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
):  # fmt: skip
    """(number, block among those of it, rows) of this program's weight."""
    block = tl.program_id(0)
    g, first, size = 0 * block, 0 * block, 0 * block + N0
    if block >= F1:
        g, first, size = 0 * block + 1, 0 * block + F1, 0 * block + N1
    if block >= F2:
        g, first, size = 0 * block + 2, 0 * block + F2, 0 * block + N2
    if block >= F3:
        g, first, size = 0 * block + 3, 0 * block + F3, 0 * block + N3
    return g, block - first, size


@triton.jit
def one_of(
    p0_ptr, p1_ptr, p2_ptr, p3_ptr, F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr
):  # fmt: skip
    """The address that belongs to this program's weight, of addresses of one dtype."""
    block = tl.program_id(0)
    p_ptr = p0_ptr
    if block >= F1:
        p_ptr = p1_ptr
    if block >= F2:
        p_ptr = p2_ptr
    if block >= F3:
        p_ptr = p3_ptr
    return p_ptr
