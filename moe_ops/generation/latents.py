"""Attention over latents as they are, in the steps of models whose attention would expand them.

Such a model caches, for each token, a latent and a rotated key that all heads share, and has its
`expand_kv` make keys and values of every slot through `kv_b_proj`. For few queries it is the same,
and reads the latents once, to take a part of that weight to the query and the other to the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_ops.decode_ops.one_query_latents import OneQueryLatentsCall, one_query_latents
from moe_ops.decode_ops.one_query_latents import refusal as refusal_of_op
from moe_ops.generation.one_query import Attention, one_by_one, understood

NAME = "moe_ops_latents"
_registered: dict[Attention, str] = {}


class OverLatents:
    """What `subclass` puts before the class of an attention module, so that latents stay as they
    are until its attention function has them."""

    def expand_kv(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        return latents, rotated

    def expanded(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that the model's own method makes."""
        made: tuple[Tensor, Tensor] = super().expand_kv(latents, rotated)  # type: ignore[misc]
        return made


def over_latents(stock: Attention, adds: bool) -> Attention:
    """Attention of few queries of a module of `OverLatents` that computes what `stock` does of keys
    and values, under a mask that it adds if `adds`, or else that says what is seen. For other calls
    latents are expanded, and `stock` called."""

    def latents_or_stock(
        module: Any,
        query: Tensor,
        latents: Tensor,
        rotated: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        indices: Tensor | None = kwargs.pop("indices", None)
        mask, sinks = attention_mask, module.sinks if adds else None
        dtype = query.dtype if adds else torch.bool
        ours = mask is not None and understood(query, latents, mask, dtype, dropout, kwargs)
        if mask is not None and ours and scaling is not None and s_aux is sinks:
            out = absorbed(module, query, latents, rotated, mask, scaling, sinks, indices)
            if out is not None:
                return out, None
        keys, values = module.expanded(latents, rotated)
        if indices is not None:
            mask = only(indices, mask, query, keys.shape[2])
        more = kwargs if s_aux is None else {**kwargs, "s_aux": s_aux}
        return stock(module, query, keys, values, mask, dropout=dropout, scaling=scaling, **more)

    return latents_or_stock


def absorbed(
    module: Any,
    query: Tensor,
    latents: Tensor,
    rotated: Tensor,
    mask: Tensor,
    scaling: float,
    sinks: Tensor | None,
    indices: Tensor | None,
) -> Tensor | None:
    """[B, W, H, V]: queries [B, H, W, D] over latents [B, 1, S, R], by views of the weight that
    would expand them; None for what is not the op's, and where a gradient may be wanted."""
    B, H, W, _ = query.shape
    nope = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight
    if torch.is_grad_enabled() or weight.shape[0] != H * (nope + module.v_head_dim):
        return None
    weight_HNR = weight.unflatten(0, (H, -1))
    q_BHD = one_by_one(query)
    q_BHR = torch.bmm(q_BHD[..., :nope].transpose(0, 1), weight_HNR[:, :nope]).transpose(0, 1)
    given = (
        q_BHR, q_BHD[..., nope:], latents[:, 0], rotated[:, 0], mask[:, 0].flatten(0, 1),
        scaling, sinks, None if indices is None else indices.flatten(0, 1),
    )  # fmt: skip
    if refusal_of_op(OneQueryLatentsCall(*given)) is not None:
        return None
    out_BHR = one_query_latents(*given)
    out_HBV = torch.bmm(out_BHR.transpose(0, 1), weight_HNR[:, nope:].transpose(1, 2))
    return out_HBV.transpose(0, 1).unflatten(0, (B, W))


def only(indices: Tensor, mask: Tensor | None, query: Tensor, slots: int) -> Tensor:
    """A mask that also hides all but the slots that are chosen for each query, [B, S, C]."""
    B, S = indices.shape[:2]
    others = torch.ones(B, 1, S, slots, dtype=torch.bool, device=query.device)
    others.scatter_(-1, indices[:, None].long(), False)
    if mask is None or mask.dtype == torch.bool:
        return ~others if mask is None else mask & ~others
    return mask.masked_fill(others, torch.finfo(mask.dtype).min)


def register(stock: Attention | None) -> str:
    """Make attention over latents known to transformers, in place of a model's own "eager", or of
    "sdpa" if there is none; returns the name it has there."""
    key = stock or sdpa_attention_forward
    if key not in _registered:
        # A number: names that contain another attention's mean something to transformers.
        _registered[key] = f"{NAME}_{len(_registered)}"
        ALL_ATTENTION_FUNCTIONS.register(_registered[key], over_latents(key, stock is not None))
    return _registered[key]
