"""Linear layers of a few rows whose weights are codes, on Hopper: `quantized_stream_gluon.py`
launched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_ops.kernels.triton.decode.coded import Coded
from moe_ops.kernels.triton.decode.quantized_linears_plan import stream_plan_for
from moe_ops.kernels.triton.experts.call import DTYPES
from moe_ops.kernels.triton.experts.products.register_stream import Stream
from moe_ops.kernels.triton.launch import on_its_device, pdl_options
from moe_ops.kernels.triton.replay import launch

MOST_STREAMED = 32  # rows, of which registers hold a step's columns


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
