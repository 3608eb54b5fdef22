"""The cache of `generate`: buffers that stay where they are, with one slot for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from moe_ops.forward.kept import (
    SLOTS,
    Arriving,
    Continuing,
    Kept,
    OfLayer,
    Stepping,
    add_tokens,
    next_slots,
    put_states,
)
from moe_ops.forward.kinds import Keeps, Kind
from moe_ops.forward.layer_cache import (
    CACHE,
    Filled,
    Incoming,
    LikeEmpty,
    Put,
    Unviewable,
    View,
)


class SlotLayer(CacheLayerMixin):
    """What one layer keeps: keys and values [rows, heads, slots, head size], or more by name.

    A layer that attends to a window has as many slots as any other: which of them it sees is the
    mask's affair, so that no step differs from another in anything but the contents of buffers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(
        self,
        rows: int,
        slots: int,
        filled: Tensor,
        kind: Kind = Kind(),  # noqa: B008, it is frozen
    ) -> None:
        super().__init__()
        self.rows = rows
        self.slots = slots
        self.filled = filled  # how many slots are taken, a scalar on the device
        self.keeps = kind.keeps
        self.window = kind.window
        self.kept: Kept = {}

    def __getattr__(self, name: str) -> Any:
        raise Unviewable(f"a model asks a layer of its cache for {name}")

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = self._buffer("keys", keys), self._buffer("values", values)
        self.is_initialized = True

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """The buffer of this name, made at first for what has these sizes."""
        if name not in self.kept:
            shape = [self.rows, *like.shape[1:]]
            if name in SLOTS:
                shape[SLOTS[name]] = self.slots
            # Zeros: what is masked is multiplied by zero, and a NaN would survive that.
            self.kept[name] = torch.zeros(shape, dtype=like.dtype, device=like.device)
        return self.kept[name]

    def fill(self, arrived: Kept, end: int) -> None:
        """Take over what a layer kept of a prompt whose tokens end before this slot; rows to spare
        repeat the first."""
        if not arrived and self.keeps is Keeps.ATTENTION:
            raise ValueError(
                f"a decoder layer did not call {CACHE}.update; call the model itself "
                "instead of the one that moe_ops.compile returned"
            )
        if "keys" in arrived and not self.is_initialized:
            self.lazy_initialization(arrived["keys"], arrived["values"])
        for name, new in arrived.items():
            part, dim, n = self._buffer(name, new), SLOTS.get(name), new.shape[0]
            if dim is not None:
                part = part.narrow(dim, end - new.shape[dim], new.shape[dim])
            part[:n].copy_(new)
            if n < self.rows:
                part[n:].copy_(new[:1].expand(self.rows - n, *new.shape[1:]))

    @property
    def states(self) -> Iterator[Tensor]:
        """The buffers without slots, whose contents a step replaces."""
        return (buffer for name, buffer in self.kept.items() if name not in SLOTS)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put the tokens of each row into the next slots. Returns all slots."""
        slot = next_slots(self.filled, key_states.shape[2])
        self.keys.index_copy_(2, slot, key_states)
        self.values.index_copy_(2, slot, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots, 0

    def get_seq_length(self, layer_idx: Any = 0) -> Tensor:
        return self.filled

    def get_max_length(self) -> int:
        return self.slots

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows change places within the buffers, whose addresses a captured graph holds."""
        for buffer in self.kept.values():
            buffer[: len(beam_idx)].copy_(buffer.index_select(0, beam_idx.to(buffer.device)))

    def seen_of(self, tokens: int) -> int:
        """How many of so many tokens the next one sees, itself not counted."""
        return tokens if self.window is None else min(tokens, self.window - 1)

    def past(self, rows: int, tokens: int) -> Kept:
        """What is kept of so many sequences and tokens, and seen by the next one."""
        seen = self.seen_of(tokens)
        return {
            name: x[:rows].narrow(SLOTS[name], tokens - seen, seen) if name in SLOTS else x[:rows]
            for name, x in self.kept.items()
        }

    def add_to(self, layer: Any, rows: int, parts: Sequence[slice]) -> None:
        """Add the tokens of so many sequences, in these parts, to a layer of a cache of
        transformers. What it keeps of them are copies."""
        kept = {name: buffer[:rows] for name, buffer in self.kept.items()}
        put_states(layer, kept)
        for part in parts:
            add_tokens(layer, {n: x[_of_slots(n, part)] for n, x in kept.items() if n in SLOTS})


def _of_slots(name: str, part: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * SLOTS[name], part)


class Slots(Cache):
    """The layers' buffers, as a step's model is given them: a cache that holds `filled` tokens."""

    def __init__(self, kinds: Sequence[Kind], rows: int, slots: int, filled: Tensor) -> None:
        super().__init__(layers=[SlotLayer(rows, slots, filled, kind) for kind in kinds])

    def seen_by(self, index: int) -> tuple[SlotLayer | OfLayer, Put]:
        """Its slots, to which the layer adds by itself."""
        layer = self.layers[index]
        if layer.keeps is Keeps.ATTENTION:
            return layer, lambda: None
        return Stepping(layer.kept, layer.slots, layer.filled), lambda: None

    @property
    def states(self) -> list[Tensor]:
        """What of all layers has no slots."""
        return [state for layer in self.layers for state in layer.states]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for layer in self.layers for buffer in layer.kept.values())


class Empty(LikeEmpty):
    """The layers' buffers, as a prompt's model is given them: like an empty dynamic cache."""

    def __init__(self, slots: Slots, tokens: int) -> None:
        super().__init__(layers=list(slots.layers))
        self._tokens = tokens  # of the prompt
        self._seen: set[int] = set()
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_is_made" in vars(self):  # steps would not find it
            raise Unviewable(f"a model sets {name} of its cache")
        super().__setattr__(name, value)

    def seen_by(self, index: int) -> tuple[View, Put]:
        """A place for what the layer keeps of the prompt, which then fills its buffers."""
        if index in self._seen:
            raise Unviewable("a layer runs twice for one token")
        self._seen.add(index)
        return self._view(self.layers[index])

    def _view(self, layer: SlotLayer) -> tuple[View, Put]:
        if layer.keeps is not Keeps.ATTENTION:
            arriving = Arriving()
            return arriving, lambda: layer.fill(arriving.kept, self._tokens)
        incoming = Incoming()
        return incoming, lambda: layer.fill(_of(incoming.keys, incoming.values), self._tokens)


class Begun(Empty):
    """The layers' buffers, with tokens in them, as the model of a prompt is given them that goes on
    behind these: like a dynamic cache."""

    def __init__(self, slots: Slots, rows: int, begun: int, tokens: int) -> None:
        self._rows = rows
        self._begun = begun
        super().__init__(slots, begun + tokens)

    def _view(self, layer: SlotLayer) -> tuple[View, Put]:
        past = layer.past(self._rows, self._begun)
        if layer.keeps is not Keeps.ATTENTION:
            view = Continuing(past)
            return view, lambda: layer.fill(view.new, self._tokens)
        filled = Filled(past["keys"], past["values"])
        return filled, lambda: layer.fill(_of(*(filled.new or (None, None))), self._tokens)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._begun

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        seen = self.layers[layer_idx].seen_of(self._begun)
        return seen + query_length, self._begun - seen

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.window is not None for layer in self.layers]


def _of(keys: Tensor | None, values: Tensor | None) -> Kept:
    return {} if keys is None or values is None else {"keys": keys, "values": values}
