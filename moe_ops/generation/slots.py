"""The key-value cache of `generate`: buffers that stay where they are, one slot per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from moe_ops.forward.layer_cache import CACHE, Incoming, LikeEmpty, Put


class SlotLayer(CacheLayerMixin):
    """The keys and values of one layer, [rows, heads, slots, head size].

    A layer that attends to a window has as many slots as any other: which of them it sees is the
    mask's affair, so that no step differs from another in anything but the contents of buffers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, rows: int, slots: int, filled: Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.slots = slots
        self.filled = filled  # how many slots are taken, a scalar on the device

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        # Zeros: what is masked is multiplied by zero, and a NaN would survive that.
        def buffer(x: Tensor) -> Tensor:
            shape = (self.rows, x.shape[1], self.slots, x.shape[3])
            return torch.zeros(shape, dtype=x.dtype, device=x.device)

        self.keys, self.values = buffer(keys), buffer(values)
        self.is_initialized = True

    def fill(self, incoming: Incoming) -> None:
        """Take over a prompt's keys and values; rows to spare repeat the first."""
        keys, values = incoming.keys, incoming.values
        if keys is None or values is None:
            raise ValueError(
                f"a decoder layer did not call {CACHE}.update; call the model itself "
                "instead of the one that moe_ops.compile returned"
            )
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        for buffer, new in ((self.keys, keys), (self.values, values)):
            n, tokens = new.shape[0], new.shape[2]
            buffer[:n, :, :tokens].copy_(new)
            if n < self.rows:
                buffer[n:, :, :tokens].copy_(new[:1].expand(self.rows - n, -1, -1, -1))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put one token per row into the next slot. Returns all slots."""
        slot = self.filled.view(1)
        self.keys.index_copy_(2, slot, key_states)
        self.values.index_copy_(2, slot, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots, 0

    def get_seq_length(self) -> Tensor:
        return self.filled

    def get_max_length(self) -> int:
        return self.slots

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows change places within the buffers, whose addresses a captured graph holds."""
        for buffer in (self.keys, self.values):
            buffer[: len(beam_idx)].copy_(buffer.index_select(0, beam_idx.to(buffer.device)))


class Slots(Cache):
    """The layers' buffers, as a step's model is given them: a cache that holds `filled` tokens."""

    def __init__(self, layers: int, rows: int, slots: int, filled: Tensor) -> None:
        super().__init__(layers=[SlotLayer(rows, slots, filled) for _ in range(layers)])

    def seen_by(self, index: int) -> tuple[SlotLayer, Put]:
        """Its slots, to which the layer adds by itself."""
        return self.layers[index], lambda: None

    @property
    def nbytes(self) -> int:
        buffers = (b for layer in self.layers for b in (layer.keys, layer.values))
        return sum(b.nbytes for b in buffers if b is not None)


class Empty(LikeEmpty):
    """The layers' buffers, as a prompt's model is given them: like an empty dynamic cache."""

    def __init__(self, slots: Slots) -> None:
        super().__init__(layers=slots.layers)

    def seen_by(self, index: int) -> tuple[Incoming, Put]:
        """A place for the prompt's keys and values, which then fill the layer's slots."""
        incoming = Incoming()
        return incoming, lambda: self.layers[index].fill(incoming)
