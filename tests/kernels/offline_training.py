"""Calls that between them launch every tile of the gradients of experts, every activation, and all
that a layer launches that is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_ops.kernels.triton import Act, activate, activate_backward, wgrad
from moe_ops.kernels.triton.experts import adapters, training
from moe_ops.kernels.triton.experts.weights import Experts
from moe_ops.ops.activate import Activation
from moe_ops.testing import ACTIVATIONS, BF16, F16, F32

WITH_TRAINING = (activate, activate_backward, adapters, training)  # which adapters also use
E, T, K = 8, 512, 8
# M, N of gradients: of adapters, of both weights of a layer, of a small one, of odd ones, and of a
# bias.
SIZES = (
    (16, 2048), (2048, 16), (1536, 2048), (2048, 768), (64, 48), (129, 260), (33, 17), (1536, 1),
    (33, 1),
)  # fmt: skip


def calls_of_training(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for sizes in SIZES:
        for rows, named in ((T * K, (False, True)), (8 * T * K, (True, False))):
            yield f"wgrad {sizes} {rows}", functools.partial(gradient, *sizes, rows, named, BF16)
        for dtype, out in ((F16, F16), (F32, F32), (BF16, F32)):
            call = functools.partial(gradient, *sizes, T * K, (False, False), dtype, out)
            yield f"wgrad {sizes} {dtype} {out}", call
        for rows, dtype in ((T * K, BF16), (8 * T * K, BF16), (T * K, F16), (T * K, F32)):
            yield f"wgrad onto {sizes} {rows} {dtype}", functools.partial(onto, *sizes, rows, dtype)
    for name in ACTIVATIONS:
        for width, dtype in ((768, BF16), (2880, BF16), (17, F16), (768, F32)):
            call = functools.partial(activation, name, width, dtype, width != 2880)
            yield f"{name} backward {width} {dtype}", call
    for name, dtype in (("silu", BF16), ("gpt_oss", BF16), ("ungated_relu2", F16), ("silu", F32)):
        yield f"{name} layer {dtype}", functools.partial(layer, name, dtype)
    for rank, N, dtype in ((16, 0, BF16), (128, 3, BF16), (16, 0, F32)):
        call = functools.partial(adapted_layer, rank, N, dtype)
        yield f"layer with adapters {rank} {N} {dtype}", call


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def gradient(
    M: int, N: int, R: int, named: tuple[bool, bool], dtype: torch.dtype,
    out: torch.dtype | None = None,
) -> None:  # fmt: skip
    """`named`: whether rows of a, and of b, are."""
    a, b = (
        empty(T if n else R, width, dtype=dtype) for n, width in zip(named, (M, N), strict=True)
    )
    names = (empty(R, dtype=torch.int32) if n else None for n in named)
    wgrad.wgrad(a, b, empty(E, dtype=torch.int32), *names, out or dtype)


def onto(M: int, N: int, R: int, dtype: torch.dtype) -> None:
    a, b, ends = empty(R, M, dtype=dtype), empty(R, N, dtype=dtype), empty(E, dtype=torch.int32)
    wgrad.wgrad_onto(a, b, ends, None, None, empty(E, M, N, dtype=F32))


def activation(name: str, width: int, dtype: torch.dtype, for_weights: bool) -> None:
    act = Act(*Activation(**{"kind": "silu"} | ACTIVATIONS[name]).args)
    F = 2 * width if act.gated else width
    activate_backward.activate_backward(
        empty(T * K, width, dtype=dtype), empty(T * K, F, dtype=dtype), empty(T, K, dtype=F32),
        empty(T * K, dtype=torch.int32), act, for_weights,
    )  # fmt: skip


def layer(name: str, dtype: torch.dtype) -> None:
    """Both directions of a layer with biases."""
    act = Act(*Activation(**{"kind": "silu"} | ACTIVATIONS[name]).args)
    D, I, R = 2048, 768, T * K  # noqa: E741
    F = 2 * I if act.gated else I
    x, w13, w2 = (empty(*shape, dtype=dtype) for shape in ((T, D), (E, F, D), (E, D, I)))
    b13, b2 = empty(E, F, dtype=dtype), empty(E, D, dtype=dtype)
    weights, ids = empty(T, K, dtype=F32), empty(T, K, dtype=torch.int64)
    plain = (False, False)  # those for Hopper: `offline_grouped.py`
    training.saving(x, weights, ids, w13, w2, b13, b2, None, False, act, plain)
    kept = empty(R, F, dtype=dtype), empty(R, dtype=torch.int32), empty(E, dtype=torch.int32)
    training.backward(x, *kept, weights, w13, w2, b2, False, act, (True, True), plain)


def adapted_layer(rank: int, N: int, dtype: torch.dtype) -> None:
    """Both directions of a layer with adapters; A is transposed, too."""
    D, I, R, G = 2048, 768, T * K, max(N, 1) * E  # noqa: E741
    x, w13, w2 = (empty(*shape, dtype=dtype) for shape in ((T, D), (E, 2 * I, D), (E, D, I)))
    weights, ids = empty(T, K, dtype=F32), empty(T, K, dtype=torch.int64)
    of = adapters.Adapters(
        scale_N=empty(max(N, 1), dtype=F32),
        a13_GrD=empty(G, rank, D, dtype=dtype), b13_GFr=empty(G, 2 * I, rank, dtype=dtype),
        a2_GrI=empty(G, rank, I, dtype=dtype), b2_GDr=empty(G, D, rank, dtype=dtype),
        adapter_T=empty(T, dtype=torch.int32) if N else None,
    )  # fmt: skip
    of_layer = Experts(
        w13_EFD=w13, w2_EDI=w2, b13_EF=None, b2_ED=None, transposed=False, act=Act("silu")
    )
    plain = (False, False)
    training.saving_adapted(x, weights, ids, None, of_layer, of, plain)
    y, order = empty(R, 2 * I, dtype=dtype), tuple(empty(n, dtype=torch.int32) for n in (R, E))
    training.backward_adapted(x, y, order, weights, of_layer, of, (True, True), plain)
    adapters.turned(of.pair13, True)
