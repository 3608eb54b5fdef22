"""Moving physical experts: in place, in lockstep over all tensors that belong to them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from moe_ops.checks.options import check_int, check_ints, check_type
from moe_ops.checks.signature import described
from moe_ops.registry.derived import written

HELD = -1  # stands for the row that is kept aside while a cycle turns


@dataclass(frozen=True, slots=True)
class Moves:
    """Rows that change: what was in row `source` shall be in row `destination`, for each (source,
    destination) of `pairs`, all at once.

    Rows are the leading axis of length num_rows: the physical experts of all ranks, or the slots of
    one. A row may go to several others, or be lost.
    """

    num_rows: int
    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        check_int("num_rows", self.num_rows, least=0)
        check_type("pairs", self.pairs, tuple, "pairs of rows, such as ((0, 1), (1, 0))")
        for pair in self.pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(
                    f"each of pairs must be (source, destination), got {described(pair)}"
                )
        for row in (row for pair in self.pairs for row in pair):
            check_int("each row of pairs", row)
            if not 0 <= row < self.num_rows:
                raise ValueError(f"row {row} must be from 0 to {self.num_rows - 1}")
        twice = [row for row, n in Counter(to for _, to in self.pairs).items() if n > 1]
        if twice:
            raise ValueError(
                f"row {twice[0]} is the destination of two moves; leave all but one of them out"
            )

    def steps(self) -> Iterator[tuple[int, int]]:
        """The moves as copies (source, destination), one after the other, in an order in which no
        source is overwritten before it is read. HELD as destination sets a row aside, as source it
        gives it back."""
        source_of = {to: source for source, to in self.pairs if source != to}
        readers = Counter(source_of.values())
        free = [to for to in source_of if not readers[to]]
        while source_of:
            while free:
                to = free.pop()
                source = source_of.pop(to)
                yield source, to
                readers[source] -= 1
                if not readers[source] and source in source_of:
                    free.append(source)
            if source_of:  # only cycles are left: open one
                first = next(iter(source_of))
                yield first, HELD
                to = first
                while (source := source_of.pop(to)) != first:
                    yield source, to
                    to = source
                yield HELD, to

    def of_rank(self, start: int, stop: int) -> RankMoves:
        """What the rank with the rows start ... stop - 1 does."""
        here = range(start, stop)
        return RankMoves(
            tuple((source - start, to) for source, to in self.pairs
                  if source in here and to not in here),
            Moves(stop - start, tuple((source - start, to - start) for source, to in self.pairs
                                      if source in here and to in here)),
            tuple((source, to - start) for source, to in self.pairs
                  if source not in here and to in here),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankMoves:
    """One rank's part of moves, its rows counted from 0: first read what it `sends` (its row,
    destination elsewhere), then apply `local`, then write what it `receives` (source elsewhere, its
    row).
    """

    sends: tuple[tuple[int, int], ...]
    local: Moves
    receives: tuple[tuple[int, int], ...]


def moves_between(
    old: Sequence[int], new: Sequence[int], sizes: Sequence[int], ranks_per_node: int
) -> Moves:
    """The moves after which each row holds the expert that `new` says, `old` being what it holds.

    sizes: the rows of each rank. An expert with several replicas comes from the same rank if one is
    there, else from the same node, else from the first. Raises ValueError for an expert that is
    nowhere yet, and for other numbers of rows.
    """
    old, new = check_ints("old", old, least=0), check_ints("new", new, least=0)
    sizes = check_ints("sizes", sizes, least=0)
    check_int("ranks_per_node", ranks_per_node, least=1)
    if not len(old) == len(new) == sum(sizes):
        raise ValueError(
            f"{len(old)} old rows, {len(new)} new ones, {sum(sizes)} on all ranks by sizes: must "
            "be the same"
        )
    rank_of = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    rows_of: defaultdict[int, list[int]] = defaultdict(list)
    for row, expert in enumerate(old):
        rows_of[expert].append(row)

    def distance(row: int, to: int) -> int:
        here, there = rank_of[row], rank_of[to]
        return 0 if here == there else 1 if here // ranks_per_node == there // ranks_per_node else 2

    pairs = []
    for to, expert in enumerate(new):
        if old[to] == expert:
            continue
        if expert not in rows_of:
            raise ValueError(
                f"expert {expert} is in no old row, so it cannot be moved to row {to}; "
                "give `new` only experts that `old` has"
            )
        pairs.append((min(rows_of[expert], key=lambda row: distance(row, to)), to))
    return Moves(len(old), tuple(pairs))


def apply_moves(tensors: Mapping[str, Tensor], moves: Moves, *, shared: int = 0) -> None:
    """Move the rows of all tensors in place: weights, scales, zero points and biases, prepared for
    a backend or not.

    Storage stays where it is, so captured graphs go on with the moved experts, and what backends
    made of scales is made anew, where it is; one row of memory is used besides. Views of the same
    rows, under two names, move once. `shared` says how many rows, those of fused shared experts,
    follow the ones that may move, and stay.

    Raises ValueError, before anything is written, for a tensor with another number of rows, an
    expanded one, one made under torch.inference_mode(), and two that share a part of their memory.
    """
    check_type("moves", moves, Moves, "Moves")
    check_int("shared", shared, least=0)
    _check(tensors, moves.num_rows + shared)
    distinct = {_extent(t): t for t in tensors.values()}
    steps = list(moves.steps())
    with torch.no_grad():
        for tensor in distinct.values():
            held = tensor[:0]  # nothing yet
            for source, to in steps:
                if to == HELD:
                    held = tensor[source].clone()
                elif source == HELD:
                    tensor[to].copy_(held)
                else:
                    tensor[to].copy_(tensor[source])
    if steps:
        written(tensors.values())


def _check(tensors: Mapping[str, Tensor], num_rows: int) -> None:
    check_type("tensors", tensors, Mapping, "tensors by their names")
    for name, t in tensors.items():
        check_type(f"{name} of tensors", t, Tensor, "a Tensor")
        if t.dim() == 0 or t.shape[0] != num_rows:
            raise ValueError(
                f"{name} must have {num_rows} physical experts on axis 0, got shape "
                f"{tuple(t.shape)}; leave out what experts share"
            )
        if any(n > 1 and step == 0 for n, step in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(f"{name} is expanded and cannot be written to; clone it first")
        if t.is_inference():
            raise ValueError(
                f"{name} was made under torch.inference_mode() and cannot be written to outside; "
                "load weights under torch.no_grad() instead"
            )
    names = {_extent(t): name for name, t in tensors.items() if t.numel()}
    extents = sorted(names)
    for a, b in pairwise(extents):
        if a.device == b.device and b.start < a.stop:
            raise ValueError(
                f"{names[a]} and {names[b]} share a part of their memory and would move twice; "
                "pass the tensor that holds both"
            )


class _Extent(NamedTuple):
    """The addresses between which a tensor lies; equal ones are views of the same rows."""

    device: str
    start: int
    stop: int


def _extent(t: Tensor) -> _Extent:
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    size = (last + 1) * t.element_size() if t.numel() else 0
    return _Extent(str(t.device), t.data_ptr(), t.data_ptr() + size)
