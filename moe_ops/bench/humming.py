"""Humming's grouped products as one layer: the first, the activation, the second, and the sum.

Of the package humming-kernels, which compiles its kernels when they are first called. A call is
charged both products with the tiles of Humming's own heuristics, its quantisation of tokens where
they are float8, its activation, and the weighted sum, which is a kernel of ours: Humming has none.
It is not charged routing, nor putting pairs of a token and an expert in the order of tiles.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ops.bench import formats
from moe_ops.bench.contenders import Contender, Refused
from moe_ops.bench.inputs import Routed, Weights
from moe_ops.testing import Case

NAME = "humming"
DTYPE = torch.bfloat16
# Of a row whose first half is gate and whose second half is up, in C++.
SPLIT, SILU = "binary_split", "a / (1.0f + __expf(-a)) * b"
INDEXED = "indexed"  # a product whose rows are looked up, so that no token is gathered before

Order = dict[str, Tensor]  # arguments of a product


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A format of ours in Humming's words, and the dtype by whose name it knows our scales."""

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any]
    scale: torch.dtype


INT4 = {"dtype": "uint4", "scale_dtype": "bfloat16", "group_size": 128}  # the value + 8, as ours
MXFP4 = {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32}
TOKENS, TOKENS8 = {"dtype": "bfloat16"}, {"dtype": "float8e4m3"}  # the latter with a scale each
FORMATS = {
    "int4:1x128:bfloat16": Stored(weights=INT4, inputs=TOKENS, scale=torch.bfloat16),
    "mxfp4": Stored(weights=MXFP4, inputs=TOKENS, scale=torch.float8_e8m0fnu),
    "mxfp4+float8_e4m3fn:row": Stored(weights=MXFP4, inputs=TOKENS8, scale=torch.float8_e8m0fnu),
}


def missing(device: torch.device) -> str | None:
    """What this machine lacks, or None."""
    if importlib.util.find_spec("humming") is None:
        return "the package humming-kernels is not installed"
    return None if device.type == "cuda" else f"needs a CUDA GPU, got {device.type}"


def unlike(format: str, dtype: torch.dtype) -> str | None:
    """Why a layer in this format and dtype is not compared, or None."""
    if format in FORMATS and dtype == DTYPE:
        return None
    return (
        f"takes {', '.join(FORMATS)} with {DTYPE}, got "
        f"{format or 'weights that are not quantised'} with {dtype}; choose one by --format"
    )


def humming(case: Case) -> Contender:
    """The contender, which refuses a layer that is not in one of FORMATS."""
    # As of compiled code: it allocates past torch.empty, and the first call compiles.
    return Contender(name=NAME, call=Layers(case.E), compiled=True)


class Layers:
    """A layer that is called with weights and a routing, Humming's order of both made once for
    each."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        # By address, which nothing else takes: what it was made of stays, too.
        self._products: dict[int, tuple[Weights, tuple[Any, Any]]] = {}
        self._orders: dict[tuple[int, int], tuple[Tensor, Order]] = {}
        self._rows: dict[int, Tensor] = {}

    def __call__(self, weights: Weights, routed: Routed) -> Tensor:
        """The layer's result [T, D]. Raises Refused if Humming does not take it."""
        first, second = self._products_of(weights, routed.x_TD)
        from humming.forward import may_process_input

        ids_TK = routed.ids_TK
        y_RF = self._product(first, routed.x_TD, ids_TK, ids_TK.shape[1])
        h_RI, _, h_scale_R1 = may_process_input(
            second.humming_config, inputs=y_RF, activation_type=SPLIT, activation_impl=SILU
        )
        y_RD = self._product(second, h_RI, ids_TK, 1, h_scale_R1)
        return self._sum(y_RD, routed.weights_TK)

    def _products_of(self, weights: Weights, x_TD: Tensor) -> tuple[Any, Any]:
        key = weights.w13_EFD.data_ptr()
        if key not in self._products:
            format = formats.spelled(weights.quant)
            reason = missing(x_TD.device) or unlike(format, x_TD.dtype)
            if reason is not None:
                raise Refused(reason)
            stored, beside = FORMATS[format], weights.beside
            first = layer_of(weights.w13_EFD, beside["w13_scale_EFG"], stored)
            second = layer_of(weights.w2_EDI, beside["w2_scale_EDG"], stored)
            self._products[key] = weights, (first, second)
        return self._products[key][1]

    def _product(
        self, layer: Any, x: Tensor, ids_TK: Tensor, top_k: int, scale: Tensor | None = None
    ) -> Tensor:
        """A row for each pair of a token and a choice, which is of row pair // top_k of x. Without
        a scale x is floats, of which Humming makes codes if it multiplies such."""
        tiles = tiles_of(layer, ids_TK.numel(), ids_TK.device)
        key = ids_TK.data_ptr(), tiles["block_shape"][0]
        if key not in self._orders:
            self._orders[key] = ids_TK, order_of(ids_TK, self._experts, key[1])
        computed: Tensor = layer(
            x,
            input_scale=scale,
            top_k=top_k,
            compute_config={"gemm_type": INDEXED},
            tuning_config=tiles,
            **self._orders[key][1],
        )
        return computed

    def _sum(self, y_RD: Tensor, weights_TK: Tensor) -> Tensor:
        from moe_ops.kernels.triton.experts.schedule.combine import sum_rows

        R = y_RD.shape[0]
        if R not in self._rows:
            self._rows[R] = torch.arange(R, dtype=torch.int32, device=y_RD.device)
        summed: Tensor = sum_rows(y_RD, self._rows[R], weights_TK, weights_TK.shape[1])
        return summed


def layer_of(codes: Tensor, scale: Tensor, stored: Stored) -> Any:
    """A HummingLayer with these weights, in the order of its kernels.

    codes: uint8 [E, N, K / 2], two values a byte; scale: [E, N, K / group].
    """
    from humming.layer import HummingLayer

    E, N, packed = codes.shape
    with torch.device(codes.device):
        layer = HummingLayer(
            shape_n=N,
            shape_k=2 * packed,
            weight_config=dict(stored.weights),
            input_config=dict(stored.inputs),
            num_experts=E,
            torch_dtype=DTYPE,
        )
    layer.load_from_tensors(tensors_of(codes, scale, stored))
    layer.transform()
    return layer


def tensors_of(codes: Tensor, scale: Tensor, stored: Stored) -> dict[str, Tensor]:
    """Weights as Humming stores them before it orders them: int32 words of eight values, the first
    in the lowest bits, which are the bytes of ours."""
    return {
        "weight": codes.contiguous().view(torch.int32),
        "weight_scale": scale.contiguous().view(stored.scale),
    }


def tiles_of(layer: Any, pairs: int, device: torch.device) -> Any:
    """The tuning that Humming chooses for so many rows. Raises Refused if it has none."""
    from humming.tune import get_heuristics_config

    config = layer.humming_config
    try:
        return get_heuristics_config(config, shape_m=pairs, gemm_type=INDEXED, device=device)
    except AssertionError as error:  # so it refuses sizes, without a word
        size = f"{config.shape_n} rows by {config.shape_k} columns"
        raise Refused(f"has no tiles for weights of {size}") from error


def order_of(ids_TK: Tensor, E: int, block: int) -> Order:
    """Pairs of a token and a choice (t * K + k) in tiles of one expert each, as an indexed product
    takes them: sorted by expert, and each expert's padded to whole tiles by R, which is no pair."""
    device, R = ids_TK.device, ids_TK.numel()
    ids_R = ids_TK.flatten().long()
    counts_E = torch.bincount(ids_R, minlength=E)
    tiles_E = -(-counts_E // block)
    padding_E = (tiles_E * block).cumsum(0) - tiles_E * block - (counts_E.cumsum(0) - counts_E)
    pairs_R = ids_R.argsort(stable=True)
    total = int(tiles_E.sum()) * block
    sorted_ids = torch.full((total,), R, dtype=torch.int32, device=device)
    sorted_ids[torch.arange(R, device=device) + padding_E[ids_R[pairs_R]]] = pairs_R.int()
    experts = torch.arange(E, dtype=torch.int32, device=device)
    return {
        "sorted_ids": sorted_ids,
        "expert_ids": experts.repeat_interleave(tiles_E),
        "num_tokens_padded": torch.tensor([total], dtype=torch.int32, device=device),
    }
