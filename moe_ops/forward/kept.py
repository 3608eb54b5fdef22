"""What decoder layers keep from token to token, and what layers get in place of a cache where that
is more than keys and values.

A layer keeps tensors by name, all with a row for each sequence. Those with slots grow by one token
a step; others, the states of convolutions and of recurrences, are as large after any number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
)

from moe_ops.forward.kinds import Keeps, kinds_of
from moe_ops.forward.layer_cache import Unviewable, View

SLOTS = {"keys": 2, "values": 2, "indexer_keys": 1, "idx_keys": 2}  # the dims of slots
CONV, RECURRENT = "conv_states", "recurrent_states"  # of these there may be several, by number
Kept = dict[str, Tensor]


def kept_of(layer: Any) -> Kept:
    """What a layer of a dynamic cache of transformers keeps."""
    found = {name: getattr(layer, name, None) for name in SLOTS}
    for kind in (CONV, RECURRENT):
        states = getattr(layer, kind, {})
        found |= {f"{kind}.{number}": state for number, state in states.items()}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def put_states(layer: Any, kept: Kept) -> None:
    """Put states, in place of those that it has, into a layer of a cache of transformers. What it
    has is not written to: others may share it."""
    for name, state in kept.items():
        kind, _, number = name.partition(".")
        if kind not in (CONV, RECURRENT):
            continue
        if getattr(layer, kind)[int(number)] is not None:
            getattr(layer, kind)[int(number)] = state.clone()
        elif kind == CONV:
            layer.update_conv_state(state, int(number))
        else:
            layer.update_recurrent_state(state, int(number))


def add_tokens(layer: Any, kept: Kept) -> None:
    """Add what has slots, of more tokens, to a layer of a cache of transformers. It copies them."""
    if "keys" in kept:
        layer.update(kept["keys"], kept["values"])
    if "indexer_keys" in kept:
        layer.update_indexer(kept["indexer_keys"])
    if "idx_keys" in kept:
        layer.update_index(kept["idx_keys"].clone())


def cache_refusal(cache: Any, config: Any, rows: int) -> str | None:
    """Why steps for so many sequences cannot go on with a cache of the caller, or None."""
    if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
        kind = type(cache).__name__
        return f"the caller has {'an offloaded' if kind == 'DynamicCache' else 'a'} {kind}"
    got = [type(layer) for layer in cache.layers]
    if got != [type(layer) for layer in DynamicCache(config=config).layers]:
        grown = getattr(cache, "layer_class_to_replicate", None)
        plain = all(kind.keeps is Keeps.ATTENTION for kind in kinds_of(config))
        if not plain or grown is not DynamicLayer or {*got} - {DynamicLayer}:
            return "the caller's cache has layers of other kinds"
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        return "the caller's cache keeps tokens beyond its windows"
    held = {x.shape[0] for layer in cache.layers for x in kept_of(layer).values()}
    if held - {rows}:
        return f"the caller's cache has {sorted(held)[0]} sequences in place of {rows}"
    return None


class Every:
    """The layers of a cache, of which every one is the same."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getitem__(self, index: Any) -> Any:
        return self._layer


class ByNumber:
    """The states of a kind that a layer keeps several of, None for those not there yet."""

    def __init__(self, kept: Kept, kind: str) -> None:
        self._kept = kept
        self._kind = kind

    def __getitem__(self, number: int) -> Tensor | None:
        return self._kept.get(f"{self._kind}.{number}")


class OfLayer(View):
    """A cache as one layer gets it, whatever number the layer has. It is also that cache's layer,
    as which some models ask it."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    @property
    def layers(self) -> Every:
        return Every(self)

    @property
    def keys(self) -> Tensor:
        return self.kept["keys"]

    @property
    def values(self) -> Tensor:
        return self.kept["values"]

    def is_recording_past(self, layer_idx: Any = 0) -> bool:
        return self.record_past

    def get_conv_state(self, layer_idx: Any, state_idx: int = 0) -> Tensor | None:
        return self.conv_states[state_idx]

    def get_recurrent_state(self, layer_idx: Any, state_idx: int = 0) -> Tensor | None:
        return self.recurrent_states[state_idx]

    # By these models of transformers before 5.24 ask.

    record_past = False

    @property
    def conv_states(self) -> ByNumber:
        return ByNumber(self.kept, CONV)

    @property
    def recurrent_states(self) -> ByNumber:
        return ByNumber(self.kept, RECURRENT)

    def has_previous_state(self, layer_idx: Any, state_idx: int = 0) -> bool:
        return self.conv_states[state_idx] is not None


class Arriving(OfLayer):
    """What a layer gets for an empty cache. What it would have in its cache after the call's own
    tokens is then in `kept`."""

    def __init__(self) -> None:
        super().__init__({})

    def twice(self) -> Arriving:
        """What a layer gets for two sequences in place of one."""
        return Arriving()

    def _keep(self, name: str, x: Tensor) -> Tensor:
        if name in self.kept:
            raise Unviewable(f"a layer updates the {name} of its cache twice")
        self.kept[name] = x
        return x

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._keep("keys", keys), self._keep("values", values)

    def update_indexer(self, keys: Tensor, layer_idx: Any = 0) -> Tensor:
        return self._keep("indexer_keys", keys)

    def update_index(self, keys: Tensor) -> Tensor:
        return self._keep("idx_keys", keys)

    def update_conv_state(
        self,
        inputs: Tensor,
        layer_idx: Any,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        state = inputs
        if conv_kernel_size is not None:
            # Zeros also where there are enough inputs: a branch would be code of its own.
            padded = torch.nn.functional.pad(inputs, (conv_kernel_size, 0))
            state = padded[..., inputs.shape[-1] :]
        self._keep(f"{CONV}.{state_idx}", state)
        return inputs

    def update_recurrent_state(
        self, state: Tensor, layer_idx: Any, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self._keep(f"{RECURRENT}.{state_idx}", state)

    def get_seq_length(self, layer_idx: Any = 0) -> int:
        keys = self.kept.get("keys")
        return 0 if keys is None else keys.shape[-2]

    def get_query_offset(self, layer_idx: Any = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: Any = 0) -> tuple[int, int]:
        return query_length, 0


class Continuing(OfLayer):
    """What a layer gets for a cache with tokens in it, for several more: it sees these, too, and
    what is new of it is then in `new`, states that were given included."""

    def __init__(self, past: Kept) -> None:
        super().__init__({name: _own(name, x) for name, x in past.items()})
        self.added: Kept = {}

    def twice(self) -> Continuing:
        """What a layer gets for two sequences in place of one."""
        return Continuing({name: x.repeat_interleave(2, 0) for name, x in self.kept.items()})

    @property
    def new(self) -> Kept:
        return {**{name: x for name, x in self.kept.items() if name not in SLOTS}, **self.added}

    def _add(self, name: str, x: Tensor) -> Tensor:
        if name in self.added:
            raise Unviewable(f"a layer updates the {name} of its cache twice")
        self.added[name] = x
        self.kept[name] = torch.cat([self.kept[name], x], SLOTS[name])
        return self.kept[name]

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self._add("keys", keys), self._add("values", values)

    def update_indexer(self, keys: Tensor, layer_idx: Any = 0) -> Tensor:
        return self._add("indexer_keys", keys)

    def update_index(self, keys: Tensor) -> Tensor:
        return self._add("idx_keys", keys)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: Any, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        name = f"{CONV}.{state_idx}"
        inputs = torch.cat([self.kept[name], inputs], -1)
        self.kept[name] = inputs[..., inputs.shape[-1] - self.kept[name].shape[-1] :]
        return inputs

    def update_recurrent_state(
        self, state: Tensor, layer_idx: Any, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.kept[f"{RECURRENT}.{state_idx}"] = state
        return state

    def get_seq_length(self, layer_idx: Any = 0) -> int:
        return self.kept["keys"].shape[-2]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: Any = 0) -> tuple[int, int]:
        return self.kept["keys"].shape[-2] + query_length, 0


def _own(name: str, past: Tensor) -> Tensor:
    """A copy of what is past, for any number of sequences and tokens."""
    past = past.clone(memory_format=torch.contiguous_format)
    maybe_mark_dynamic(past, 0)
    if name in SLOTS:
        maybe_mark_dynamic(past, SLOTS[name])
    return past


def next_slots(filled: Tensor, tokens: int) -> Tensor:
    """The numbers of the slots that so many tokens go into."""
    if tokens == 1:
        return filled.view(1)
    return filled + torch.arange(tokens, device=filled.device)


class Stepping(OfLayer):
    """What a layer gets in a step for a cache that holds `filled` tokens in buffers of `slots`,
    which it changes in place."""

    def __init__(self, kept: Kept, slots: int, filled: Tensor) -> None:
        super().__init__(kept)
        self.slots = slots
        self.filled = filled
        self.added = 0  # tokens, by the layer itself

    def _put(self, name: str, x: Tensor) -> Tensor:
        buffer, dim = self.kept[name], SLOTS[name]
        return buffer.index_copy_(dim, next_slots(self.filled, x.shape[dim]), x)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.added = keys.shape[-2]
        return self._put("keys", keys), self._put("values", values)

    def update_indexer(self, keys: Tensor, layer_idx: Any = 0) -> Tensor:
        return self._put("indexer_keys", keys)

    def update_index(self, keys: Tensor) -> Tensor:
        return self._put("idx_keys", keys)

    def update_conv_state(
        self, inputs: Tensor, layer_idx: Any, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        state = self.kept[f"{CONV}.{state_idx}"]
        inputs = torch.cat([state, inputs], -1)
        state.copy_(inputs[..., inputs.shape[-1] - state.shape[-1] :])
        return inputs

    def update_recurrent_state(
        self, state: Tensor, layer_idx: Any, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return self.kept[f"{RECURRENT}.{state_idx}"].copy_(state)

    def get_seq_length(self, layer_idx: Any = 0) -> Tensor:
        return self.filled + self.added  # a copy, as `filled` changes in place

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: Any = 0) -> tuple[int, int]:
        return self.slots, 0
