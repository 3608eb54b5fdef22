"""Calls with adapters that between them launch every tile of the products of experts, for
`offline.py` to compile the kernels of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_ops.backends.triton import run_experts
from moe_ops.ops.adapters import Adapter
from moe_ops.ops.experts import ExpertsCall
from moe_ops.testing import LAYERS
from tests.kernels.offline_codes import PATHS, quantized_call
from tests.kernels.offline_floats import layer_call

TOKENS = {"tiny": (1, 8), "rows": (8, 64, 256, 1024), "grouped": (256, 4096)}


def calls_with_adapters(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, rank, N in (("qwen3_30b", 16, 0), ("gpt_oss_20b", 128, 3)):
        case = LAYERS[name]
        for backend, counts in TOKENS.items():
            for T in counts if name == "qwen3_30b" else counts[-1:]:
                for dtype in (torch.bfloat16, torch.float16)[: 1 + (T == 8)]:
                    call = functools.partial(adapted, case, backend, T, rank, N, dtype)
                    yield f"{name} {backend} {T} {rank} {dtype}", call
    case = LAYERS["qwen3_30b"]
    call = functools.partial(adapted, case, "grouped", 256, 16, 3, torch.float32)
    yield "float32 grouped", call
    for backend, T in (("tiny", 1), ("tiny", 4), ("rows", 16), ("rows", 256), ("rows", 1024)):
        for rank, N in ((16, 0), (16, 3), (128, 0)):
            call = functools.partial(coded, case, backend, T, rank, N)
            yield f"{backend} {T} int4 {rank} {N}", call


def adapter_of(call: ExpertsCall, rank: int, N: int) -> Adapter:
    """Adapters of one rank; N of 0: one, which all tokens have."""
    (D, I), E = call.widths, call.w13_EFD.shape[0]  # noqa: E741
    G, F = max(N, 1) * E, 2 * I if call.gated else I

    def empty(*shape: int, dtype: torch.dtype = call.x_TD.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    return Adapter(
        scale_N=empty(max(N, 1), dtype=torch.float32),
        a13_GrD=empty(G, rank, D), b13_GFr=empty(G, F, rank),
        a2_GrI=empty(G, rank, I), b2_GDr=empty(G, D, rank),
        adapter_T=empty(len(call.x_TD), dtype=torch.int32) if N else None,
    )  # fmt: skip


def adapted(
    case: Any, backend: str, T: int, rank: int, N: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    call = layer_call(case, T, bool(N), dtype=dtype)
    kernel = PATHS.get(backend, f"{backend}/{backend}")
    run_experts(kernel, call, adapter=adapter_of(call, rank, N))


def coded(case: Any, backend: str, T: int, rank: int, N: int) -> None:
    """By each path of a backend that runs here."""
    call = quantized_call(case, T, "int4:1x128:bfloat16", "")
    for kernel in (backend, f"{backend}/{backend}"):
        run_experts(kernel, call, adapter=adapter_of(call, rank, N))
