"""Masks for `generate`, as transformers makes them, without asking the device for a value."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_masks_for_generate,
    sdpa_mask,
)

from moe_ops.forward.layer_cache import CACHE

Decoder = Callable[..., Any]
PARTS = {"hybrid_sliding": ("sliding_attention", "linear_attention")}


class Sizes:
    """The lengths of a cache, as transformers' mask functions ask for them."""

    is_compileable = True
    is_sliding = (False,)

    def __init__(self, slots: int, filled: Tensor) -> None:
        self.slots = slots
        self.filled = filled

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.filled

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.slots, 0


def maker_of(model: Any) -> Callable[..., Any]:
    """What makes the masks of a model for `generate`; some have a function of their own."""
    return getattr(model, "create_masks_for_generate", create_masks_for_generate)


def masks(
    config: Any,
    like: Tensor,
    valid: Tensor | None,
    sizes: Any,
    positions: Tensor,
    make: Callable[..., Any] = create_masks_for_generate,
) -> Any:
    """The masks of one pass, as transformers makes them for a model of this configuration. Of
    positions along several axes the first will do."""
    while positions.dim() > 2:
        positions = positions[0]
    return make(
        config=with_windows(config),
        inputs_embeds=like,
        attention_mask=valid,
        position_ids=positions,
        **{CACHE: sizes},
    )


def with_windows(config: Any) -> Any:
    """The configuration, with layers that attend to a window and keep a state said to be both.

    For these transformers makes causal masks, as its static caches hold no more than the window;
    ours hold all slots.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    if "hybrid_sliding" not in kinds:
        return config
    text = copy.copy(text)
    text.layer_types = [part for kind in kinds for part in PARTS.get(kind, (kind,))]
    return text


def bool_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """`sdpa_mask` for prompts of which a mask, if there is one, hides something.

    transformers' own looks whether it does, and while a graph is captured takes it that it does.
    """
    window = kwargs.get("local_size")
    causal = kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", True)
    if causal and (window is None or kwargs["kv_length"] < window):
        return None
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def float_mask(*args: Any, **kwargs: Any) -> Tensor:
    """`eager_mask`, which copies a number from the host."""
    seen = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    assert seen is not None
    mask = torch.zeros(seen.shape, dtype=kwargs["dtype"], device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)


# What makes masks that a graph can repeat, by the name of the attention they are for.
REPEATABLE = {"sdpa": bool_mask, "eager": float_mask}


def repeatable(config: Any) -> Any:
    """The configuration for masks made by functions of ours, for an attention among `REPEATABLE`: a
    copy, as the model's own serves others meanwhile."""
    attention = attention_of(config)
    assert attention is not None
    ours = f"moe_ops_prompt_{attention}"
    ALL_MASK_ATTENTION_FUNCTIONS.register(ours, REPEATABLE[attention])
    config = copy.copy(config.get_text_config(decoder=True))
    config._attn_implementation_internal = ours
    return config


def attention_of(config: Any) -> str | None:
    """The name of a model's attention."""
    name: str | None = config.get_text_config(decoder=True)._attn_implementation_internal
    return name


def masks_of(config: Any, like: Tensor, mask: Tensor | None, empty: Any, ids: Tensor) -> Any:
    """The masks of a forward from its first token on, of the dtype of `like`. Without a cache
    transformers would look for packed sequences, and while a graph is captured take it that there
    are some."""
    B, S = ids.shape
    positions = torch.arange(S, device=ids.device).expand(B, S)
    return masks(repeatable(config), like.new_empty(B, S, 0), mask, empty, positions)


def masked(decoder: Decoder, unmasked: Decoder, made: Any, ids: Tensor) -> Decoder:
    """The decoder with masks that were made for it, so that it makes none; `unmasked` if there are
    none to hide anything."""
    if made is not None:
        return functools.partial(decoder, attention_mask=made)
    nothing = ids.new_empty((1, 1, 1, 1), dtype=torch.bool)  # of 4 dims, as masks that are made
    return functools.partial(unmasked, attention_mask=nothing)
