"""Linear layers of a few rows whose weights are codes, on Hopper: `quantized_stream_gluon.py` and,
of one row, `quantized_row_gluon.py` launched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.kernels.triton import STEP
from moe_ops.kernels.triton.decode.blocks import MOST
from moe_ops.kernels.triton.decode.coded import Coded
from moe_ops.kernels.triton.decode.norm import Norm
from moe_ops.kernels.triton.decode.quantized_linears_plan import (
    row_stream_plan_for,
    stream_plan_for,
)
from moe_ops.kernels.triton.experts.call import DTYPES
from moe_ops.kernels.triton.experts.products.register_stream import Stream
from moe_ops.kernels.triton.launch import on_its_device, pdl_options
from moe_ops.kernels.triton.replay import launch

MOST_STREAMED = 32  # rows, of which registers hold a step's columns
MOST_OUTPUTS = 32768  # of one row; more are bound by memory, whose programs are better small


@on_its_device
def run_stream(x_TK: Tensor, layers: Coded, plan: Stream | None = None) -> list[Tensor]:
    """y_g = x W_gᵀ + b_g of up to MOST_STREAMED rows, bfloat16 or float16, for codes that no launch
    still in flight writes.

    Values of codes are multiplied in the dtype of x; sums are in float32, rounded once; the same in
    every run.
    """
    return layers.results(x_TK, lambda part, outs: _launch(x_TK, part, outs, plan))


def _launch(x_TK: Tensor, layers: Coded, outs: Sequence[Tensor], plan: Stream | None) -> None:
    from moe_ops.kernels.triton.decode import quantized_stream_gluon as kernels

    (T, K), weight = x_TK.shape, layers.weight
    if plan is None:
        plan = stream_plan_for(T, K, weight.across)
    assert plan.tokens >= T
    programs, constants = layers.constants(plan.rows)
    launch(
        kernels.quantized_linears_stream, (programs,),
        x_TK, *layers.arguments(outs, in_words=True), T, x_TK.stride(0),
        K=K, W=weight, DTYPE=DTYPES[x_TK.dtype], P=plan.ahead, SIZES=plan.sizes,
        num_warps=plan.warps, **constants, **pdl_options(x_TK),
    )  # fmt: skip


def streams_row(layers: Coded) -> bool:
    """Whether `run_row_stream` is for layers that `run_stream` takes: for codes of 8 bits of which
    one scale serves all columns of a step or a row, and few rows of them."""
    weight = layers.weight
    of_8 = weight.bits == 8 and weight.across in (-1, STEP)
    return of_8 and sum(layers.sizes) <= MOST_OUTPUTS


@on_its_device
def run_row_stream(x_TK: Tensor, layers: Coded, plan: Stream | None = None) -> list[Tensor]:
    """`run_stream` of one row. Values of codes are multiplied in float16, and the row with them,
    brought into its range by a power of two."""
    return layers.results(x_TK, lambda part, outs: _launch_row(x_TK, part, outs, plan))


@on_its_device
def run_normed_row_stream(
    x_TK: Tensor, norm: Norm, layers: Coded, plan: Stream | None = None
) -> list[Tensor]:
    """`run_row_stream` of x normed, which the launch of the first weights norms."""
    outs = [x_TK.new_empty(1, n) for n in layers.sizes[:MOST]]
    _launch_row(x_TK, layers.part(slice(MOST)), outs, plan, norm)
    return [*outs, *run_row_stream(norm.normed, layers.part(slice(MOST, None)), plan)]


def _launch_row(
    x_TK: Tensor,
    layers: Coded,
    outs: Sequence[Tensor],
    plan: Stream | None,
    norm: Norm | None = None,
) -> None:
    from moe_ops.kernels.triton.decode import quantized_row_gluon as kernels

    K, weight = x_TK.shape[1], layers.weight
    if plan is None:
        plan = row_stream_plan_for(K)
    programs, constants = layers.constants(plan.rows)
    residual, gain, eps, total, normed, shift = norm or (None, None, 0.0, None, None, None)
    launch(
        kernels.quantized_row_stream, (programs,),
        x_TK, *layers.arguments(outs, in_words=True), residual, gain, total, normed,
        K=K, W=weight, EPS=eps, SHIFT=shift, P=plan.ahead, SIZES=plan.sizes,
        num_warps=plan.warps, **constants, **pdl_options(x_TK),
    )  # fmt: skip
