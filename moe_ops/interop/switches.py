"""What modules branch on beside their inputs and weights: what captured calls of them hold fast."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Switches = tuple[object, ...]
BY_SEQUENCE = "sequences have adapters of their own"  # the first switch of modules while they have
INSIDE = "_moe_ops_inside"  # the mark of a module whose switches another one has


class Board:
    """Which adapter each sequence of a batch has, for all layers of a model.

    The numbers are in buffers that stay where they are, one for each number of sequences, as
    captured calls read them; -1 is none. `index` is the buffer of the call that comes next, None
    while all sequences have the adapters that the layers say.
    """

    def __init__(self) -> None:
        self.index: Tensor | None = None
        self.entries: tuple[int, ...] = ()
        self.names: tuple[str, ...] = ()  # of the numbers
        self._buffers: dict[int, Tensor] = {}
        self._laid: dict[int, tuple[tuple[int, ...], int]] = {}

    def __reduce__(self) -> tuple[type[Board], tuple[()]]:
        return Board, ()  # a copy of a model is called for other sequences

    @property
    def is_on(self) -> bool:
        """Whether sequences have adapters of their own."""
        return self.index is not None

    def turn_on(self, entries: Sequence[int], names: tuple[str, ...], device: torch.device) -> None:
        """Give the sequences of the calls that come the adapters of these numbers, which are the
        places of names."""
        if any(b.device != device for b in self._buffers.values()):
            self._buffers.clear()
            self._laid.clear()
        self.entries, self.names = tuple(entries), names
        self._use(len(entries), len(entries), device)

    def turn_off(self) -> None:
        """Give all sequences what the layers say."""
        self.index, self.entries, self.names = None, (), ()

    def use(self, batch: int, rows: int) -> None:
        """Lay out the numbers for a call of so many sequences, in so many rows: those behind the
        sequences are copies of the first. A batch may have each sequence several times, side by
        side, as beams are.

        Raises ValueError for a batch that is no multiple of the sequences with adapters.
        """
        if self.index is not None:
            self._use(batch, rows, self.index.device)

    def reset(self) -> None:
        """Lay out the numbers for a call of the sequences that have them."""
        self.use(len(self.entries), len(self.entries))

    def check(self, batch: int) -> None:
        """Raise ValueError for a batch that is no multiple of the sequences with adapters."""
        if self.entries and batch % len(self.entries):
            raise ValueError(
                f"adapters were given for {len(self.entries)} sequences, but the call has {batch}; "
                "give one for each sequence"
            )

    def _use(self, batch: int, rows: int, device: torch.device) -> None:
        self.check(batch)
        if rows not in self._buffers:
            with torch.inference_mode(False):
                self._buffers[rows] = torch.empty(rows, dtype=torch.int32, device=device)
        self.index = self._buffers[rows]
        if self._laid.get(rows) != (self.entries, batch):
            numbers = [n for n in self.entries for _ in range(batch // len(self.entries))]
            numbers += numbers[:1] * (rows - batch)
            with torch.inference_mode(False), torch.no_grad():
                self.index.copy_(torch.tensor(numbers, dtype=torch.int32))
            self._laid[rows] = self.entries, batch


class Switched(nn.Module):
    """A module whose forward branches on more than its inputs, weights and attributes."""

    board: Board

    def refusal(self) -> str | None:
        """Why no op runs the module as it is now, or None."""
        raise NotImplementedError

    @property
    def switched(self) -> Switches:
        """All that it branches on: a captured call holds while this is equal."""
        raise NotImplementedError


def switches(module: nn.Module) -> Switches | None:
    """What a module branches on beside its inputs and weights; None for one that says nothing of
    it, or of which another module does."""
    if isinstance(module, Switched):
        return module.switched
    kind: Any = type(module)
    said = may_branch(kind) and INSIDE not in vars(module)
    return switches_of_peft(module) if said else None


@functools.cache
def may_branch(kind: Any) -> bool:
    """Whether `switches` may have something of modules of a class. Of all modules that is asked
    before each call, which this makes quick."""
    return issubclass(kind, Switched) or hasattr(kind, "adapter_layer_names")  # a layer of peft


def switches_of_peft(module: nn.Module) -> Switches:
    """What a layer of peft branches on, which is changed in place. Copies of whole modules, of its
    `modules_to_save`, are such layers, too."""
    layer: Any = module
    active = layer._active_adapter
    return (
        tuple([active] if isinstance(active, str) else active),
        layer._disable_adapters,
        tuple(layer.merged_adapters),
        tuple(vars(module).get("scaling", {}).items()),
    )


def boards_of(modules: Iterable[nn.Module]) -> list[Board]:
    """The boards of these modules, each once."""
    return list({id(m.board): m.board for m in modules if isinstance(m, Switched)}.values())


CHECKS = "_moe_ops_checks_sequences"  # of a compiled model: the board that its calls are held to


def check_sequences_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a call of a compiled model with other sequences than adapters were given
    for."""
    board = model.__dict__.get(CHECKS)
    batch = None if board is None else batch_of(args, kwargs)
    if board is not None and batch is not None:
        board.check(batch)


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The sequences of a call of a model; None for one without tokens."""
    named = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
    for x in (*named, *args, *kwargs.values()):  # of which pictures are not counted so
        if isinstance(x, Tensor) and x.dim() > 1:
            return x.shape[0]
    return None
