"""Weights that were quantised in the order of their activations (act-order, desc_act).

Their groups are gathered from all over the columns, as a g_idx says:

    w[f, d] = (q[f, d] - zero[f, g_idx[d]]) * scale[f, g_idx[d]]

Ops want groups of neighbours, so the columns are put in the order of their groups, and whatever
multiplies them too, which changes no weight: for w2 that is what w1 and w3 make, so their rows take
the order of w2's columns; for w1 and w3 it is the layer's input, which the layer itself puts in
order, once for all of its experts or, if each has an order of its own, once for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_ops.layer import MoELayer
from moe_ops.quant.packing import pack, unpack
from moe_ops.weights.advice import advising
from moe_ops.weights.layouts import to_dtype
from moe_ops.weights.shards import ALL, BLOCKS, ShardPlan, Span, spans

REMEDY = "quantise without desc_act, or with static_groups"


@dataclass(eq=False, slots=True)
class Orders:
    """The orders of columns that one load has found so far, of the experts here."""

    # Of w13 (False) and w2 (True), by logical expert: the column that comes at each place, None for
    # the order that it has, and the entry that says so.
    columns: dict[tuple[bool, int], tuple[Tensor | None, str]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)  # experts of which there are weights already
    input: tuple[Tensor | None, str] | None = None  # of w13, for all experts
    input_written: bool = False
    some: bool = False  # whether there is anything to put in order

    def tell(
        self, layer: MoELayer, second: bool, expert: int, order: Tensor | None, name: str
    ) -> None:
        """Keep the order of an expert. Raises ValueError for one that cannot be had."""
        if order is not None and expert in self.written:
            raise ValueError(
                f"orders the columns of expert {expert}, whose weights are loaded already; load "
                "g_idx first"
            )
        before, other = self.columns.get((second, expert), (order, name))
        if not _same(before, order):
            raise ValueError(f"expert {expert} has another order of its columns in {other}")
        if not second:
            self._tell_input(layer, expert, order, name)
        self.columns[second, expert] = (order, other)
        self.some = self.some or order is not None

    def _tell_input(self, layer: MoELayer, expert: int, order: Tensor | None, name: str) -> None:
        if order is not None and layer.input_order is None:
            raise advising(
                ValueError,
                "was quantised in the order of its activations",
                "make the layer with QuantConfig(ordered_input=True)",
            )
        if _per_expert(layer):
            return
        before, other = self.input or (order, name)
        if not _same(before, order):
            raise ValueError(
                f"expert {expert} was quantised in another order of its input than {other}, and "
                "the layer orders its input once, for all of its experts; make it with "
                "QuantConfig(ordered_input=True, per_expert_order=True), which orders each "
                f"token's columns once for each of its experts, or {REMEDY}"
            )
        self.input = (before, other)

    def input_writes(
        self, layer: MoELayer, here: Iterable[tuple[int, tuple[int, ...]]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The order of the layer's input, to be written once, or those of experts `here`, with
        their slots.
        """
        if layer.input_order is None:
            return
        if _per_expert(layer):
            for expert, slots in here:
                order, _ = self.columns[False, expert]
                for slot in slots:
                    yield layer.input_order[slot], _written(order, layer)
        elif self.input is not None and not self.input_written:
            self.input_written = True
            yield layer.input_order, _written(self.input[0], layer)

    def tell_none(self, layer: MoELayer, experts: Iterable[int], name: str) -> None:
        """Record that w13 of experts without g_idx has its columns in the order of the input."""
        if layer.input_order is None:
            return
        for expert in experts:
            if (False, expert) not in self.columns:
                self.tell(layer, False, expert, None, name)

    def of(self, second: bool, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """The orders of an expert's rows and columns, of w13 or w2."""
        inner, _ = self.columns.get((True, expert), (None, ""))
        return (
            (None, inner) if second else (inner, self.columns.get((False, expert), (None, ""))[0])
        )


def order_of(layer: MoELayer, shard: str, g_idx: Tensor, *, sharded: bool) -> Tensor | None:
    """The columns of an expert's weight in the order of their groups, int64; None if they are.

    Raises ValueError if no order of columns makes groups of the layer's format.
    """
    _, columns = spans(layer.sizes, shard, sharded=sharded)
    if tuple(g_idx.shape) != (columns.whole,):
        raise ValueError(f"expected the shape {[columns.whole]}, found {list(g_idx.shape)}")
    if g_idx.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"is {g_idx.dtype}, but the groups of columns are int32 or int64")
    format = None if layer.quant is None else layer.quant.format
    group = columns.whole if format is None or format.group[1] == ALL else format.group[1]
    wanted, found = torch.arange(columns.whole) // group, g_idx.long().cpu()
    if torch.equal(found, wanted):
        return None
    order = found.argsort(stable=True)
    if not torch.equal(found[order], wanted):
        raise ValueError(
            f"its groups are no {len(wanted) // group} of {group} columns each, as the layer's "
            f"format has them; {REMEDY}"
        )
    if sharded:
        raise ValueError(
            "the part of a rank cannot be put in order, because its columns are of groups of all "
            "ranks; load the whole tensors (sharded=False)"
        )
    if layer.quant is not None and layer.quant.inputs:
        raise ValueError(
            f"puts columns in another order, which changes how inputs of {layer.quant.inputs} are "
            "grouped; leave inputs in 16 bits"
        )
    return order


def ordered_sources(
    how: ShardPlan, t: Tensor, rows: Tensor | None, columns: Tensor | None
) -> Iterator[tuple[Tensor, int, int]]:
    """`ShardPlan.sources` with rows and columns of the whole matrix in these orders first.

    A rank's part is cut out of the whole in order: with tensor parallelism the rows of w13 and the
    columns of w2 that belong together stay on one rank, in whole groups.
    """
    if how.part != "weight":
        yield from how.sources(t) if rows is None else _numbers(how, t, rows)
        return
    t, matrix = how.as_matrix(t)
    if matrix.rows.values > 1 or how.format is None:
        raise ValueError(f"columns of such weights cannot be put in order; {REMEDY}")
    element = how.format.element
    step = max(how.rows.size // BLOCKS, 1)
    for place, half in enumerate(how.halves):
        ids = _rows(how, place, rows)
        for first in range(0, len(ids), step):
            block = t.index_select(matrix.rows.place, ids[first : first + step].to(t.device))
            if matrix.convert is not None:
                block = matrix.convert(block, how.format)
            elif matrix.rows.place == 1:
                block = block.T
            if columns is not None:
                kept = _part(columns, how.columns).to(t.device)
                codes = unpack(block, element).index_select(1, kept)
                block = pack(codes, element)
            yield to_dtype(block, how.target.dtype, how.part), half, first


def _numbers(how: ShardPlan, t: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Scales, zero points or biases of rows in order: small, so converted whole."""
    if how.rows.whole != len(rows):
        raise ValueError(f"rows that share numbers cannot be put in order; {REMEDY}")
    t, matrix = how.as_matrix(t)
    if matrix.convert is not None:
        t = matrix.convert(t, how.format)
    elif matrix.rows.place == 1:
        t = t.T
    for place, half in enumerate(how.halves):
        piece = t.index_select(0, _rows(how, place, rows).to(t.device))
        yield to_dtype(piece, how.target.dtype, how.part), half, 0


def _rows(how: ShardPlan, place: int, order: Tensor | None) -> Tensor:
    """The stored rows of the half at `place` that this rank keeps, in order."""
    ids = _part(torch.arange(how.rows.whole) if order is None else order, how.rows)
    if how.stored_alternating:
        return ids * len(how.halves) + place
    return ids + place * how.rows.whole


def _part(order: Tensor, of: Span) -> Tensor:
    return order[of.start : of.start + of.size]


def _per_expert(layer: MoELayer) -> bool:
    return layer.quant is not None and layer.quant.per_expert_order


def _written(order: Tensor | None, layer: MoELayer) -> Tensor:
    return torch.arange(layer.sizes.hidden_size) if order is None else order


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
