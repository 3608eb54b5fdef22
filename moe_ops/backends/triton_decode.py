"""The Triton backends of a decoding step's ops beside its experts, for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.triton_device import refuse_device
from moe_ops.decode_ops.linears import LinearsCall, linears
from moe_ops.decode_ops.normed_linears import NormedLinearsCall, normed_linears
from moe_ops.decode_ops.one_query import OneQueryCall, one_query
from moe_ops.decode_ops.rope_attention import RopeAttentionCall, rope_attention
from moe_ops.registry.gradients import grad_wanted
from moe_ops.registry.spec import Op


def supports(call: Any) -> str | None:
    """Why kernels cannot run a call of one of these ops, or None."""
    given = [getattr(call, field.name) for field in fields(call)]
    if grad_wanted(tuple(given), {}):
        return "is not differentiable, and an argument requires grad"
    return refuse_device(given[0])


def _kernels(op: Op) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    return op.backend("triton", reads=op.optional, supports=supports, devices=("cuda",), priority=1)


@_kernels(linears)
def launch_linears(call: LinearsCall) -> list[Tensor]:
    from moe_ops.kernels.triton.decode.linears import run

    return run(*linears.arguments.flat(call))


@_kernels(normed_linears)
def launch_normed(call: NormedLinearsCall) -> list[Tensor]:
    from moe_ops.kernels.triton.decode.linears import run_normed

    return run_normed(*normed_linears.arguments.flat(call))


@_kernels(one_query)
def launch_attention(call: OneQueryCall) -> Tensor:
    from moe_ops.kernels.triton.decode.one_query import attend

    out: Tensor = attend(*one_query.arguments.flat(call))
    return out


@_kernels(rope_attention)
def launch_rope(call: RopeAttentionCall) -> Tensor:
    """What reads the caches behind it for autograd is to see that they changed."""
    from moe_ops.kernels.triton.decode.rope_attention import run

    out: Tensor = run(*rope_attention.arguments.flat(call))
    for cache in (call.keys_BNSD, call.values_BNSD):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)
    return out
