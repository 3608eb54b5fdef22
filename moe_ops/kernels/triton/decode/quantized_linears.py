"""Several linear layers of one input with few rows, whose weights are codes, in one launch: every
code is read once, and decoded in registers by the decoders of experts.

The blocks of all weights are programs of the one launch, those of the first weight first. Weights
are the rows of the matrix units' tiles, the input's rows their columns. For codes of four and six
bits the input is put in the order in which these are decoded first, in a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_ops.kernels.triton import in_words
from moe_ops.kernels.triton.decode.blocks import one_of, rows_of, write_columns
from moe_ops.kernels.triton.decode.coded import Coded
from moe_ops.kernels.triton.decode.norm import norm_of, norm_rows
from moe_ops.kernels.triton.decode.quantized_linears_plan import QuantizedLinearsPlan, plan_for
from moe_ops.kernels.triton.decode.quantized_row import multiplies_row, run_normed_row, run_row
from moe_ops.kernels.triton.decode.quantized_stream import (
    MOST_STREAMED,
    run_normed_row_stream,
    run_row_stream,
    run_stream,
    streams_row,
)
from moe_ops.kernels.triton.decode.quantized_tiles import run_tiles
from moe_ops.kernels.triton.experts.formats.scales import rescaled, under_global
from moe_ops.kernels.triton.experts.operands.permuted import arrange
from moe_ops.kernels.triton.experts.products.block_steps import add_product
from moe_ops.kernels.triton.launch import (
    on_its_device,
    pdl_options,
    processors,
    shared_memory,
    take_turn,
)
from moe_ops.kernels.triton.replay import launch

MOST_COLUMNS = 64  # of a tile, all of which those of an invariant call have


@on_its_device
def run(
    x_TK: Tensor, layers: Coded, plan: QuantizedLinearsPlan | None = None, streams: bool = False,
    tiles: bool = False, invariant: bool = False,
) -> list[Tensor]:  # fmt: skip
    """y_g = x W_gᵀ + b_g for codes that no launch still in flight writes.

    x: bfloat16 or float16 of up to 64 rows, in which values of codes are multiplied; sums are in
    float32, rounded once; the same in every run. One row goes to `run_row` where that decodes the
    format, and few to `run_stream` if they may; with `tiles` as many as there are go to
    `run_tiles`. An invariant call may have any number of rows.
    """
    T = x_TK.shape[0]
    if invariant:
        return run_parts(x_TK, layers, streams)
    if T == 1 and streams and streams_row(layers):
        return run_row_stream(x_TK, layers)
    if T == 1 and multiplies_row(layers.weight):
        return run_row(x_TK, layers)
    if streams and T <= MOST_STREAMED:
        return run_stream(x_TK, layers)
    if tiles:
        return run_tiles(arrange(x_TK, layers.weight), x_TK.shape[1], layers)
    words = in_words(layers.weight)
    return _run(arrange(x_TK, layers.weight) if words else x_TK, x_TK.shape[1], layers, plan)


def run_parts(x_TK: Tensor, layers: Coded, streams: bool) -> list[Tensor]:
    """`run` by one kernel, whatever the number of rows: of so many at a time as it has columns."""
    if streams:
        parts = [run_stream(part, layers) for part in x_TK.split(MOST_STREAMED)]
    else:
        x_TC = arrange(x_TK, layers.weight) if in_words(layers.weight) else x_TK
        K = x_TK.shape[1]
        parts = [_run(part, K, layers, None, MOST_COLUMNS) for part in x_TC.split(MOST_COLUMNS)]
    if len(parts) == 1:
        return parts[0]
    return [torch.cat(outs) for outs in zip(*parts, strict=True)]


@on_its_device
def run_normed(
    x_TK: Tensor,
    residual_TK: Tensor | None,
    gain_K: Tensor,
    eps: float,
    layers: Coded,
    gain_shift: float | None = None,
    streams: bool = False,
    tiles: bool = False,
    invariant: bool = False,
) -> list[Tensor]:
    """[s, n, y_0, ...]: s and n as `linears.run_normed` makes them, and the rest `run` of n. Where
    `run_row` multiplies a row it is normed in the same launch, else, and of an invariant call, rows
    are normed before."""
    weight, (T, K) = layers.weight, x_TK.shape
    norm, made = norm_of(x_TK, residual_TK, gain_K, eps, gain_shift)
    if invariant:
        norm_rows(x_TK, norm)
        return [*made, *run_parts(norm.normed, layers, streams)]
    if T == 1 and streams and streams_row(layers):
        return [*made, *run_normed_row_stream(x_TK, norm, layers)]
    if T == 1 and multiplies_row(weight):
        return [*made, *run_normed_row(x_TK, norm, layers)]
    if streams and T <= MOST_STREAMED:
        norm_rows(x_TK, norm)
        return [*made, *run_stream(norm.normed, layers)]
    n_TK = norm_rows(x_TK, norm, weight if tiles or in_words(weight) else None)
    if tiles:
        assert n_TK is not None
        return [*made, *run_tiles(n_TK, K, layers)]
    return [*made, *_run(norm.normed if n_TK is None else n_TK, K, layers, None)]


def _run(
    x_TK: Tensor, K: int, layers: Coded, plan: QuantizedLinearsPlan | None, columns: int = 16
) -> list[Tensor]:
    """Products of x as it is multiplied: in the order in which codes of K columns are decoded."""
    return layers.results(x_TK, lambda part, outs: _launch(x_TK, K, part, outs, plan, columns))


def _launch(
    x_TK: Tensor, K: int, layers: Coded, outs: Sequence[Tensor], plan: QuantizedLinearsPlan | None,
    columns: int,
) -> None:  # fmt: skip
    """`columns`: of a tile, at least."""
    T, weight = x_TK.shape[0], layers.weight
    if plan is None:
        N, memory = sum(layers.sizes), shared_memory(x_TK)
        plan = plan_for(max(T, columns), N, weight.bits, processors(x_TK), memory)
    programs, constants = layers.constants(plan.rows)
    launch(
        quantized_linears_few, (programs,),
        x_TK, *layers.arguments(outs), T, x_TK.stride(0),
        K=K, ROW=layers.row, W=weight, BN=plan.rows, BK=plan.step,
        BT=max(columns, triton.next_power_of_2(T)), num_warps=plan.warps, num_stages=plan.stages,
        **constants, **pdl_options(x_TK),
    )  # fmt: skip


# One compiled kernel serves several numbers of rows.
@triton.jit(do_not_specialize=["T"])
def quantized_linears_few(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, w3_ptr, s0_ptr, s1_ptr, s2_ptr, s3_ptr,
    z0_ptr, z1_ptr, z2_ptr, z3_ptr, g0_ptr, g1_ptr, g2_ptr, g3_ptr,
    b0_ptr, b1_ptr, b2_ptr, b3_ptr, y0_ptr, y1_ptr, y2_ptr, y3_ptr, T, stride_x,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    F1: tl.constexpr, F2: tl.constexpr, F3: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr,
    W: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program: BN outputs of every row. A row of a weight is ROW words or bytes."""
    g, w_ptr, n_N, size = rows_of(
        w0_ptr, w1_ptr, w2_ptr, w3_ptr, F1, F2, F3, N0, N1, N2, N3, BN
    )  # fmt: skip
    scale_ptr = one_of(s0_ptr, s1_ptr, s2_ptr, s3_ptr, F1, F2, F3)
    zero_ptr = z0_ptr
    if z0_ptr is not None:
        zero_ptr = one_of(z0_ptr, z1_ptr, z2_ptr, z3_ptr, F1, F2, F3)
    take_turn(PDL)
    t_T = tl.arange(0, BT)
    x_1T = (x_ptr + t_T.to(tl.int64) * stride_x)[None, :]
    w_N1 = (w_ptr + n_N.to(tl.int64) * ROW)[:, None]
    first = 0 * g  # of one expert
    acc_NT = tl.zeros((BN, BT), tl.float32)
    acc_NT = add_product(
        acc_NT, w_N1, 1, scale_ptr, zero_ptr, first, n_N, n_N < size, x_1T, None, t_T, t_T < T,
        N0, K, BK, W, "evict_first", False,
    )  # fmt: skip
    acc_NT = rescaled(acc_NT, W, x_ptr.dtype.element_ty)
    if g0_ptr is not None:
        acc_NT = under_global(acc_NT, one_of(g0_ptr, g1_ptr, g2_ptr, g3_ptr, F1, F2, F3), first)
    write_columns(acc_NT, n_N, tl.where(g == 0, size, 0), T, b0_ptr, y0_ptr, N0, BT)
    if y1_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 1, size, 0), T, b1_ptr, y1_ptr, N1, BT)
    if y2_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 2, size, 0), T, b2_ptr, y2_ptr, N2, BT)
    if y3_ptr is not None:
        write_columns(acc_NT, n_N, tl.where(g == 3, size, 0), T, b3_ptr, y3_ptr, N3, BT)
