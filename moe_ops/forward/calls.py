"""Which calls of a decoder a graph can repeat, and what it gives for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.utils import ModelOutput

from moe_ops.arena import Buffer
from moe_ops.forward.caches import keys_refusal
from moe_ops.forward.layer_cache import CACHE, Incoming, LikeEmpty, Put
from moe_ops.forward.masks import REPEATABLE, attention_of, masked, masks_of

MOST_TOKENS = 4096
ATTENDS = {"full_attention", "sliding_attention"}
STATES = "last_hidden_state"
Key = tuple[Any, ...]


class Collected(LikeEmpty):
    """An empty cache that remembers what each layer leaves."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self.views: dict[int, Incoming] = {}

    def seen_by(self, index: int) -> tuple[Incoming, Put]:
        view = self.views[index] = Incoming()
        return view, lambda: None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of a decoder that a graph can repeat: ids [B, S], a mask likewise or None, an empty
    cache, whether one is made, what else it is given, which is no tensor, and how many tokens the
    sequences of its graph have: S or, with padding behind each, more."""

    ids: Tensor
    mask: Tensor | None
    cache: DynamicCache | None
    caches: bool
    constants: dict[str, Any]
    tokens: int

    @property
    def key(self) -> Key:
        """What calls of one graph have in common; the first three are as a report has them."""
        constants = sorted((name, repr(value)) for name, value in self.constants.items())
        return len(self.ids), self.tokens, self.mask is not None, self.caches, *constants


def call_of(kwargs: dict[str, Any], config: Any) -> Call | str:
    """A call of a decoder of this configuration that a graph can repeat, or why none can."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
    cache = given.pop(CACHE, None)
    caches = bool(given.pop("use_cache", getattr(config, "use_cache", False)))
    reason = _refusal(ids, mask, cache, given) or attention_refusal(config)
    if reason is not None:
        return reason
    B, S = ids.shape
    if torch.is_autocast_enabled(ids.device.type):
        return "autocast is on, whose casts a graph would not repeat"
    mask = None if mask is None or bool(mask.all()) else mask.bool()  # as transformers asks, too
    tokens = bucket_of(S) if B * bucket_of(S) <= MOST_TOKENS else S
    return Call(ids, mask, cache, caches or cache is not None, given, tokens)


def _refusal(ids: Any, mask: Any, cache: Any, given: dict[str, Any]) -> str | None:
    """Why a graph cannot repeat calls with such ids, mask, cache and other arguments, or None."""
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return "it has no input_ids [sequences, tokens]"
    if ids.numel() == 0:
        return "it has no tokens"
    if ids.numel() > MOST_TOKENS:
        return f"it has more than {MOST_TOKENS} tokens, for which kernels take as long as the host"
    if mask is not None and not _is_like(mask, ids):
        return "its attention_mask is not one of its tokens"
    if cache is not None and (type(cache) is not DynamicCache or cache.get_seq_length() != 0):
        return f"its {CACHE} is no empty DynamicCache"
    others = [n for n, x in given.items() if not isinstance(x, (bool, int, float, str))]
    return f"it takes {', '.join(others)}, too" if others else None


def _is_like(mask: Any, ids: Tensor) -> bool:
    return isinstance(mask, Tensor) and (mask.shape, mask.device) == (ids.shape, ids.device)


def attention_refusal(config: Any) -> str | None:
    """Why no graph can repeat masks of a model's attention, or None."""
    attention = attention_of(config)
    if attention in REPEATABLE:
        return None
    return f"its attention is {attention}, not {' or '.join(REPEATABLE)}"


def bucket_of(tokens: int) -> int:
    """The next length that graphs are made for: eight between two powers of two, so that at most an
    eighth is padding; each up to 16."""
    step = 1 << max(0, (tokens - 1).bit_length() - 4)
    return -(-tokens // step) * step


def capture_refusal(decoder: nn.Module) -> str | None:
    """Why no graph can repeat calls of a decoder, or None. Its tokens must not see those behind
    them, by what its attention says of itself, as sequences are padded at their ends; and all that
    its layers get for a mask must be one that `masks` makes."""
    config: Any = decoder.config
    said = [m.is_causal for m in decoder.modules() if hasattr(m, "is_causal")]
    if not said or not all(said) or getattr(config, "use_bidirectional_attention", None):
        return "its attention is not causal"
    others = set(getattr(config, "layer_types", None) or ()) - ATTENDS
    if others:
        return f"it has layers of {', '.join(sorted(others))}"
    return keys_refusal(config)


def empty_cache(call: Call, config: Any) -> DynamicCache:
    """The cache that a call fills: the caller's, or one as models make it."""
    return DynamicCache(config=config) if call.cache is None else call.cache


def output_refusal(out: Any, call: Call, config: Any) -> str | None:
    """Why no graph can give what a decoder gave, or None."""
    if not isinstance(out, ModelOutput) or not isinstance(out.get(STATES), Tensor):
        return f"its decoder gives {type(out).__name__}"
    others = [name for name, value in out.items() if name not in (STATES, CACHE)]
    if others:
        return f"its decoder gives {', '.join(others)}, too"
    made, wanted = out.get(CACHE), empty_cache(call, config) if call.caches else None
    if type(made) is not type(wanted):
        return f"its decoder gives a {type(made).__name__} for a cache"
    if made is not None and wanted is not None:
        kinds, others = ([type(layer).__name__ for layer in c.layers] for c in (made, wanted))
        if kinds != others:
            return f"its cache has layers of {', '.join(sorted(set(kinds)))}"
    return None


def like_output(out: ModelOutput, tokens: int) -> Callable[[Buffer, int], ModelOutput]:
    """What makes outputs of a decoder like this one, of copies of the first states of sequences in
    a buffer, which have so many tokens."""
    kind, dtype, (B, _, D) = type(out), out[STATES].dtype, out[STATES].shape

    def make(buffer: Buffer, S: int) -> ModelOutput:
        states = buffer.view((B, tokens, D), dtype)[:, :S]
        return kind(**{STATES: states.clone(memory_format=torch.contiguous_format)})

    return make


def is_dense(x: Tensor) -> bool:
    """Whether its elements lie side by side, in whichever order of dims."""
    return math.prod(x.shape) == 1 + sum(
        (size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def recorded(decoder: Any, unmasked: Any, config: Any, kwargs: dict[str, Any]) -> Any:
    """What a decoder gives while somebody captures it. Its layers get the masks that they get
    otherwise: left to itself it makes others meanwhile, for which layers are not compiled."""
    ids: Tensor = kwargs["input_ids"]
    mask, cache = kwargs.get("attention_mask"), kwargs.get(CACHE)
    plain = (
        attention_of(config) in REPEATABLE
        and ids.dim() == 2
        and (mask is None or mask.shape == ids.shape)
        and (cache is None or (type(cache) is DynamicCache and cache.get_seq_length() == 0))
        and not any(isinstance(kwargs.get(n), Tensor) for n in ("position_ids", "inputs_embeds"))
    )
    if not plain:
        return decoder(**kwargs)
    like = ids.new_empty(0, dtype=decoder.__self__.dtype)
    mask = None if mask is None else mask.bool()
    made = masks_of(config, like, mask, Collected(DynamicCache(config=config).layers), ids)
    given = {name: value for name, value in kwargs.items() if name != "attention_mask"}
    return masked(decoder, unmasked, made, ids)(**given)
