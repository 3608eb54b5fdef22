"""An attention that leaves token counts alone, so that tests see what the MoE layers do to them.

The attention functions of transformers specialise a sequence of one token (torch.matmul and
scaled_dot_product_attention branch on it), which costs a second graph that has nothing to do with
experts. This one is an opaque op: a graph that is compiled once stays one for every length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "moe_ops_tests"


@torch.library.custom_op("moe_ops_tests::attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scaling: float
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    if sinks is not None:  # gpt-oss: a learned logit per head that takes probability from the rest
        sink = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ v).transpose(1, 2).contiguous()


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, scaling: float
) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _attention(query, key, value, attention_mask, s_aux, scaling), None


def register() -> str:
    """Make the attention known to transformers; returns its name for `set_attn_implementation`."""
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME
