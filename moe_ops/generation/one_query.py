"""Attention of one query token per sequence, or a few, for the steps of `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_ops.decode_ops.one_query import OneQueryCall, formula, one_query, refusal
from moe_ops.kernels import gpus

NAME = "moe_ops_one_query"
# What models pass along that does not bear on one query under a mask.
BESIDE_THE_POINT = {"is_causal", "output_router_logits", "position_ids", "sliding_window"}
BESIDE_THE_POINT |= {"cache_position", "use_cache"}
MOST_QUERIES = 8  # of a sequence
Attention = Callable[..., tuple[Tensor, Any]]


def one_query_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """softmax(q kᵀ · scaling) v with the queries that share a key as rows of one product.

    transformers' own function repeats each key and value for every query head that shares it,
    which at one query is most of the memory traffic. Other calls go there.
    """
    mask = attention_mask
    if mask is None or not understood(query, key, mask, torch.bool, dropout, kwargs):
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return attended(query, key, value, mask, scaling), None


def in_place_of(eager: Attention) -> Attention:
    """Attention of a few queries that computes what `eager` does, a model's own function that adds
    its mask to the scores, and the logits `sinks` of the module to the denominator if there are
    any. Other calls go there.
    """

    def one_query_or_eager(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        mask = attention_mask
        ours = mask is not None and understood(query, key, mask, query.dtype, dropout, kwargs)
        if mask is None or not ours or scaling is None or s_aux is not module.sinks:
            more = {"dropout": dropout, "scaling": scaling, "s_aux": s_aux, **kwargs}
            return eager(module, query, key, value, mask, **more)
        return attended(query, key, value, mask, scaling, s_aux), None

    return one_query_or_eager


def understood(
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    mask_dtype: torch.dtype,
    dropout: float,
    kwargs: dict[str, Any],
) -> bool:
    """Whether a call asks for queries under a mask for all heads, and for nothing else."""
    B, _, W, _ = query.shape
    if mask.dtype != mask_dtype or mask.shape != (B, 1, W, key.shape[2]):
        return False
    if dropout != 0.0:
        return False
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in BESIDE_THE_POINT:
            return False
    return True


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, W, H, DV]: queries [B, H, W, D] over keys and values [B, N, S, D or DV], under a mask
    [B, 1, W, S] of bool (see) or floats (add); `sinks` [H] are logits of slots that hold nothing.

    The op has no gradient, so where one may be wanted it is the formula; so it is for many queries,
    for each of which the op reads the keys.
    """
    B, _, W, D = query.shape
    scale = D**-0.5 if scaling is None else scaling
    given = one_by_one(query).contiguous(), key, value, mask[:, 0].flatten(0, 1)
    ours = (
        has_kernels(query)
        and W <= MOST_QUERIES
        and not torch.is_grad_enabled()
        and refusal(OneQueryCall(*given, scale, sinks)) is None
    )
    return (one_query if ours else formula)(*given, scale, sinks).unflatten(0, (B, W))


def one_by_one(query: Tensor) -> Tensor:
    """Queries [B, H, W, D] as [B * W, H, D]; one of each as they lie, as passes look for it."""
    B, H, W, D = query.shape
    if W == 1:
        return query.reshape(B, H, D)
    return query.transpose(1, 2).reshape(B * W, H, D)


def has_kernels(query: Tensor) -> bool:
    """Whether attention of one query is worth an op here; elsewhere a compiler does better with the
    formula."""
    return query.is_cuda and not gpus.is_amd()


def register() -> None:
    """Make this attention known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, one_query_attention)
